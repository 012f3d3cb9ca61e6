"""The pass manager: runs the steps of a compile one after another, and between them times, dumps
and verifies.

A pass takes one immutable form of the program and returns another. After each one the manager

1. notes the seconds it took,
2. writes what it returned as text, numbered, if a dump folder is given (``00-trace.txt``,
   ``01-rules.txt``, ...),
3. verifies it. A form that does not hold its invariants is a defect of the pass; the error names
   the pass and the dump.

A pass that has nothing to do returns the very form it was given. That one was written and verified
before, so the manager does neither again, and the pass is not in the report.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from shardwright.runtime.activity import tell
from shardwright.runtime.errors import InternalError, ShardwrightError
from shardwright.runtime.swap import writing

Before = TypeVar("Before", contravariant=True)
After = TypeVar("After", covariant=True)
In = TypeVar("In")
Out = TypeVar("Out")


class Pass(Protocol[Before, After]):
    """One step of a compile. A pass with options is a frozen dataclass whose fields are the
    options.
    """

    @property
    def name(self) -> str:
        """The word it goes by in dumps and reports."""

    def __call__(self, before: Before, /) -> After:
        """The next form. ``before`` is not changed."""


@dataclass(frozen=True)
class FunctionPass(Generic[In, Out]):
    """A pass without options: a function under a name."""

    name: str
    function: Callable[[In], Out]

    def __call__(self, before: In) -> Out:
        return self.function(before)


AnyPass: TypeAlias = Pass[Any, Any]
"""A pass of a list, where each takes what the one before it returns."""


@dataclass(frozen=True, slots=True)
class Step:
    """How long one step of a compile took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class CompileReport:
    """What a compile spent its time on, step by step in order. A step that ran twice is listed
    twice.
    """

    steps: tuple[Step, ...] = ()

    @property
    def total_s(self) -> float:
        """Seconds of all passes."""
        return sum(step.seconds for step in self.steps)

    def seconds(self) -> dict[str, float]:
        """Seconds by name, in the order of first appearance."""
        totals: dict[str, float] = {}
        for step in self.steps:
            totals[step.name] = totals.get(step.name, 0.0) + step.seconds
        return totals

    def __str__(self) -> str:
        rows = [*self.seconds().items(), ("total", self.total_s)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {seconds:8.3f} s" for name, seconds in rows)


@dataclass
class PassManager:
    """Runs passes. ``verifiers`` and ``printers`` go by the type of what a pass returns; a type
    without a printer is not dumped, one without a verifier is not verified.
    """

    verifiers: Mapping[type, Callable[[Any], object]] = field(default_factory=dict)
    printers: Mapping[type, Callable[[Any], str]] = field(default_factory=dict)
    dump: Path | None = None
    _steps: list[Step] = field(default_factory=list, init=False)
    _num_dumped: int = field(default=0, init=False)

    @property
    def report(self) -> CompileReport:
        """The steps run so far."""
        return CompileReport(tuple(self._steps))

    def run(self, step: Pass[In, Out], before: In) -> Out:
        """Run one pass on ``before`` and return what it makes, checked."""
        tell(step.name)
        start = time.perf_counter()
        after = step(before)
        is_new: bool = after is not before
        if not is_new:
            return after
        self._count(step.name, start)
        printer, verifier = self.printers.get(type(after)), self.verifiers.get(type(after))
        dumped = (
            self._write(self.dump, step.name, printer(after)) if printer and self.dump else None
        )
        if verifier:
            with self.measure("verify"):
                self._verify(verifier, step.name, after, dumped)
        return after

    def run_all(self, passes: Iterable[AnyPass], first: Any) -> Any:
        """Run passes one after another, each on what the one before it made."""
        form = first
        for step in passes:
            form = self.run(step, form)
        return form

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count what happens inside as a step. One that raises is not counted."""
        tell(name)
        start = time.perf_counter()
        yield
        self._count(name, start)

    def _count(self, name: str, start: float) -> None:
        self._steps.append(Step(name, time.perf_counter() - start))

    def _verify(
        self, verifier: Callable[[Any], object], name: str, after: object, dumped: Path | None
    ) -> None:
        try:
            verifier(after)
        except Exception as error:
            if isinstance(error, ShardwrightError) and not isinstance(error, InternalError):
                raise  # says to the user what is wrong with the user's own policy or model
            printer = self.printers.get(type(after))
            if dumped is None and printer:
                dumped = self._write(
                    Path(tempfile.mkdtemp(prefix="shardwright-")), name, printer(after)
                )
            raise InternalError(
                f"pass {name!r} returned a {type(after).__name__} that does not hold its "
                "invariants",
                where=str(dumped) if dumped else None,
                why=str(error),
                hint="this is a defect of shardwright: please report it with that file",
            ) from error

    def _write(self, folder: Path, name: str, text: str) -> Path:
        path = folder / f"{self._num_dumped:02}-{name}.txt"
        with writing("dump", folder, "name a new folder, or one that takes files"):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        self._num_dumped += 1
        return path
