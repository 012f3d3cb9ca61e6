"""Adapters: autograd functions that turn a tensor of one placement along a mesh axis into the same
value in another.

  from/to  S(d')               R                     G                           P
  S(d)     all_to_all          all_gather(slice)     all_gather(reduce_scatter)  pad
  R        narrow(all_gather)  -                     grad_all_reduce             keep_one(identity)
  P        reduce_scatter      all_reduce(identity)  all_reduce(all_reduce)      -
  G        narrow(pad)         grad_keep_one         -                           keep_one(keep_one)

In brackets, what ``backward`` says. A placement tells what the ranks of the axis hold and what they
get as gradient: S a slice of the value and of the gradient; R the whole value and the whole
gradient; P (partial) a summand of the value and the whole gradient; G (gradient-partial) the whole
value and a summand of the gradient. So the backward of an adapter takes any encoding of a gradient
in the target placement to an encoding of the same gradient in the source placement.

``cut`` describes the whole, uncut dim; without one it is a single segment (of even pieces where
only a piece is at hand). Integer and boolean tensors, and those that need no gradient, go through
the forward only. Double backward is refused by autograd. On an axis of size 1 every adapter returns
``x`` itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from shardwright.runtime.layout import Cut
from shardwright.runtime.pieces import (
    copy_piece,
    is_plain,
    join_pieces,
    pad_piece,
    piece_lengths,
    recut_positions,
    take_piece,
    take_pieces,
    whole_cut,
)
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.ranks.pending import PendingPieces, PendingWholes
from shardwright.runtime.second_derivatives import differentiable_once


def all_gather(
    x: Tensor,
    axis: AxisGroup,
    dim: int,
    cut: Cut | None = None,
    backward: Literal["slice", "reduce_scatter"] = "slice",
) -> Tensor:
    """S(dim) -> R, or with ``backward="reduce_scatter"`` S(dim) -> G. Without ``cut`` the pieces
    must be equally long.
    """
    if axis.size == 1:
        return x
    dim %= x.ndim
    return _apply(_AllGather, x, axis, dim, cut_of(axis, cut, x.shape[dim] * axis.size), backward)


def all_gather_together(
    xs: Sequence[Tensor],
    axis: AxisGroup,
    dim: int,
    cut: Cut | None = None,
    backward: Literal["slice", "reduce_scatter"] = "slice",
) -> tuple[Tensor, ...]:
    """:func:`all_gather` of several tensors of one dtype, which are cut alike, in one collective;
    so are their gradients.
    """
    if axis.size == 1:
        return tuple(xs)
    dim %= xs[0].ndim
    whole = cut_of(axis, cut, xs[0].shape[dim] * axis.size)
    return cast(
        tuple[Tensor, ...],
        _AllGatherTogether.apply(axis, dim, whole, backward, *xs),  # type: ignore[no-untyped-call]
    )


def narrow(
    x: Tensor,
    axis: AxisGroup,
    dim: int,
    cut: Cut | None = None,
    backward: Literal["all_gather", "pad"] = "all_gather",
) -> Tensor:
    """R -> S(dim), or with ``backward="pad"`` G -> S(dim): this rank's piece of ``x``, as a new
    tensor.
    """
    if axis.size == 1:
        return x
    dim %= x.ndim
    return _apply(_Narrow, x, axis, dim, cut_of(axis, cut, x.shape[dim]), backward)


def reduce_scatter(x: Tensor, axis: AxisGroup, dim: int, cut: Cut | None = None) -> Tensor:
    """P -> S(dim): this rank's piece of the sum; the backward gathers."""
    if axis.size == 1:
        return x
    dim %= x.ndim
    return _apply(_ReduceScatter, x, axis, dim, cut_of(axis, cut, x.shape[dim]))


def all_reduce(
    x: Tensor, axis: AxisGroup, backward: Literal["identity", "all_reduce"] = "identity"
) -> Tensor:
    """P -> R, or with ``backward="all_reduce"`` P -> G: the sum over the axis."""
    return x if axis.size == 1 else _apply(_AllReduce, x, axis, backward)


