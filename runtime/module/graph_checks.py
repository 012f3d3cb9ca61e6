"""The checks of a call as one operator in the graphs of ``torch.compile``.

What a call checks of shapes, dtypes and literals is checked while the compiler reads it: torch
itself compiles again for others. The rest depends on the moment of the call, and runs in an
operator as it does in an eager call (see :mod:`shardwright.runtime.graph_objects`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from shardwright.runtime.graph_objects import define_operator, numbered, object_of


class CheckedCalls(Protocol):
    """A module whose calls begin with checks."""

    def argument_names(self) -> tuple[str, ...]:
        """The paths of the tensors among the arguments, in order."""

    def begin_call(self, tensors: Mapping[str, Tensor], trains: bool) -> None:
        """Check what no graph can hold. ``trains``: whether gradients are recorded."""


class GraphChecks:
    """Puts the checks of the calls of a module into graphs."""

    __slots__ = ("_mark", "_module")

    def __init__(self, module: CheckedCalls) -> None:
        self._module = numbered(module)
        self._mark = torch.zeros(1, dtype=torch.int64)

    def begin_call(self, tensors: Mapping[str, Tensor], trains: bool) -> None:
        """Put the checks of a call into the graph that is made. ``tensors``: by path."""
        torch.ops.shardwright.begin_call(self._mark, list(tensors.values()), self._module, trains)


def _begin_call(mark: Tensor, arguments: list[Tensor], module: int, trains: bool) -> None:
    called = object_of(module)
    with called.ranks.world.telling_errors():
        called.begin_call(dict(zip(called.argument_names(), arguments, strict=True)), trains)


def _begin_nothing(mark: Tensor, arguments: list[Tensor], module: int, trains: bool) -> None:
    """What the compiler runs, on tensors without values."""


# ``mark`` is there to be written to: torch would drop an operator that neither returns nor writes.
define_operator(
    "begin_call(Tensor(a!) mark, Tensor[] arguments, int module, bool trains) -> ()",
    _begin_call,
    _begin_nothing,
)
