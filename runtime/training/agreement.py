"""Checks, every so many steps, that ranks agree on what has to be the same on all of them.

Nothing stops a script from setting another learning rate on one rank, from stepping twice there, or
from giving it another batch. The collectives still meet, and the numbers are wrong. So ranks
compare, in the first step and then in every ``ComputeConfig.check_ranks_every``-th one:

- all ranks: how many steps they have taken, how often they have cleared gradients that no step has
  used, how many calls no backward has followed, and the options of their optimizer, which
  schedulers change;
- the ranks of a unit: the arguments of the next call
  (:mod:`shardwright.runtime.module.call_checks`);
- ranks with copies of a parameter: its values (:mod:`shardwright.runtime.training.copies`).
  Before the first step an optimizer compares them by itself.

The first two are small, so they are compared in the 2nd, 3rd, 5th, 9th, ... step, too: scripts go
wrong early.

[Note: When ranks compare] A comparison is a collective, so all ranks must come to it at the same
place among their collectives, also where they do not agree on anything else. So steps are not
counted to find that place, since a rank may have taken one more. Counted are sums of gradients,
which ranks can only take together. Nor do modules count their calls: ``torch.compile`` would
compile a call again for every new count, while a flag that is set now and then has two values.
"""

from __future__ import annotations

import json
import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.runtime.errors import UsageError, format_error
from shardwright.runtime.ops.random import RngState
from shardwright.runtime.ranks.failures import concerning
from shardwright.runtime.ranks.world import World
from shardwright.runtime.training.copies import Copies, CopiesDiffer


class Part(Protocol):
    """A compiled part of the model."""

    rng: RngState

    def expect_comparison(self) -> None:
        """Let the next call compare its arguments."""


@dataclass(frozen=True, slots=True)
class _Standing:
    """Where a rank stands in its training. ``groups``: the options of each parameter group, which
    all ranks have alike. ``num_dropped``: how often it has cleared gradients that no step has used.
    ``num_unused``: how many calls were followed by another call and no backward.
    """

    num_steps: int
    step: int
    groups: Sequence[Mapping[str, str]]
    num_dropped: int
    num_unused: int

    def to_json(self) -> list[Any]:
        return [self.num_steps, self.step, self.groups, self.num_dropped, self.num_unused]

    def digest(self) -> list[int]:
        """Numbers that are the same on two ranks where everything else is. ``num_unused`` is the
        last one: it may differ for a good reason.
        """
        return [self.num_steps, self.step, _crc(self.groups), self.num_dropped, self.num_unused]


