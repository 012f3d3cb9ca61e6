"""What an operator reads of a dim that is cut over ranks: its own piece, edges of its neighbours'
pieces, and padding.

Generated code says it per dim, ``edges=((2, 224, 112, (2, 3, 7), (tp,)),)``: dim 2 of the operand
has 224 places and becomes one of 112; place ``p`` of the result reads 7 places from ``2 * p - 3``;
``tp`` cuts both. A size ``(14, 16)`` stands for 14 times 16 places that are never cut apart.

Whoever needs a place gets it in one all-to-all per axis, with the lengths that are needed, and the
backward sends gradients home and adds them up. Where no rank needs anything of another, nothing is
sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from shardwright.runtime.ops.axes import Axes
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.second_derivatives import differentiable_once
from shardwright.runtime.windows import Edge, Hop, Reading, Spans, Window, common, hops, length

EdgeWords = tuple[int, int | tuple[int, int], int | tuple[int, int], tuple[Any, ...], Axes]
"""An edge as generated code writes it: dim, size, size of the result, window, axes."""


@dataclass(frozen=True, slots=True)
class CutDim:
    """An edge on the rank at hand."""

    edge: Edge
    axes: Axes

    @classmethod
    def of(cls, words: EdgeWords) -> CutDim:
        dim, size, result_size, window, axes = words
        (num, unit), (result_num, result_unit) = (
            (n, 1) if isinstance(n, int) else n for n in (size, result_size)
        )
        edge = Edge(
            dim,
            num * unit,
            result_num * result_unit,
            Window(*window),
            tuple(axis.size for axis in axes),
            unit,
            result_unit,
            tuple(axis.turns for axis in axes),
        )
        return cls(edge, axes)

    @property
    def index(self) -> tuple[int, ...]:
        return tuple(axis.index for axis in self.axes)

    @property
    def made(self) -> tuple[int, int]:
        """The places of the result that this rank makes, which are one run."""
        runs = self.edge.made(self.index)
        assert len(runs) <= 1, f"{self.edge} has several runs here"
        return runs[0] if runs else (0, 0)

    @property
    def makes_any(self) -> bool:
        """Whether this rank makes any place of the result."""
        return bool(self.edge.made(self.index))

    @property
    def read(self) -> tuple[int, int]:
        """The places that it reads for :attr:`made`, padding included."""
        start, stop = self.made
        return self.edge.window.span(start, stop) if stop > start else (0, 0)


def cut_dims(edges: Sequence[EdgeWords]) -> list[CutDim]:
    """The edges of a call."""
    return [CutDim.of(words) for words in edges]


def windows(x: Tensor, cuts: Sequence[CutDim], fill: float = 0.0) -> Tensor:
    """What this rank reads of an operand, with ``fill`` beyond its ends.

    A rank that makes nothing reads as much ``fill`` as one place of the result needs, so that its
    operator has something to run on; :func:`trimmed` drops what comes of it.
    """
    # One dim after the other: what the second one sends has the edges of the first one, so corners
    # come along.
    for cut in cuts:
        x = window(x, cut, fill)
    return x


def window(x: Tensor, cut: CutDim, fill: float | None = 0.0) -> Tensor:
    """:func:`windows` of one dim. Without ``fill`` the window ends where the dim does."""
    edge, index = cut.edge, cut.index
    readings = edge.read(index)
    left = right = 0
    if not readings:
        right = max(1, edge.window.reach)
    elif fill is not None and len(readings) == 1:
        left, right = readings[0].left, readings[0].right
    for hop in hops(edge, index):
        last = hop.axis == len(cut.axes) - 1
        group, me = cut.axes[hop.axis], index[hop.axis]
        ends = (left, right) if last else (0, 0)
        if hop.have[me] == hop.want[me] and not hop.sends and ends == (0, 0):
            continue
        x = cast(Tensor, _Read.apply(x, group, edge.dim, hop, ends, fill or 0))  # type: ignore[no-untyped-call]
    return x if len(readings) <= 1 else _filled(x, edge.dim, readings, fill or 0)


def _filled(x: Tensor, dim: int, readings: Sequence[Reading], fill: float) -> Tensor:
    """What is read for several runs, with ``fill`` beside each."""
    if not any(reading.left or reading.right for reading in readings):
        return x
    parts, at = [], 0
    for reading in readings:
        inside = length(reading.spans)
        # An empty part stays: a rank that reads padding alone takes part in the backward, too.
        own = x.narrow(dim, at, inside)
        around = [x.new_full(_with(x.shape, dim, n), fill) for n in (reading.left, reading.right)]
        parts += [around[0], own, around[1]]
        at += inside
    return torch.cat(parts, dim)


def trimmed(y: Tensor, cuts: Sequence[CutDim]) -> Tensor:
    """A result without what a rank that makes nothing computed, and without what came of places
    that two runs read.
    """
    for cut in cuts:
        readings, dim = cut.edge.read(cut.index), cut.edge.dim
        if not readings:
            y = y.narrow(dim, 0, 0)
        if len(readings) > 1:
            stride = abs(cut.edge.window.stride)
            starts = accumulate((reading.length // stride for reading in readings), initial=0)
            own = [y.narrow(dim, at, r.made) for at, r in zip(starts, readings, strict=False)]
            if sum(r.made for r in readings) < y.shape[dim]:
                y = torch.cat(own, dim)
    return y


class _Read(torch.autograd.Function):
    """One hop: the places of its member's ``want`` that ranks of the axis have, and ``fill`` in
    front of them and behind them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: AxisGroup,
        dim: int,
        hop: Hop,
        ends: tuple[int, int],
        fill: float,
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.hop, ctx.left, ctx.shape = axis, dim, hop, ends[0], x.shape
        me = axis.index
        arrived = _exchanged(
            axis,
            dim,
            [_taken(x, dim, hop.have[me], common(hop.have[me], w)) for w in hop.want],
            [_with(x.shape, dim, length(common(h, hop.want[me]))) for h in hop.have],
            hop.sends,
            "forward",
        )
        parts = [x.new_full(_with(x.shape, dim, ends[0]), fill)] if ends[0] else []
        parts += _in_order(arrived, dim, hop.have, hop.want[me])
        if ends[1]:
            parts.append(x.new_full(_with(x.shape, dim, ends[1]), fill))
        return torch.cat(parts, dim) if parts else x.new_empty(_with(x.shape, dim, 0))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, hop = ctx.axis, ctx.dim, ctx.hop
        me = axis.index
        # By owner, what this rank read of it, in the order in which it came.
        homes: list[list[Tensor]] = [[] for _ in hop.have]
        at = ctx.left
        for owner, start, stop in _sources(hop.have, hop.want[me]):
            homes[owner].append(grad.narrow(dim, at, stop - start))
            at += stop - start
        empty = grad.new_empty(_with(ctx.shape, dim, 0))
        arrived = _exchanged(
            axis,
            dim,
            [torch.cat(parts, dim) if parts else empty for parts in homes],
            [_with(ctx.shape, dim, length(common(hop.have[me], w))) for w in hop.want],
            hop.sends,
            "backward",
        )
        result = grad.new_zeros(ctx.shape)
        for want, chunk in zip(hop.want, arrived, strict=True):
            at = 0
            for start, stop in common(hop.have[me], want):
                place = result.narrow(dim, _offset(hop.have[me], start), stop - start)
                # Windows overlap, so an element may have gradients from several ranks.
                place.add_(chunk.narrow(dim, at, stop - start))
                at += stop - start
        return result, None, None, None, None, None