def grad_all_reduce(x: Tensor, axis: AxisGroup) -> Tensor:
    """R -> G: ``x``; the backward sums the gradient over the axis."""
    return x if axis.size == 1 else _apply(_GradAllReduce, x, axis)


def keep_one(
    x: Tensor, axis: AxisGroup, backward: Literal["identity", "keep_one"] = "identity"
) -> Tensor:
    """R -> P, or with ``backward="keep_one"`` G -> P: a copy of ``x`` at index 0 of the axis,
    zeros elsewhere.
    """
    return x if axis.size == 1 else _apply(_KeepOne, x, axis, backward)


def grad_keep_one(x: Tensor, axis: AxisGroup) -> Tensor:
    """G -> R: ``x``; the backward keeps the gradient at index 0 of the axis and gives zeros
    elsewhere.
    """
    return x if axis.size == 1 else _apply(_GradKeepOne, x, axis)


def pad(x: Tensor, axis: AxisGroup, dim: int, cut: Cut | None = None) -> Tensor:
    """S(dim) -> P: ``x`` at its place in the whole, zeros around it. Without ``cut`` the pieces
    must be equally long.
    """
    if axis.size == 1:
        return x
    dim %= x.ndim
    return _apply(_Pad, x, axis, dim, cut_of(axis, cut, x.shape[dim] * axis.size))


def all_to_all(x: Tensor, axis: AxisGroup, dim: int, cut: Cut, to_dim: int, to_cut: Cut) -> Tensor:
    """S(dim) -> S(to_dim): joins ``dim``, which ``cut`` had cut, and cuts ``to_dim``. The same dim
    is cut differently.
    """
    if axis.size == 1:
        return x
    cut, to_cut = cut_of(axis, cut), cut_of(axis, to_cut)
    return _apply(_AllToAll, x, axis, dim % x.ndim, cut, to_dim % x.ndim, to_cut)


def cut_of(axis: AxisGroup, cut: Cut | None, length: int = 0) -> Cut:
    """How the axis deals what ``cut`` describes, or a dim of ``length`` elements as one segment."""
    cut = cut or whole_cut(length)
    return replace(cut, turns=axis.turns) if axis.turns else cut


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]


# The movements, without autograd.


@dataclass(frozen=True, slots=True)
class Gathering:
    """A whole tensor on its way: its pieces will be joined along ``dim`` as ``cut`` says."""

    pieces: PendingPieces
    dim: int
    cut: Cut

    def wait(self) -> Tensor:
        """The whole, as a new tensor."""
        return (
            self.pieces.joined()
            if is_plain(self.cut)
            else join_pieces(self.pieces.wait(), self.dim, self.cut)
        )


def start_gather(x: Tensor, axis: AxisGroup, dim: int, cut: Cut, phase: Phase) -> Gathering:
    """Begin to gather the pieces ``x``. It must not be changed until the result was waited for."""
    pieces = axis.communicator.all_gather_async(x, dim, piece_lengths(cut, axis.size), phase=phase)
    return Gathering(pieces, dim, cut)


def start_gathers(xs: Sequence[Tensor], axis: AxisGroup, phase: Phase) -> PendingWholes:
    """Begin to gather several pieces in one collective: even ones, of the first dims. None of them
    must be changed until the result was waited for.
    """
    return axis.communicator.all_gather_together_async(xs, phase=phase)


def reduced_pieces(grads: Sequence[Tensor], axis: AxisGroup) -> list[Tensor]:
    """The caller's even pieces, of the first dims, of several sums over the axis, in one collective
    of a backward.
    """
    return axis.communicator.reduce_scatter_together(grads, phase="backward")


def reduced_piece(grad: Tensor, axis: AxisGroup, dim: int, cut: Cut) -> Tensor:
    """The caller's piece of the sum over the axis, in a backward."""
    return _scatter_sum(grad, axis, dim, cut, "backward")


def sliced_piece(grad: Tensor, axis: AxisGroup, dim: int, cut: Cut) -> Tensor:
    """The caller's piece, as a new tensor."""
    return _slice(grad, axis, dim, cut)


