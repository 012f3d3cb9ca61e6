"""The seconds of a call, and the seconds of calls that were measured, by what each call is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.cost.local_calls import (
    LocalCall,
)
from shardwright.compiler.ir.op import map_leaves
from shardwright.compiler.ir.value import IRValue


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one forward and of its part of one backward."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s

    def __add__(self, other: OpTime) -> OpTime:
        return OpTime(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


@dataclass(frozen=True)
class OperatorTimes:
    """Measured times by :func:`call_key`: operator, local shapes, dtypes and attributes."""

    entries: Mapping[str, OpTime] = field(default_factory=dict)

    def of(self, call: LocalCall) -> OpTime | None:
        """The measured time of a call, if there is one."""
        return self.entries.get(call_key(call)) if self.entries else None

    def to_json(self) -> dict[str, list[float]]:
        return {key: [time.forward_s, time.backward_s] for key, time in self.entries.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[float]]) -> OperatorTimes:
        return cls({key: OpTime(*times) for key, times in data.items()})


def call_key(call: LocalCall) -> str:
    """The key of a measured time: ``linear [[4, 8], "float32", true] [[16, 8], "float32", true]``.

    Attributes follow the operands. Attributes that are sizes of the whole tensor are left out, and
    the shapes of the rank's results stand in their place.
    """
    # Shape, dtype and whether it takes a gradient.
    operands = (
        json.dumps([list(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad])
        for x in call.operands
    )
    # Masks and the like are values, which do not change the time.
    given = [(name, arg) for name, arg in call.op.args if not _holds_values(arg)]
    attributes = [
        f"{name}={map_leaves(arg, _in_numbers)!r}" for name, arg in given if not _is_size(name, arg)
    ]
    # A size was left out, so the shape of the results says what the rank makes.
    results = (
        ["->", *(json.dumps(list(x.shape)) for x in call.results)]
        if len(attributes) < len(given)
        else []
    )
    return " ".join([call.op.target, *operands, *attributes, *results])


def _holds_values(arg: Any) -> bool:
    return isinstance(arg, IRValue) or (isinstance(arg, tuple) and any(map(_holds_values, arg)))


def _in_numbers(leaf: Any) -> Any:
    """A leaf of an argument, with a number in the place of a dynamic size: calls of different sizes
    take different times.
    """
    if not isinstance(leaf, sympy.Expr):
        return leaf
    number = estimate(leaf)
    return int(number) if number.is_integer() else number


def _is_size(name: str, arg: Any) -> bool:
    """Whether an argument has sizes of the whole tensor, or bounds in it. They would tell apart
    calls that are alike on a rank.
    """
    return isinstance(arg, tuple) and name in SIZE_ARGUMENTS


SIZE_ARGUMENTS = frozenset(
    ("shape", "size", "sizes", "split_size_or_sections", "index", "repeats", "bounds")
)
"""The names of such arguments in the tables of operators. Strides, kernel sizes and dims are tuples
too, but time depends on them.
"""
