"""Bad values for every argument of everything public, and what came of them.

Each argument of each target is replaced by each value of :data:`VALUES`, the others stay good. A
call is *refused* where one of our errors says so in words, *accepted* where it returns, and *raw*
where any other exception comes out: that is a defect, and so is a call that takes longer than
:data:`LONGEST_S`.
"""

from __future__ import annotations

import collections
import contextlib
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bad_compiler_inputs import (
    compile_targets,
    config_targets,
    graph_targets,
    hardware_targets,
    schedule_targets,
)
from bad_data_inputs import data_targets, expert_targets
from bad_input_targets import Target
from bad_training_inputs import (
    initialize_targets,
    peft_targets,
    rank_targets,
    training_targets,
)
from bad_values import VALUES

import shardwright
from shardwright import ShardwrightError

LONGEST_S = 30.0
"""A call that takes longer has not noticed how much it was asked for."""


@dataclass(frozen=True)
class Trouble:
    """One call that ended in a raw exception, or took too long."""

    target: str
    argument: str
    value: str
    what: str

    def __str__(self) -> str:
        return f"{self.target}({self.argument}={self.value}): {self.what}"


@dataclass
class Counts:
    """``refused``, ``accepted`` and ``raw`` calls by group."""

    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    accepted: collections.Counter[str] = field(default_factory=collections.Counter)
    raw: collections.Counter[str] = field(default_factory=collections.Counter)
    troubles: list[Trouble] = field(default_factory=list)

    def table(self) -> str:
        rows = ["| | calls | refused in words | accepted | raw |", "|---|---|---|---|---|"]
        groups = list(dict.fromkeys((*self.refused, *self.accepted, *self.raw)))
        for name, chosen in [*((group, [group]) for group in groups), ("all", groups)]:
            numbers = [
                sum(counter[group] for group in chosen)
                for counter in (self.refused, self.accepted, self.raw)
            ]
            rows.append(
                f"| {name} | {sum(numbers):,} | "
                + " | ".join(f"{number:,}" for number in numbers)
                + " |"
            )
        return "\n".join(rows)


def run(
    *groups: str,
    names: Sequence[str] = (),
    share: float = 1.0,
    tell: Callable[[str], None] = lambda text: None,
    calls: Collection[tuple[str, str]] | None = None,
) -> Counts:
    """:func:`try_all` of the targets of these groups, or of all; with ``names`` of these functions
    alone; with ``calls`` those alone, each an argument and a value.

    It runs in a temporary folder: calls with names like ``nope`` in the place of a path make files
    where they run.
    """

    def on_rank(rank: int) -> Counts:
        targets = [
            target
            for target in targets_of(Path(folder) / "made", *groups)
            if not names or target.name in names
        ]
        return try_all(targets, VALUES, share, tell, calls)

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        (Path(folder) / "made").mkdir()
        (counts,) = shardwright.run_ranks(1, on_rank, timeout_s=86400)
    return counts


def attempt(
    counts: Counts, target: Target, argument: str, value: str, call: Callable[[], Any]
) -> None:
    """Call, and count what comes of it."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except ShardwrightError as error:
        counts.refused[target.group] += 1
        if type(error) is shardwright.InternalError:
            counts.troubles.append(
                Trouble(target.name, argument, value, f"an internal error: {error.what}")
            )
    except Exception as error:
        frames = [
            f"{Path(f.filename).name}:{f.lineno}"
            for f in traceback.extract_tb(error.__traceback__)[-4:]
        ]
        counts.raw[target.group] += 1
        text = f"{type(error).__name__}: {_text_of(error)} ({' > '.join(frames)})"
        counts.troubles.append(Trouble(target.name, argument, value, text))
    else:
        counts.accepted[target.group] += 1
    if time.monotonic() - start > LONGEST_S:
        counts.troubles.append(
            Trouble(target.name, argument, value, f"it took {time.monotonic() - start:.0f} s")
        )


def _text_of(error: Exception) -> str:
    try:
        return str(error)[:100]
    except Exception:  # of a number with too many digits, or of what has no text
        return "without text"


def try_all(
    targets: Sequence[Target],
    values: Mapping[str, Callable[[], Any]],
    share: float = 1.0,
    tell: Callable[[str], None] = lambda text: None,
    calls: Collection[tuple[str, str]] | None = None,
) -> Counts:
    """Try the values on every argument; with ``share`` below 1 a random part of all calls, the same
    each time; with ``calls`` those alone, each an argument and a value. ``tell`` gets each failure
    when it is there, and the names of the targets.
    """
    counts, dice = Counts(), random.Random(0)
    for target in targets:
        start, known = time.monotonic(), len(counts.troubles)
        target.function(**target.good())  # must work, or nothing is told by what follows
        for argument, value in calls_of(target, values):
            if dice.random() <= share and (calls is None or (argument, value) in calls):
                given = {**target.good(), argument: values[value]()} if argument else None
                attempt(
                    counts,
                    target,
                    argument or "<other arguments>",
                    value,
                    _call(target, given, value),
                )
        for trouble in counts.troubles[known:]:
            tell(str(trouble))
        tell(
            f"# {target.name}: {len(counts.troubles) - known} defects, "
            f"{time.monotonic() - start:.1f} s"
        )
    return counts


def calls_of(target: Target, values: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, str]]:
    """Argument and value of each call; an empty argument for calls with too few, too many or
    unknown ones.
    """
    # Those that are written here for one call of others say nothing about numbers of arguments.
    if target.function.__module__ not in {make.__module__ for make in MAKERS}:
        yield from (("", how) for how in ("none", "unknown", "too many"))
    calls = ((argument, value) for argument in target.arguments for value in values)
    yield from (call for call in calls if call not in OWN)


OWN = {
    ("pas_policy", "nn.Linear"),
    ("policy", "nn.Linear"),
    ("scale_fn", "Linear"),
    ("where", "Linear"),
    ("optimizer_fn", "Linear"),
    ("rename", "int"),
    ("rename", "Linear"),
    ("fn", "Linear"),
    ("optimizer", "Linear"),
}
"""Functions of the caller's that fail when they are called: what they raise is the caller's own."""


def _call(target: Target, given: dict[str, Any] | None, how: str) -> Callable[[], Any]:
    if given is not None:
        return lambda: target.function(**given)
    if how == "none":
        return target.function
    if how == "unknown":
        return lambda: target.function(**target.good(), no_such_argument=1)
    return lambda: target.function(*range(40))


MAKERS: Mapping[Callable[[Path], list[Target]], Sequence[str]] = {
    config_targets: ("configs",),
    hardware_targets: ("hardware", "hardware files"),
    schedule_targets: ("schedules", "schedule files"),
    graph_targets: ("builder", "plans", "plan files", "operators"),
    compile_targets: ("compile", "options"),
    training_targets: ("modules", "optimizers", "checkpoints", "states"),
    rank_targets: ("ranks",),
    data_targets: ("data",),
    expert_targets: ("experts",),
    initialize_targets: ("initialize",),
    peft_targets: ("peft",),
}
"""What makes targets, and their groups. In a job of one rank, as of :func:`run_ranks`."""


def targets_of(folder: Path, *groups: str) -> list[Target]:
    """The targets of these groups, or of all."""
    made = [
        make(folder)
        for make, found in MAKERS.items()
        if not groups or not set(groups).isdisjoint(found)
    ]
    return [
        target for targets in made for target in targets if not groups or target.group in groups
    ]