def _gather(x: Tensor, axis: AxisGroup, dim: int, cut: Cut, phase: Phase) -> Tensor:
    lengths = piece_lengths(cut, axis.size)
    if is_plain(cut):
        return axis.communicator.all_gather_cat(x, dim, lengths, phase=phase)
    return join_pieces(axis.communicator.all_gather(x, dim, lengths, phase=phase), dim, cut)


def _gather_together(
    xs: Sequence[Tensor], axis: AxisGroup, dim: int, cut: Cut
) -> tuple[Tensor, ...]:
    shapes = _shapes_by_rank(xs, axis, dim, cut)
    messages = _gathered_messages(xs, axis, shapes)
    pieces = [_parts(flat, its) for flat, its in zip(messages, shapes, strict=True)]
    return tuple(join_pieces(of_x, dim, cut) for of_x in zip(*pieces, strict=True))


def _gathered_messages(
    xs: Sequence[Tensor], axis: AxisGroup, shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[Tensor]:
    """The message of every rank, which holds its pieces end to end."""
    lengths = [sum(map(math.prod, its)) for its in shapes]
    message = xs[0].new_empty(lengths[axis.index])
    for x, part in zip(xs, _parts(message, shapes[axis.index]), strict=True):
        part.copy_(x.detach())
    return axis.communicator.all_gather(message, 0, lengths, phase="forward")


def _shapes_by_rank(
    xs: Sequence[Tensor], axis: AxisGroup, dim: int, cut: Cut
) -> list[list[tuple[int, ...]]]:
    """The shapes of each rank's pieces of tensors like these."""
    return [
        [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for x in xs]
        for length in piece_lengths(cut, axis.size)
    ]


def _parts(message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes that lie end to end in a message, as views."""
    flat = message.split_with_sizes([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


def _scatter_sum(x: Tensor, axis: AxisGroup, dim: int, cut: Cut, phase: Phase) -> Tensor:
    if is_plain(cut):
        return axis.communicator.reduce_scatter(x, dim, piece_lengths(cut, axis.size), phase=phase)
    return _scatter_together([x], axis, dim, cut, phase)[0]


def _scatter_together(
    xs: Sequence[Tensor], axis: AxisGroup, dim: int, cut: Cut, phase: Phase
) -> list[Tensor]:
    shapes = _shapes_by_rank(xs, axis, dim, cut)
    lengths = [sum(map(math.prod, its)) for its in shapes]
    # Row ``i`` holds the pieces of rank ``i`` end to end.
    rows = xs[0].new_empty(axis.size, max(lengths))
    for index, (row, its) in enumerate(zip(rows.unbind(), shapes, strict=True)):
        for x, part in zip(xs, _parts(row[: lengths[index]], its), strict=True):
            copy_piece(x.detach(), dim, cut, axis.size, index, part)
    mine = axis.communicator.reduce_scatter_rows(rows, lengths, phase=phase)
    return _parts(mine, shapes[axis.index])


def _slice(x: Tensor, axis: AxisGroup, dim: int, cut: Cut) -> Tensor:
    # A copy: the piece must not keep the whole alive. One of several runs is a copy by itself.
    piece = take_piece(x, dim, cut, axis.size, axis.index)
    if len(cut.runs(axis.size, axis.index)) > 1:
        return piece.contiguous()
    return piece.clone(memory_format=torch.contiguous_format)


def _pad_zeros(x: Tensor, axis: AxisGroup, dim: int, cut: Cut) -> Tensor:
    return pad_piece(x, dim, cut, axis.size, axis.index)


def _keep(x: Tensor, axis: AxisGroup) -> Tensor:
    return x.view_as(x) if axis.index == 0 else torch.zeros_like(x)


def _exchange(
    x: Tensor, axis: AxisGroup, dim: int, cut: Cut, to_dim: int, to_cut: Cut, phase: Phase
) -> Tensor:
    if dim == to_dim:
        return _recut(x, axis, dim, cut, to_cut, phase)
    pieces = take_pieces(x, to_dim, to_cut, axis.size)
    shape = list(x.shape)
    shape[to_dim] = to_cut.local_length(axis.size, axis.index)
    shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in piece_lengths(cut, axis.size)]
    return join_pieces(axis.communicator.all_to_all(pieces, shapes, phase=phase), dim, cut)


def _recut(x: Tensor, axis: AxisGroup, dim: int, cut: Cut, to_cut: Cut, phase: Phase) -> Tensor:
    positions = recut_positions(cut, to_cut, axis.size, axis.index)
    # For each member: the positions of this rank's piece that go there, and where in the new piece
    # what comes from there belongs.
    going, coming = ([p.to(x.device) for p in by_member] for by_member in positions)
    shapes = [(*x.shape[:dim], p.numel(), *x.shape[dim + 1 :]) for p in coming]
    received = axis.communicator.all_to_all(
        [x.index_select(dim, p) for p in going], shapes, phase=phase
    )
    result = x.new_empty(
        *x.shape[:dim], to_cut.local_length(axis.size, axis.index), *x.shape[dim + 1 :]
    )
    for p, chunk in zip(coming, received, strict=True):
        result.index_copy_(dim, p, chunk)
    return result


# The autograd functions.


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup, dim: int, cut: Cut, backward: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.cut, ctx.reduce = axis, dim, cut, backward == "reduce_scatter"
        return _gather(x, axis, dim, cut, "forward")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.reduce:
            piece = _scatter_sum(grad, ctx.axis, ctx.dim, ctx.cut, "backward")
        else:
            piece = _slice(grad, ctx.axis, ctx.dim, ctx.cut)
        return piece, None, None, None, None


class _AllGatherTogether(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: AxisGroup, dim: int, cut: Cut, backward: str, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.dim, ctx.cut, ctx.reduce = axis, dim, cut, backward == "reduce_scatter"
        return _gather_together(xs, axis, dim, cut)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.reduce:
            pieces = _scatter_together(grads, ctx.axis, ctx.dim, ctx.cut, "backward")
        else:
            pieces = [_slice(grad, ctx.axis, ctx.dim, ctx.cut) for grad in grads]
        return None, None, None, None, *pieces


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup, dim: int, cut: Cut, backward: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.cut, ctx.gather = axis, dim, cut, backward == "all_gather"
        return _slice(x, axis, dim, cut)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gather:
            whole = _gather(grad, ctx.axis, ctx.dim, ctx.cut, "backward")
        else:
            whole = _pad_zeros(grad, ctx.axis, ctx.dim, ctx.cut)
        return whole, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup, dim: int, cut: Cut) -> Tensor:
        ctx.axis, ctx.dim, ctx.cut = axis, dim, cut
        return _scatter_sum(x, axis, dim, cut, "forward")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, ctx.axis, ctx.dim, ctx.cut, "backward"), None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup, backward: str) -> Tensor:
        ctx.axis, ctx.reduce = axis, backward == "all_reduce"
        return axis.communicator.all_reduce(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (
            ctx.axis.communicator.all_reduce(grad, phase="backward") if ctx.reduce else grad,
            None,
            None,
        )


class _GradAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.communicator.all_reduce(grad, phase="backward"), None


class _KeepOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup, backward: str) -> Tensor:
        ctx.axis, ctx.keep = axis, backward == "keep_one"
        # No view, as zeros are none: a view of a gathered weight is gathered again for the
        # backward, which all ranks must do.
        return x.clone() if axis.index == 0 else torch.zeros_like(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _keep(grad, ctx.axis) if ctx.keep else grad, None, None


class _GradKeepOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _keep(grad, ctx.axis), None


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisGroup, dim: int, cut: Cut) -> Tensor:
        ctx.axis, ctx.dim, ctx.cut = axis, dim, cut
        return _pad_zeros(x, axis, dim, cut)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _slice(grad, ctx.axis, ctx.dim, ctx.cut), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: AxisGroup, dim: int, cut: Cut, to_dim: int, to_cut: Cut
    ) -> Tensor:
        ctx.axis, ctx.cuts = axis, (dim, cut, to_dim, to_cut)
        return _exchange(x, axis, dim, cut, to_dim, to_cut, "forward")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, cut, to_dim, to_cut = ctx.cuts
        return (
            _exchange(grad, ctx.axis, to_dim, to_cut, dim, cut, "backward"),
            None,
            None,
            None,
            None,
            None,
        )