def _exchanged(
    axis: AxisGroup,
    dim: int,
    pieces: list[Tensor],
    shapes: list[tuple[int, ...]],
    sends: bool,
    phase: Phase,
) -> list[Tensor]:
    """What the members of the axis have for this one, by member; its own piece stays here."""
    me = axis.index
    own = pieces[me]
    if not sends:
        return [own if i == me else own.new_empty(shape) for i, shape in enumerate(shapes)]
    empty = _with(own.shape, dim, 0)
    pieces[me], shapes[me] = own.new_empty(empty), empty
    arrived = axis.communicator.all_to_all(pieces, shapes, phase=phase)
    return [own if i == me else chunk for i, chunk in enumerate(arrived)]


@functools.lru_cache(maxsize=4096)
def _sources(have: tuple[Spans, ...], want: Spans) -> list[tuple[int, int, int]]:
    """Where the places of ``want`` come from, in their order: ``(owner, start, stop)``."""
    found = []
    for span in want:
        parts = [
            (start, stop, owner)
            for owner, spans in enumerate(have)
            for start, stop in common(spans, (span,))
        ]
        found += [(owner, start, stop) for start, stop, owner in sorted(parts)]
    return found


def _in_order(
    arrived: list[Tensor], dim: int, have: tuple[Spans, ...], want: Spans
) -> list[Tensor]:
    """The parts of what arrived, by owner, in the order of ``want``."""
    taken = [0] * len(arrived)
    parts = []
    for owner, start, stop in _sources(have, want):
        parts.append(arrived[owner].narrow(dim, taken[owner], stop - start))
        taken[owner] += stop - start
    return parts


def _taken(x: Tensor, dim: int, have: Spans, wanted: Spans) -> Tensor:
    """The places ``wanted`` of a tensor that has the places ``have``."""
    parts = [x.narrow(dim, _offset(have, start), stop - start) for start, stop in wanted]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def _offset(have: Spans, place: int) -> int:
    """Where a place lies in a tensor that has the places ``have``."""
    at = 0
    for start, stop in have:
        if start <= place < stop:
            return at + place - start
        at += stop - start
    raise AssertionError(f"{place} is not in {have}")


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
