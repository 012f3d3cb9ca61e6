"""Operators that move the places of a dim, where it is cut over ranks: slices, padding, flips,
rolls, windows, resizing.

A rank gets what lies in its piece of the result. So the shift of labels, ``logits[:, :-1]``, leaves
the logits where they are, but for a row at each border.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.axes import Axes
from shardwright.runtime.ops.edges import EdgeWords, cut_dims, trimmed, window, windows
from shardwright.runtime.windows import Edge, Window

Picked = tuple[int, int | tuple[int, int], int, Axes]
"""A dim of which one place is read: dim, size, place, and the axes that cut it."""


def getitem(
    input: Tensor,
    index: tuple[Any, ...],
    *,
    edges: Sequence[EdgeWords] = (),
    picked: Sequence[Picked] = (),
) -> Tensor:
    """``input[index]``, with one item for each dim of the input, and ``None`` for new ones. Of a
    dim that is cut, ``edges`` say which slice is taken, or ``picked`` which place; then the result
    is a summand.
    """
    x, cuts = input, cut_dims(edges)
    items = list(index)
    position = [i for i, item in enumerate(items) if item is not None]
    for cut in cuts:
        x = window(x, cut)
        # The window begins with the first place that is read.
        items[position[cut.edge.dim]] = slice(
            0, None if cut.makes_any else 0, cut.edge.window.stride
        )
    for dim, size, place, axes in picked:
        x, at = _picked(x, dim, size, place, axes)
        item = items[position[dim]]
        items[position[dim]] = slice(at, at + 1) if isinstance(item, slice) else at
    return x[tuple(items)]


def select(input: Tensor, dim: int, index: int, *, picked: Sequence[Picked] = ()) -> Tensor:
    """``input.select``; ``picked`` as in :func:`getitem`."""
    for words in picked:
        input, index = _picked(input, *words)
    return input.select(dim, index)


def narrow_dim(
    input: Tensor, dim: int, start: int, length: int, *, edges: Sequence[EdgeWords] = ()
) -> Tensor:
    """``input.narrow``; ``edges`` as in :func:`getitem`."""
    cuts = cut_dims(edges)
    return trimmed(windows(input, cuts), cuts) if cuts else input.narrow(dim, start, length)


def pad_dims(
    input: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
    *,
    edges: Sequence[EdgeWords] = (),
) -> Tensor:
    """``F.pad`` with a constant; dims are cut as ``edges`` say."""
    cuts, amounts = cut_dims(edges), list(pad)
    x = windows(input, cuts, 0.0 if value is None else value)
    for cut in cuts:
        at = 2 * (input.ndim - 1 - cut.edge.dim)
        amounts[at : at + 2] = [0, 0]
    return F.pad(trimmed(x, cuts), amounts, mode, value)


def flip(input: Tensor, *dims: int, edges: Sequence[EdgeWords] = ()) -> Tensor:
    """``input.flip``; dims are cut as ``edges`` say."""
    cuts = cut_dims(edges)
    return trimmed(windows(input, cuts), cuts).flip(dims)


def roll(
    input: Tensor,
    shifts: int | tuple[int, ...],
    dims: int | tuple[int, ...],
    *,
    edges: Sequence[EdgeWords] = (),
) -> Tensor:
    """``torch.roll``; dims are cut as ``edges`` say."""
    cuts = cut_dims(edges)
    x = trimmed(windows(input, cuts), cuts)
    amounts = (shifts,) if isinstance(shifts, int) else shifts
    places = (dims,) if isinstance(dims, int) else dims
    moved = {cut.edge.dim for cut in cuts}
    rest = [(n, d) for n, d in zip(amounts, places, strict=True) if d % x.ndim not in moved]
    return torch.roll(x, [n for n, _ in rest], [d for _, d in rest]) if rest else x


def unfold(
    input: Tensor, dimension: int, size: int, step: int, *, edges: Sequence[EdgeWords] = ()
) -> Tensor:
    """``input.unfold``; the dim is cut as ``edges`` say."""
    cuts = cut_dims(edges)
    return trimmed(windows(input, cuts).unfold(dimension, size, step), cuts)


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
    *,
    edges: Sequence[EdgeWords] = (),
    scales: tuple[int, ...] = (),
) -> Tensor:
    """``F.interpolate`` that makes every dim of space ``scales`` times as long; dims are cut as
    ``edges`` say.
    """
    x, cuts = input, cut_dims(edges)
    for cut in cuts:
        x = window(x, cut, None)
    sizes = [n * scale for n, scale in zip(x.shape[2:], scales, strict=True)]
    y = F.interpolate(x, sizes, mode=mode, align_corners=align_corners)
    for cut in cuts:
        (start, stop), dim = cut.made, cut.edge.dim
        # The first place that was read makes ``scale`` places, of which this rank's may begin
        # later.
        offset = start - max(0, cut.read[0]) * scales[dim - 2] if stop > start else 0
        y = y.narrow(dim, offset, stop - start)
    return y


def _picked(
    x: Tensor, dim: int, size: int | tuple[int, int], place: int, axes: Axes
) -> tuple[Tensor, int]:
    """A tensor and the place in it of what is picked: on the rank that holds it, its own; on others
    zeros, to which gradients flow.
    """
    num, unit = (size, 1) if isinstance(size, int) else size
    nums_ranks = tuple(axis.size for axis in axes)
    edge = Edge(dim, num * unit, num * unit, Window(1, 0, 1), nums_ranks, unit, unit)
    held = edge.held(tuple(axis.index for axis in axes))
    start, stop = held[0] if held else (0, 0)
    if start <= place < stop:
        return x, place - start
    zeros = x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return torch.cat([x.narrow(dim, 0, 0), zeros], dim), 0
