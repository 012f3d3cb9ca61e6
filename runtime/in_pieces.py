"""A part of a program that runs piece by piece: a loop over the pieces of a dim, whose values are
never whole, and whose backward computes each piece again.

Example: hidden states ``[B, S, H]`` in four pieces along ``S``. The logits of a piece are
``[B, S/4, V]``. They are there while the piece runs, forward and backward, and at no other time::

    def loss_piece(loss, hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels, reduction="sum")

    total = in_pieces(
        loss_piece, "loss", 4, (piece_of(hidden, 1), weight, piece_of(labels, 0)), (TOTAL,)
    )

The loop is an axis of time, without ranks. Along it tensors are placed as along any other: an
operand is cut (S), the same for all pieces with a gradient that is their sum (G), or a summand that
counts once (P); a result is joined of its pieces (S), or their sum (P). Pieces may differ in length
by one.

A piece may be gathered over ranks, so that what all of them hold is never whole on one of them. The
gathers of the next piece travel while a piece is computed (SUMMA: van de Geijn and Watts 1997).
Here ranks along ``c`` hold columns of ``x``, ranks along ``r`` rows of ``weight``, and a step of
the product has an eighth of both::

    y = in_pieces(
        step_of_product, "steps", 8,
        (piece_of(x, 1, gather=Gather(c, 1, "reduce_scatter")),
         piece_of(weight, 0, gather=Gather(r, 0, "reduce_scatter"))),
        (TOTAL,),
    )  # fmt: skip
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.runtime.adapters import (
    Gathering,
    cut_of,
    reduced_piece,
    sliced_piece,
    start_gather,
)
from shardwright.runtime.layout import Cut
from shardwright.runtime.ops.axes import accumulation_dtype
from shardwright.runtime.ops.random import Moment, RngState
from shardwright.runtime.pieces import put_piece, take_piece, whole_cut
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.runs import PlaceOnAxis
from shardwright.runtime.second_derivatives import differentiable_once


@dataclass(frozen=True, slots=True)
class Piece(PlaceOnAxis):
    """The piece that a loop is at: number ``index`` of ``size``. Like the group of an axis it says
    which part of ``count`` things belongs to it.
    """

    name: str
    size: int
    index: int


@dataclass(frozen=True, slots=True)
class Gather:
    """How the ranks of an axis gather their parts of a piece, as :func:`adapters.all_gather`
    does.
    """

    axis: AxisGroup
    dim: int
    backward: Literal["slice", "reduce_scatter"]
    cut: Cut | None = None

    def start(self, part: Tensor, phase: Phase) -> Gathering:
        """Begin to gather a piece, of which this rank has ``part``."""
        cut = cut_of(self.axis, self.cut, part.shape[self.dim] * self.axis.size)
        return start_gather(part, self.axis, self.dim, cut, phase)

    def back(self, grad: Tensor) -> Tensor:
        """The gradient of this rank's part of a piece, from that of the whole piece."""
        give = reduced_piece if self.backward == "reduce_scatter" else sliced_piece
        return give(grad, self.axis, self.dim, cut_of(self.axis, self.cut, grad.shape[self.dim]))


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """An operand of which a loop takes one piece after the other, cut along ``dim``. ``gather``:
    ranks gather each piece, the next one while a piece is computed.
    """

    whole: Tensor
    dim: int
    cut: Cut
    gather: Gather | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Once:
    """An operand that enters a sum over the pieces: the first one gets it, the others zeros."""

    whole: Tensor


def piece_of(x: Tensor, dim: int, cut: Cut | None = None, gather: Gather | None = None) -> Pieces:
    """Let a loop take ``x`` in pieces along ``dim``; without ``cut`` it is one segment."""
    return Pieces(x, dim, cut or whole_cut(x.shape[dim]), gather)


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


Operand = Tensor | Pieces | Once


def in_pieces(
    function: Function,
    name: str,
    count: int,
    operands: Sequence[Operand],
    results: Sequence[Result],
    *,
    rng: RngState | None = None,
) -> Any:
    """The results of ``function``, run for ``count`` pieces in order; one alone is no tuple.

    Nothing but ``operands`` is kept for the backward. It runs each piece a second time, and adds up
    the gradients of operands that all pieces share, in order and in a wide enough dtype. What ranks
    gather of a piece is gathered again. With ``rng`` pieces draw random numbers, different ones,
    and the second time those of the first.
    """
    tensors = [x if isinstance(x, Tensor) else x.whole for x in operands]
    loop = _Loop(function, name, count, tuple(map(_door_of, operands)), tuple(results), rng)
    moment = None if rng is None else rng.moment
    found = _InPieces.apply(loop, moment, *tensors)  # type: ignore[no-untyped-call]
    return found[0] if len(results) == 1 else found


