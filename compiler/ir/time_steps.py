"""One step of a loop over time, and how its steps hang together.

The operator ``time_steps`` runs the same operators again and again. Its last argument is a
:class:`TimeSteps`, which says what one step does. Example: of

    for t in range(512):
        h = torch.tanh(x[:, t] + h)
        ys.append(h)
    y = torch.stack(ys, 1)

``ops`` are the indexing, the sum and the tanh, the number ``t`` is ``StepIndex(0, 1)``, ``inputs``
are ``h`` and ``x``, of which ``h`` is carried from step to step, and ``h`` is stacked along dim 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.compiler.ir.op import Arg, IROp, leaves, map_leaves
from shardwright.compiler.ir.value import IRValue

TIME_STEPS = "time_steps"
"""The name of the operator."""


@dataclass(frozen=True, slots=True)
class StepIndex:
    """A number that grows by ``stride`` with each step: in step ``t`` it is ``start + stride *
    t``.
    """

    start: int
    stride: int

    def at(self, step: int) -> int:
        """The number in a step."""
        return self.start + self.stride * step

    @property
    def source(self) -> str:
        """The number as Python source, with ``t`` for the step."""
        if self.stride == 1 and not self.start:
            return "t"
        if self.stride == 1:
            return f"t {'-' if self.start < 0 else '+'} {abs(self.start)}"
        if self.stride == -1:
            return f"{self.start} - t"
        return f"{self.start} + {self.stride} * t" if self.start else f"{self.stride} * t"


@dataclass(frozen=True, slots=True)
class Stacked:
    """A value of each step, laid end to end: along a new dim (``torch.stack``), or along a dim that
    it has (``torch.cat``).
    """

    value: IRValue
    dim: int
    is_new: bool


@dataclass(frozen=True, eq=False)
class TimeSteps:
    """What the operator ``time_steps`` does ``count`` times.

    - ``ops``: the operators of one step, with :class:`StepIndex` in the place of numbers that
      follow the step.
    - ``inputs``: what they read from outside, by the names that ``ops`` have for it. The first of
      them are carried: they have another value in each step.
    - ``carried``: the value that each of these has in the next step.
    - ``stacked``: the first results of the operator. ``last``: the values of the last step that are
      its other results.

    Two of them are equal if they do the same and have the same names.
    """

    count: int
    ops: tuple[IROp, ...]
    inputs: tuple[IRValue, ...]
    carried: tuple[IRValue, ...]
    stacked: tuple[Stacked, ...]
    last: tuple[IRValue, ...]

    def in_step(self, step: int) -> tuple[IROp, ...]:
        """The operators of one of the steps, with its numbers."""
        return tuple(
            op.map_args(lambda leaf: leaf.at(step) if isinstance(leaf, StepIndex) else leaf)
            for op in self.ops
        )

    def map_args(self, function: Callable[[Arg], Arg]) -> TimeSteps:
        """The steps with ``function`` applied to every leaf of the arguments of their
        operators.
        """
        return replace(self, ops=tuple(op.map_args(function) for op in self.ops))

    def literals(self) -> Iterator[Arg]:
        """The leaves of the arguments of all operators that are no values."""
        for op in self.ops:
            for _, arg in op.args:
                yield from (leaf for leaf in leaves(arg) if not isinstance(leaf, IRValue))

    @cached_property
    def text(self) -> str:
        """Everything that it says, without lines of the user's code."""

        def shown(value: Arg) -> Arg:
            if not isinstance(value, IRValue):
                return value
            return f"%{value.name}: {value.dtype} {value.shape} {value.requires_grad}"

        lines = [f"{self.count} steps of {[shown(value) for value in self.inputs]}"]
        for op in self.ops:
            args = [(name, map_leaves(arg, shown)) for name, arg in op.args]
            lines.append(f"{[shown(value) for value in op.results]} = {op.target}({args})")
        lines.append(f"next {[value.name for value in self.carried]}")
        stacked = [(made.value.name, made.dim, made.is_new) for made in self.stacked]
        lines.append(f"give {stacked}, {[value.name for value in self.last]}")
        return "\n".join(lines)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimeSteps) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text
