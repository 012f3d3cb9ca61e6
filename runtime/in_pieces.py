"""A part of a program that runs piece by piece: a loop over the pieces of a dim, whose values are
never whole, and whose backward computes each piece again.

Example: hidden states ``[B, S, H]`` in four pieces along ``S``. The logits of a piece are
``[B, S/4, V]``. They are there while the piece runs, forward and backward, and at no other time::

    def loss_piece(loss, hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels, reduction="sum")

    total = in_pieces(
        loss_piece, "loss", 4, (piece_of(hidden, 1), weight, piece_of(labels, 0)), (TOTAL,), rng=rng
    )

The loop is an axis of time, without ranks. Along it tensors are placed as along any other: an
operand is cut (S), or the same for all pieces with a gradient that is their sum (G); a result is
joined of its pieces (S), or their sum (P). Pieces may differ in length by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.runtime.layout import Cut
from shardwright.runtime.ops.axes import accumulation_dtype
from shardwright.runtime.ops.random import Moment, RngState
from shardwright.runtime.pieces import put_piece, take_piece, whole_cut
from shardwright.runtime.runs import PlaceOnAxis


@dataclass(frozen=True, slots=True)
class Piece(PlaceOnAxis):
    """The piece that a loop is at: number ``index`` of ``size``. Like the group of an axis it says
    which part of ``count`` things belongs to it.
    """

    name: str
    size: int
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """An operand of which a loop takes one piece after the other, cut along ``dim``."""

    whole: Tensor
    dim: int
    cut: Cut


def piece_of(x: Tensor, dim: int, cut: Cut | None = None) -> Pieces:
    """Let a loop take ``x`` in pieces along ``dim``; without ``cut`` it is one segment."""
    return Pieces(x, dim, cut or whole_cut(x.shape[dim]))


@dataclass(frozen=True, slots=True)
class Joined:
    """A result whose pieces are joined along ``dim``, which ``cut`` cuts. ``wanted``: if not, it is
    not made, and ``None``.
    """

    dim: int
    cut: Cut
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Total:
    """A result that is the sum over the pieces."""


TOTAL = Total()

Result = Joined | Total

Function = Callable[..., Tensor | tuple[Tensor, ...]]
"""Takes a :class:`Piece` and its part of every operand; gives its part of every result."""


def in_pieces(
    function: Function,
    name: str,
    count: int,
    operands: Sequence[Tensor | Pieces],
    results: Sequence[Result],
    *,
    rng: RngState,
) -> Any:
    """The results of ``function``, run for ``count`` pieces in order; one alone is no tuple.

    Nothing but ``operands`` is kept for the backward. It runs each piece a second time, with the
    random numbers of the first, and adds up the gradients of operands that all pieces share, in
    order and in a wide enough dtype.
    """
    tensors = [x.whole if isinstance(x, Pieces) else x for x in operands]
    loop = _Loop(function, name, count, tuple(map(_cut_of, operands)), tuple(results), rng)
    found = _InPieces.apply(loop, rng.moment, *tensors)  # type: ignore[no-untyped-call]
    return found[0] if len(results) == 1 else found


def _cut_of(operand: Tensor | Pieces) -> tuple[int, Cut] | None:
    return (operand.dim % operand.whole.ndim, operand.cut) if isinstance(operand, Pieces) else None


@dataclass(frozen=True, slots=True, eq=False)
class _Loop:
    """What runs, but for the tensors. ``cuts``: the dim and the cut of each operand in pieces."""

    function: Function
    name: str
    count: int
    cuts: tuple[tuple[int, Cut] | None, ...]
    results: tuple[Result, ...]
    rng: RngState

    def parts(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        """What piece ``index`` gets of each operand. A part of one lies by itself in memory."""
        return [
            x if cut is None else take_piece(x, *cut, self.count, index).contiguous()
            for x, cut in zip(tensors, self.cuts, strict=True)
        ]

    def run(self, parts: Sequence[Tensor], index: int) -> tuple[Tensor, ...]:
        """The parts of the results."""
        with self.rng.in_piece(self.name, self.count, index):
            found = self.function(Piece(self.name, self.count, index), *parts)
        return found if isinstance(found, tuple) else (found,)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The results."""
        found: list[Tensor | None] = [None] * len(self.results)
        dtypes: list[torch.dtype] = []
        for index in range(self.count):
            made = self.run(self.parts(tensors, index), index)
            dtypes = [x.dtype for x in made]
            found = [
                self.with_part(whole, x, result, index)
                for whole, x, result in zip(found, made, self.results, strict=True)
            ]
            # Two pieces at once would be the memory that the loop is there to save.
            del made
        return tuple(
            None if x is None else x.to(dtype) for x, dtype in zip(found, dtypes, strict=True)
        )

    def with_part(
        self, whole: Tensor | None, x: Tensor, result: Result, index: int
    ) -> Tensor | None:
        """A result with the part of one more piece in it."""
        if isinstance(result, Total):
            return _added(whole, x)
        return self.put(whole, x, result.dim, result.cut, index) if result.wanted else None

    def put(self, whole: Tensor | None, x: Tensor, dim: int, cut: Cut, index: int) -> Tensor:
        """``whole`` with ``x`` at the place of piece ``index``; the first piece makes it."""
        if whole is None:
            whole = x.new_empty([*x.shape[:dim], cut.length, *x.shape[dim + 1 :]])
        put_piece(whole, x, dim, cut, self.count, index)
        return whole

    def gradient(self, result: Result, grad: Tensor, index: int) -> Tensor:
        """What piece ``index`` gets of the gradient of a result."""
        if isinstance(result, Total):
            return grad
        return take_piece(grad, result.dim, result.cut, self.count, index)


