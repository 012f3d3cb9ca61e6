"""The checks of a call as one operator in the graphs of ``torch.compile``.

The compiler reads ``forward`` once, and then runs a graph of tensor operators. What a call checks
of shapes, dtypes and literals is checked while the compiler reads it: torch itself compiles again
for others. What depends on the moment of a call cannot be in a graph: whether the parameters are
still those of the module, whether the ranks of a unit were given the same values, and which
microbatch random numbers are drawn for. So a graph holds one operator that torch does not look
into. It runs those checks as an eager call does.

The operator finds the module by a number. A graph cannot hold the module itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
# ``mark`` is written to, as torch says. It would drop an operator that returns nothing otherwise.
_LIBRARY.define(
    "begin_call(Tensor(a!) mark, Tensor[] arguments, int module, bool trains) -> ()",
)


class CheckedCalls(Protocol):
    """A module whose calls begin with checks."""

    def argument_names(self) -> tuple[str, ...]:
        """The paths of the tensors among the arguments, in order."""

    def begin_call(self, tensors: Mapping[str, Tensor], trains: bool) -> None:
        """Check what no graph can hold. ``trains``: whether gradients are recorded."""


_modules: weakref.WeakValueDictionary[int, CheckedCalls] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class CallNumber:
    """The number by which graphs name a module, and the tensor that the operator writes to."""

    __slots__ = ("mark", "number")

    def __init__(self, module: CheckedCalls) -> None:
        self.number = next(_numbers)
        self.mark = torch.zeros(1, dtype=torch.int64)
        _modules[self.number] = module

    def begin_call(self, tensors: Mapping[str, Tensor], trains: bool) -> None:
        """Put the checks of a call into the graph that is made. ``tensors``: by path."""
        torch.ops.shardwright.begin_call(self.mark, list(tensors.values()), self.number, trains)


def _begin_call(mark: Tensor, arguments: list[Tensor], module: int, trains: bool) -> None:
    called = _modules[module]
    called.begin_call(dict(zip(called.argument_names(), arguments, strict=True)), trains)


def _begin_nothing(mark: Tensor, arguments: list[Tensor], module: int, trains: bool) -> None:
    """What the compiler runs on tensors without values."""


_LIBRARY.impl("begin_call", _begin_call, "CompositeExplicitAutograd")
_LIBRARY.impl("begin_call", _begin_nothing, "Meta")
