"""Sizes of pieces that know over which axes the pieces are.

    tp.local_size(15)        8 on one rank of tp=2, and 7 on the other
    x[:, : tp.local_size(15)]

A type says over which axes a tensor is cut, but not how long it is. If ``x`` is whole, all ranks
hold it, and the slice has another length on each. So what a call makes with such a size must be cut
over the axes of the size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shardwright.compiler.trace.context.patches import replaced
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.runs import PlaceOnAxis


class PieceSize(int):
    """A number that follows from the sizes of pieces over ``axes``."""

    axes: frozenset[str]


def piece_size(number: int, axes: Collection[str]) -> PieceSize:
    """A number that is of pieces over these axes."""
    made = PieceSize(number)
    made.axes = frozenset(axes)
    return made


def _computed(name: str) -> Callable[..., Any]:
    function = getattr(int, name)

    def compute(*numbers: int) -> Any:
        result = function(*numbers)
        return piece_size(result, axes_of(numbers)) if type(result) is int else result

    return compute


_SIGNS = ("add", "sub", "mul", "floordiv", "mod")
for _name in ("__neg__", *(f"__{way}{sign}__" for sign in _SIGNS for way in ("", "r"))):
    setattr(PieceSize, _name, _computed(_name))


def axes_of(argument: Any) -> frozenset[str]:
    """The axes of all sizes of pieces in an argument."""
    match argument:
        case PieceSize():
            return argument.axes
        case tuple() | list():
            return frozenset[str]().union(*map(axes_of, argument))
        case dict():
            return axes_of(list(argument.values()))
        case slice():
            return axes_of((argument.start, argument.stop, argument.step))
    return frozenset()


@contextmanager
def known_sizes(file: str) -> Iterator[None]:
    """Sizes that ``file`` asks axes for know them inside the ``with`` block."""

    def knowing(usual: Callable[..., int]) -> Callable[..., int]:
        def ask(axis: PlaceOnAxis, *numbers: int) -> int:
            found = usual(axis, *numbers)
            asks = sys._getframe(1).f_code.co_filename == file
            if not (asks and isinstance(axis, AxisGroup)):
                return found
            return piece_size(found, {*axis.name.split("+"), *axes_of(numbers)})

        return ask

    with ExitStack() as stack:
        for name in ("local_size", "holds"):
            ask = knowing(getattr(PlaceOnAxis, name))
            stack.enter_context(replaced(PlaceOnAxis, name, ask))
        yield