class _InPieces(torch.autograd.Function):
    """The loop. Gradients of results that nobody wanted do not come."""

    @staticmethod
    def forward(
        ctx: Any, loop: _Loop, moment: Moment, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.loop, ctx.moment = loop, moment
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return loop.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        loop: _Loop = ctx.loop
        tensors = ctx.saved_tensors
        # Of an operand in pieces the whole gradient, filled piece by piece; of any other the sum.
        found: list[Tensor | None] = [None] * len(tensors)
        for index in range(loop.count):
            parts = [
                x.detach().requires_grad_(wants)
                for x, wants in zip(
                    loop.parts(tensors, index), ctx.needs_input_grad[2:], strict=True
                )
            ]
            with torch.enable_grad(), loop.rng.at(ctx.moment):
                made = loop.run(parts, index)
            pairs = [
                (x, loop.gradient(result, grad, index))
                for x, result, grad in zip(made, loop.results, grads, strict=True)
                if grad is not None and x.requires_grad
            ]
            del made
            asked = [x for x in parts if x.requires_grad]
            got = iter(_gradients([x for x, _ in pairs], asked, [g for _, g in pairs]))
            del pairs
            for number, (x, cut) in enumerate(zip(parts, loop.cuts, strict=True)):
                grad = next(got) if x.requires_grad else None
                if grad is None:
                    continue
                whole = found[number]
                found[number] = (
                    _added(whole, grad) if cut is None else loop.put(whole, grad, *cut, index)
                )
        dtypes = (x.dtype for x in tensors)
        return (
            None,
            None,
            *(None if x is None else x.to(dtype) for x, dtype in zip(found, dtypes, strict=True)),
        )


def _gradients(
    results: Sequence[Tensor], operands: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of all operands, ``None`` for one of which no result depends. Which these are
    is the same for all pieces.
    """
    if not results or not operands:
        return [None] * len(operands)
    return torch.autograd.grad(results, operands, grads, allow_unused=True)


def _added(total: Tensor | None, x: Tensor) -> Tensor:
    """A sum over pieces with one more summand. It begins as a copy of the first one, whose memory
    may be another tensor's, too.
    """
    if total is None:
        return x.to(accumulation_dtype(x.dtype), copy=True)
    total += x
    return total
