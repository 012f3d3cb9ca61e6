"""Communication that is started, and waited for later.

    x_tp_in = arrived(start(grad_all_reduce, x, tp), beside=(self.up.weight,))
    up = linear_beside(x_tp_in, self.up.weight, self.up.bias)

``start`` begins what an adapter communicates, and ``arrived`` gives its result. What the program
does between the two runs while the message is under way. The backward is the mirror image: the
backward of ``arrived`` begins what the adapter's backward communicates, the backward of ``start``
gives its result, and what lies between the two in the program lies between them in the backward
too.

``beside`` names weights whose gradients are computed in between, in the backward. Here the sum of
the gradient of ``x`` is under way while the gradient of ``up.weight`` is computed. For that,
``linear_beside`` (``ops/linear_beside.py``) computes the gradient of its input alone, and leaves
the product for its weight to the ``arrived`` above it.

All numbers are those of the adapter and of the plain product, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.runtime.adapters import (
    all_gather,
    all_reduce,
    cut_of,
    grad_all_reduce,
    sliced_piece,
    start_gather,
)
from shardwright.runtime.layout import Cut
from shardwright.runtime.pieces import is_plain, piece_lengths, take_pieces
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup

Finish = Callable[[], Tensor]
"""A function that waits for a message, and returns what it brought."""

Movement = Callable[[Tensor, Phase], Finish]
"""A function that begins to move a tensor."""


@dataclass(slots=True)
class Flight:
    """What an adapter communicates: ``there`` in forward, ``back`` in backward.

    ``finish``: waits for what is under way. ``weights``: those whose gradients are computed while
    the gradient is under way, and ``products`` the functions that do so, by the number of the
    weight.
    """

    there: Movement
    back: Movement
    finish: Finish | None = None
    weights: tuple[Tensor, ...] = ()
    products: dict[int, Callable[[], Tensor]] = field(default_factory=dict)

    def arrived(self) -> Tensor:
        """What was under way."""
        assert self.finish is not None, "nothing is under way"
        finish, self.finish = self.finish, None
        return finish()

    def number_of(self, weight: Tensor) -> int | None:
        """The number of a weight among those whose gradients are computed beside."""
        return next((i for i, known in enumerate(self.weights) if known is weight), None)


@dataclass(frozen=True, slots=True)
class Coming:
    """What an adapter was started for; :func:`arrived` gives its result, once. ``token``: stands
    for it in autograd. ``result``: of an adapter that has run at once, which has no flight.
    """

    flight: Flight | None
    token: Tensor | None = None
    result: Tensor | None = None


def start(adapter: Callable[..., Tensor], x: Tensor, axis: AxisGroup, **arguments: Any) -> Coming:
    """Begin what ``adapter`` communicates for ``x``: ``all_reduce``, ``grad_all_reduce`` or
    ``all_gather``, with the arguments of a call of it. ``x`` must not be changed until the result
    was waited for.
    """
    # The tracer of torch.compile orders collectives itself.
    if axis.size == 1 or torch.compiler.is_compiling():
        return at_once(adapter, x, axis, **arguments)
    there, back = _MOVEMENTS[adapter](x, axis, **arguments)
    flight = Flight(there, back)
    return Coming(flight, cast(Tensor, _Start.apply(flight, x)))  # type: ignore[no-untyped-call]


def arrived(coming: Coming, beside: Sequence[Tensor] = ()) -> Tensor:
    """The result of what was started. ``beside``: weights of :func:`linear_beside` that multiply
    it.
    """
    flight, token = coming.flight, coming.token
    if flight is None or token is None:
        assert coming.result is not None
        return coming.result
    if not token.requires_grad:
        # Without a gradient nothing comes back beside which anything could be computed.
        return flight.arrived()
    flight.weights = tuple(beside)
    return cast(Tensor, _Arrived.apply(flight, token, *beside))  # type: ignore[no-untyped-call]


def at_once(adapter: Callable[..., Tensor], x: Tensor, axis: AxisGroup, **arguments: Any) -> Coming:
    """:func:`start` without anything under way: the adapter itself."""
    return Coming(None, result=adapter(x, axis, **arguments))


def flight_of(x: Tensor) -> Flight | None:
    """The flight that brought ``x``, or what ``x`` is a view of."""
    kind: Any = _Arrived._backward_cls
    node: Any = x.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or isinstance(node, kind):
            break
        above = [function for function, _ in node.next_functions if function is not None]
        node = above[0] if len(above) == 1 else None
    return cast(Flight, node.flight) if isinstance(node, kind) else None


_MOST_VIEWS = 4
"""How many views there may be between a product and what came for it."""


# The autograd functions. Between them a token stands for what is under way: a number without a
# value, which tells autograd that the one follows the other.


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, x: Tensor) -> Tensor:
        ctx.flight = flight
        flight.finish = flight.there(x, "forward")
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.flight.arrived()


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, token: Tensor, *weights: Tensor) -> Tensor:
        ctx.flight = flight
        return flight.arrived()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flight: Flight = ctx.flight
        flight.finish = flight.back(grad, "backward")
        # The message is under way: now the products.
        products = [flight.products.pop(number, None) for number in range(len(flight.weights))]
        grads = [None if product is None else product() for product in products]
        return None, grad.new_zeros(()), *grads


# The movements.


def _same(x: Tensor, phase: Phase) -> Finish:
    y = x.view_as(x)
    return lambda: y


def _summed(axis: AxisGroup) -> Movement:
    def begin(x: Tensor, phase: Phase) -> Finish:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        work = axis.communicator.all_reduce_async(total, phase=phase)

        def finish() -> Tensor:
            work.wait()
            return total

        return finish

    return begin


def _gathered(axis: AxisGroup, dim: int, cut: Cut) -> Movement:
    return lambda x, phase: start_gather(x, axis, dim, cut, phase).wait


def _sliced(axis: AxisGroup, dim: int, cut: Cut) -> Movement:
    def begin(x: Tensor, phase: Phase) -> Finish:
        piece = sliced_piece(x, axis, dim, cut)
        return lambda: piece

    return begin


def _scattered(axis: AxisGroup, dim: int, cut: Cut) -> Movement:
    def begin(x: Tensor, phase: Phase) -> Finish:
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

    return begin


def _of_sum(
    x: Tensor, axis: AxisGroup, backward: Literal["identity", "all_reduce"] = "identity"
) -> tuple[Movement, Movement]:
    return _summed(axis), _same if backward == "identity" else _summed(axis)


def _of_gradient_sum(x: Tensor, axis: AxisGroup) -> tuple[Movement, Movement]:
    return _same, _summed(axis)


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


_MOVEMENTS: dict[Callable[..., Tensor], Callable[..., tuple[Movement, Movement]]] = {
    all_gather: _of_gather,
    all_reduce: _of_sum,
    grad_all_reduce: _of_gradient_sum,
}