@dataclass(frozen=True, slots=True)
class _Door:
    """How a loop takes an operand: in pieces along ``dim``, which ``cut`` cuts, once, or in all
    pieces the same.
    """

    dim: int = 0
    cut: Cut | None = None
    gather: Gather | None = None
    is_once: bool = False


def _door_of(operand: Operand) -> _Door:
    if isinstance(operand, Pieces):
        return _Door(operand.dim % operand.whole.ndim, operand.cut, operand.gather)
    return _Door(is_once=isinstance(operand, Once))


_Arriving = dict[int, Gathering]
"""What ranks gather of one piece, under way, by the number of the operand."""


@dataclass(frozen=True, slots=True, eq=False)
class _Loop:
    """What runs, but for the tensors. ``doors``: how each operand is taken."""

    function: Function
    name: str
    count: int
    doors: tuple[_Door, ...]
    results: tuple[Result, ...]
    rng: RngState | None

    def arrivals(self, tensors: Sequence[Tensor], phase: Phase) -> Iterator[_Arriving]:
        """The gathers of each piece in order. Before those of one are given, those of the next are
        under way. Whoever takes them lets go of all of a piece before taking those of another.
        """
        ahead = self._start(tensors, 0, phase)
        for index in range(1, self.count + 1):
            here = ahead
            if index < self.count:
                ahead = self._start(tensors, index, phase)
            yield here
            # Else the piece would live on while the gathers of the one after the next begin.
            del here

    def _start(self, tensors: Sequence[Tensor], index: int, phase: Phase) -> _Arriving:
        return {
            number: door.gather.start(self._part(x, door, index), phase)
            for number, (x, door) in enumerate(zip(tensors, self.doors, strict=True))
            if door.gather is not None
        }

    def parts(self, tensors: Sequence[Tensor], index: int, arriving: _Arriving) -> list[Tensor]:
        """What piece ``index`` gets of each operand."""
        return [
            # Nobody needs what carries a gather once it has ended.
            arriving.pop(number).wait() if door.gather is not None else self._part(x, door, index)
            for number, (x, door) in enumerate(zip(tensors, self.doors, strict=True))
        ]

    def _part(self, x: Tensor, door: _Door, index: int) -> Tensor:
        """What piece ``index`` has of an operand here. A part of one lies by itself in memory."""
        if door.cut is not None:
            return take_piece(x, door.dim, door.cut, self.count, index).contiguous()
        return torch.zeros_like(x) if door.is_once and index else x

    def run(
        self, parts: Sequence[Tensor], index: int, moment: Moment | None = None
    ) -> tuple[Tensor, ...]:
        """The parts of the results, with the random numbers of ``moment``; default: now."""
        with self._drawing(index, moment):
            found = self.function(Piece(self.name, self.count, index), *parts)
        return found if isinstance(found, tuple) else (found,)

    @contextmanager
    def _drawing(self, index: int, moment: Moment | None) -> Iterator[None]:
        if self.rng is None:
            yield
            return
        with (
            self.rng.in_piece(self.name, self.count, index),
            self.rng.at(moment or self.rng.moment),
        ):
            yield

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The results."""
        found: list[Tensor | None] = [None] * len(self.results)
        dtypes: list[torch.dtype] = []
        for index, arriving in enumerate(self.arrivals(tensors, "forward")):
            made = self.run(self.parts(tensors, index, arriving), index)
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
        ctx: Any, loop: _Loop, moment: Moment | None, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.loop, ctx.moment = loop, moment
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return loop.forward(tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        loop: _Loop = ctx.loop
        tensors = ctx.saved_tensors
        # Of an operand in pieces the whole gradient, filled piece by piece; of any other the sum.
        found: list[Tensor | None] = [None] * len(tensors)
        wanted = ctx.needs_input_grad[2:]
        for index, arriving in enumerate(loop.arrivals(tensors, "backward")):
            parts = [
                x.detach().requires_grad_(wants and not (door.is_once and index))
                for x, wants, door in zip(
                    loop.parts(tensors, index, arriving), wanted, loop.doors, strict=True
                )
            ]
            with torch.enable_grad():
                made = loop.run(parts, index, ctx.moment)
            pairs = [
                (x, loop.gradient(result, grad, index))
                for x, result, grad in zip(made, loop.results, grads, strict=True)
                if grad is not None and x.requires_grad
            ]
            del made
            asked = [x for x in parts if x.requires_grad]
            got = iter(_gradients([x for x, _ in pairs], asked, [g for _, g in pairs]))
            del pairs
            for number, (x, door) in enumerate(zip(parts, loop.doors, strict=True)):
                grad = next(got) if x.requires_grad else None
                if grad is None:
                    continue
                if door.gather is not None:
                    grad = door.gather.back(grad)
                whole = found[number]
                found[number] = (
                    _added(whole, grad)
                    if door.cut is None
                    else loop.put(whole, grad, door.dim, door.cut, index)
                )
                del grad, whole
            del parts, asked, got, x, arriving
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
