"""Communication that is started, and waited for later.

    coming = start(dispatch, x, chosen, weights, num_experts=8, exchange=(ep,), ...)
    shared = F.linear(x, self.shared.weight)
    rows, gains, routing = arrived(coming)

``start`` begins what a function communicates, and ``arrived`` gives its result. What the program
does between the two runs while the message is under way. The backward is the mirror image: the
backward of ``arrived`` begins what the function's backward communicates, the backward of ``start``
gives its result, and what lies between the two in the program lies between them in the backward
too.

    x_tp_in = arrived(start(grad_all_reduce, x, tp), beside=(self.up.weight,))
    up = linear_beside(x_tp_in, self.up.weight, self.up.bias)

``beside`` names weights whose gradients are computed in between, in the backward. Here the sum of
the gradient of ``x`` is under way while the gradient of ``up.weight`` is computed. For that,
``linear_beside`` (``ops/linear_beside.py``) computes the gradient of its input alone, and leaves
the product for its weight to the ``arrived`` above it.

All numbers are those of the function and of the plain product, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.runtime.adapters import (
    all_gather,
    all_reduce,
    cut_of,
    grad_all_reduce,
    reduce_scatter,
    sliced_piece,
    start_gather,
)
from shardwright.runtime.flights import Finish, Flight, Movement, arrive, leave
from shardwright.runtime.layout import Cut
from shardwright.runtime.ops.experts import combine, dispatch, start_combine, start_dispatch
from shardwright.runtime.pieces import is_plain, piece_lengths, take_pieces
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup


@dataclass(frozen=True, slots=True)
class Coming:
    """What was started; :func:`arrived` gives the result, once. ``finish``: waits for it, given the
    weights beside it.
    """

    finish: Callable[[Sequence[Tensor]], Any]


def start(function: Callable[..., Any], *args: Any, **arguments: Any) -> Coming:
    """Begin what ``function`` communicates, called with these arguments: ``all_reduce``,
    ``grad_all_reduce``, ``all_gather``, ``reduce_scatter``, ``dispatch`` or ``combine``. What is
    sent must not be changed until the result was waited for.
    """
    # The tracer of torch.compile orders collectives itself.
    if torch.compiler.is_compiling():
        return at_once(function, *args, **arguments)
    if function in _OPERATORS:
        finish = _OPERATORS[function](*args, **arguments)
        return Coming(lambda beside: finish())
    return _start_adapter(function, *args, **arguments)


def arrived(coming: Coming, beside: Sequence[Tensor] = ()) -> Any:
    """The result of what was started. ``beside``: weights of :func:`linear_beside` that multiply
    it.
    """
    return coming.finish(beside)


def at_once(function: Callable[..., Any], *args: Any, **arguments: Any) -> Coming:
    """:func:`start` without anything under way: the function itself."""
    result = function(*args, **arguments)
    return Coming(lambda beside: result)


_OPERATORS: dict[Callable[..., Any], Callable[..., Callable[[], Any]]] = {
    dispatch: start_dispatch,
    combine: start_combine,
}
"""The operators that can be started, and what starts them."""


def _start_adapter(
    adapter: Callable[..., Tensor], x: Tensor, axis: AxisGroup, **arguments: Any
) -> Coming:
    if axis.size == 1:
        return at_once(adapter, x, axis, **arguments)
    flight = Flight(*_MOVEMENTS[adapter](x, axis, **arguments))
    token = leave(flight, [x])
    return Coming(lambda beside: arrive(flight, token, beside)[0])


# The movements of adapters. Each has one tensor.


def _movement(begin: Callable[[Tensor, Phase], Callable[[], Tensor]]) -> Movement:
    def movement(tensors: Sequence[Tensor], phase: Phase) -> Finish:
        (x,) = tensors
        finish = begin(x, phase)
        return lambda: [finish()]

    return movement


def _same() -> Movement:
    def begin(x: Tensor, phase: Phase) -> Callable[[], Tensor]:
        y = x.view_as(x)
        return lambda: y

    return _movement(begin)


def _summed(axis: AxisGroup) -> Movement:
    def begin(x: Tensor, phase: Phase) -> Callable[[], Tensor]:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        work = axis.communicator.all_reduce_async(total, phase=phase)

        def finish() -> Tensor:
            work.wait()
            return total

        return finish

    return _movement(begin)


def _gathered(axis: AxisGroup, dim: int, cut: Cut) -> Movement:
    return _movement(lambda x, phase: start_gather(x, axis, dim, cut, phase).wait)


def _sliced(axis: AxisGroup, dim: int, cut: Cut) -> Movement:
    def begin(x: Tensor, phase: Phase) -> Callable[[], Tensor]:
        piece = sliced_piece(x, axis, dim, cut)
        return lambda: piece

    return _movement(begin)


def _scattered(axis: AxisGroup, dim: int, cut: Cut) -> Movement:
    def begin(x: Tensor, phase: Phase) -> Callable[[], Tensor]:
        lengths = piece_lengths(cut, axis.size)
        # The pieces end to end, in a buffer of this message's own.
        pieces = (
            torch.split(x, lengths, dim) if is_plain(cut) else take_pieces(x, dim, cut, axis.size)
        )
        sizes = [piece.numel() for piece in pieces]
        rows = x.new_empty(sum(sizes))
        chunks = rows.split_with_sizes(sizes)
        for chunk, piece in zip(chunks, pieces, strict=True):
            chunk.view(piece.shape).copy_(piece.detach())
        shape = pieces[axis.index].shape
        work = axis.communicator.reduce_scatter_async_(rows, sizes, phase=phase)

        def finish() -> Tensor:
            work.wait()
            # A copy: the piece must not keep the other chunks alive.
            return chunks[axis.index].view(shape).clone()

        return finish

    return _movement(begin)


def _of_sum(
    x: Tensor, axis: AxisGroup, backward: Literal["identity", "all_reduce"] = "identity"
) -> tuple[Movement, Movement]:
    return _summed(axis), _same() if backward == "identity" else _summed(axis)


def _of_gradient_sum(x: Tensor, axis: AxisGroup) -> tuple[Movement, Movement]:
    return _same(), _summed(axis)


def _of_gather(
    x: Tensor,
    axis: AxisGroup,
    dim: int,
    cut: Cut | None = None,
    backward: Literal["slice", "reduce_scatter"] = "slice",
) -> tuple[Movement, Movement]:
    dim %= x.ndim
    cut = cut_of(axis, cut, x.shape[dim] * axis.size)
    back = _sliced if backward == "slice" else _scattered
    return _gathered(axis, dim, cut), back(axis, dim, cut)


def _of_scatter(
    x: Tensor, axis: AxisGroup, dim: int, cut: Cut | None = None
) -> tuple[Movement, Movement]:
    dim %= x.ndim
    cut = cut_of(axis, cut, x.shape[dim])
    return _scattered(axis, dim, cut), _gathered(axis, dim, cut)


_MOVEMENTS: dict[Callable[..., Tensor], Callable[..., tuple[Movement, Movement]]] = {
    all_gather: _of_gather,
    all_reduce: _of_sum,
    grad_all_reduce: _of_gradient_sum,
    reduce_scatter: _of_scatter,
}