class TrainingAgreement:
    """Compares how all ranks train one model, with each ``interval``-th sum of gradients; with 0
    with the first one only.

    ``parts``: the compiled parts of the model. ``copies``: its parameters with copies.
    """

    def __init__(self, world: World, parts: Sequence[Part], copies: Copies, interval: int) -> None:
        self._world = world
        self._copies = copies
        self._parts = [weakref.ref(part) for part in parts]
        self._interval = interval
        self._num_sums = 0
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._num_steps = 0
        self._num_dropped = 0
        self._num_unused = 0
        self._has_warned = False

    def watch(self, optimizer: Optimizer) -> None:
        """Compare the options of ``optimizer`` from now on, too."""
        self._optimizer = weakref.ref(optimizer)

    def note_step(self) -> None:
        """The optimizer has taken a step."""
        self._num_steps += 1

    def note_dropped(self) -> None:
        """Gradients were cleared that no step has used. A rank that leaves out a step meets the
        others in their next sum, so that it has taken as many steps as they have; it has dropped
        what they have not.
        """
        self._num_dropped += 1

    def note_unused(self) -> None:
        """A call was followed by another one and no backward. A rank that leaves out a batch behind
        its forward has taken as many steps as the others at their next sum, and has dropped
        nothing.
        """
        self._num_unused += 1

    def check(self) -> None:
        """Count a sum of gradients, and compare if it is time. Collective.

        Raises :class:`UsageError` on all ranks, naming what differs, and on which ranks.
        """
        number, interval = self._num_sums, self._interval
        self._num_sums += 1
        if self._world.size == 1:
            return
        is_due = number == 0 or (interval and number % interval == 0)
        if is_due or (number < interval and number.bit_count() == 1):
            if number:  # the first call has compared already
                for part in self._living_parts():
                    part.expect_comparison()
            self._compare_standings()
        # One step later, when the arguments of the call have been compared: other arguments make
        # copies drift, too, and whoever reads the error wants the cause.
        if interval and number > interval and number % interval == 1 % interval:
            _refuse_copies(self._copies.find_on_all_ranks())

    def _compare_standings(self) -> None:
        mine = self._standing()
        with concerning("what each rank has done so far, which ranks compare"):
            digests = self._world.everyone.all_gather(
                torch.tensor(mine.digest(), device=self._world.device), phase="setup"
            )
        if any(not torch.equal(digests[0][:-1], other[:-1]) for other in digests):
            everyones = self._world.all_gather_object(mine.to_json())
            self._refuse([_Standing(*found) for found in everyones])
        self._warn_of_unused([int(digest[-1]) for digest in digests])

    def _warn_of_unused(self, counts: Sequence[int]) -> None:
        """Say once, on one rank, that ranks have left out other numbers of batches. Each sum is one
        of gradients still, and units may call a module as often as their data want before they go
        back: so this is no error.
        """
        found = _differences({rank: str(count) for rank, count in enumerate(counts)})
        if found is None or self._has_warned:
            return
        self._has_warned = True
        if self._world.rank == 0:
            warnings.warn(
                format_error(
                    "the ranks do not agree on how many calls of the module were followed by no "
                    "backward",
                    why=found,
                    hint="leave out a batch on all ranks or on none: a rank that leaves one out "
                    "meets the others one batch late, and at the end they wait for it",
                ),
                stacklevel=2,
            )

    def _living_parts(self) -> list[Part]:
        return [part for reference in self._parts if (part := reference()) is not None]

    def _standing(self) -> _Standing:
        optimizer = None if self._optimizer is None else self._optimizer()
        groups = [] if optimizer is None else [_options(group) for group in optimizer.param_groups]
        step = next((part.rng.step for part in self._living_parts()), 0)
        return _Standing(self._num_steps, step, groups, self._num_dropped, self._num_unused)

    def _refuse(self, standings: Sequence[_Standing]) -> None:
        ranks = range(len(standings))
        # The first difference that is found is told.
        _compare(
            "the number of steps that the optimizer has taken",
            {rank: str(standings[rank].num_steps) for rank in ranks},
            "call optimizer.step() equally often on all ranks: what one rank skips, all of "
            "them must skip",
        )
        _compare(
            "how often gradients were cleared that no step has used",
            {rank: str(standings[rank].num_dropped) for rank in ranks},
            "call optimizer.step() equally often on all ranks: what one rank skips, all of "
            "them must skip",
        )
        _compare(
            "the step at which training stands",
            {rank: str(standings[rank].step) for rank in ranks},
            "load the same checkpoint on all ranks",
        )
        for index in range(max(len(standing.groups) for standing in standings)):
            groups = {rank: _at(standings[rank].groups, index) for rank in ranks}
            for name in sorted({name for group in groups.values() for name in group}):
                _compare(
                    f"{name!r} of parameter group {index}",
                    {rank: group.get(name, "no such option") for rank, group in groups.items()},
                    "set options and step schedulers alike on all ranks; what follows from a "
                    "loss or a metric must "
                    "follow from that of all ranks",
                )
        raise AssertionError(f"these ranks agree, and their digests do not: {standings}")


def _refuse_copies(found: CopiesDiffer | None) -> None:
    if found is None:
        return
    hint = (
        "change parameters alike on all ranks: draw numbers for them from a torch.Generator that "
        "is seeded alike on all ranks for each parameter. Then go on from the last checkpoint: "
        "copies that differ stay different"
    )
    if found.gap is not None:
        hint += (
            ". Where no script writes into them, kernels that add in no fixed order may have: "
            "torch.use_deterministic_algorithms(True)"
        )
    raise UsageError(
        f"parameter {found.name!r} is not the same any more on the ranks with copies of it",
        why=str(found),
        hint=hint,
    )


def _at(groups: Sequence[Mapping[str, str]], index: int) -> Mapping[str, str]:
    return groups[index] if index < len(groups) else {}


def _compare(what: str, values: Mapping[int, str], hint: str) -> None:
    found = _differences(values)
    if found is not None:
        raise UsageError(f"the ranks do not agree on {what}", why=found, hint=hint)


def _differences(values: Mapping[int, str]) -> str | None:
    """Which ranks have which of several values, in words; ``None`` if all have the same."""
    alike: dict[str, list[int]] = {}
    for rank, value in values.items():
        alike.setdefault(value, []).append(rank)
    if len(alike) == 1:
        return None
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {value}"
        for value, ranks in alike.items()
    )


_NOT_OPTIONS = frozenset({"params", "param_names", "param_shards"})


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    """The options that are numbers, texts, or lists of them, as texts."""
    plain = {name: _text(value) for name, value in group.items() if name not in _NOT_OPTIONS}
    return {name: text for name, text in plain.items() if text is not None}


def _text(value: Any) -> str | None:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        texts = [_text(item) for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return repr(value) if isinstance(value, bool | int | float | str) else None


def _crc(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
