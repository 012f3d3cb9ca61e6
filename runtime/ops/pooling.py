"""Poolings of images and sequences that are cut along space."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.convolution import Numbers, per_dim
from shardwright.runtime.ops.edges import CutDim, EdgeWords, cut_dims, trimmed, windows


def _max_pool(num_dims: int) -> Callable[..., Tensor]:
    plain = getattr(F, f"max_pool{num_dims}d")

    def max_pool(
        input: Tensor,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        dilation: Numbers = 1,
        ceil_mode: bool = False,
        *,
        edges: Sequence[EdgeWords] = (),
    ) -> Tensor:
        cuts = cut_dims(edges)
        # Padding must never be a maximum.
        x = windows(input, cuts, -math.inf)
        paddings = _beside(padding, cuts, input.ndim, num_dims)
        y: Tensor = plain(x, kernel_size, stride, paddings, dilation, ceil_mode)
        return trimmed(y, cuts)

    max_pool.__name__ = f"max_pool{num_dims}d"
    max_pool.__doc__ = f"``F.max_pool{num_dims}d``; dims of space are cut as ``edges`` say."
    return max_pool


def _avg_pool(num_dims: int) -> Callable[..., Tensor]:
    plain: Callable[..., Tensor] = getattr(F, f"avg_pool{num_dims}d")

    def avg_pool(
        input: Tensor,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        edges: Sequence[EdgeWords] = (),
    ) -> Tensor:
        cuts = cut_dims(edges)
        x = windows(input, cuts)
        paddings = _beside(padding, cuts, input.ndim, num_dims)
        options = () if divisor_override is None else (divisor_override,)
        y = plain(x, kernel_size, stride, paddings, ceil_mode, count_include_pad, *options)
        if divisor_override is None:
            first = input.ndim - num_dims
            for cut in cuts:
                # Windows that reach beyond the whole tensor were divided by all their places, as
                # the piece was pooled without padding along the cut dim.
                counted = per_dim(padding, num_dims)[cut.edge.dim - first]
                y = _by_count(y, cut, counted if count_include_pad else 0)
        return trimmed(y, cuts)

    avg_pool.__name__ = f"avg_pool{num_dims}d"
    avg_pool.__doc__ = f"``F.avg_pool{num_dims}d``; dims of space are cut as ``edges`` say."
    return avg_pool


def _by_count(y: Tensor, cut: CutDim, padding: int) -> Tensor:
    """Averages over whole windows as averages over what of them lies in the dim, or in as much
    ``padding`` at its ends.
    """
    edge, (start, stop) = cut.edge, cut.made
    counts = []
    for place in range(start, stop):
        first, last = edge.window.span(place, place + 1)
        # Windows at the ends of the dim reach beyond it, where nothing counts.
        counts.append(min(last, edge.size + padding) - max(first, -padding))
    if all(count == edge.window.reach for count in counts):
        return y
    factors = [edge.window.reach / count for count in counts]
    shape = [len(factors) if dim == edge.dim else 1 for dim in range(y.ndim)]
    return y * torch.tensor(factors, dtype=y.dtype, device=y.device).view(shape)


def _lp_pool(num_dims: int) -> Callable[..., Tensor]:
    plain: Callable[..., Tensor] = getattr(F, f"lp_pool{num_dims}d")

    def lp_pool(
        input: Tensor,
        norm_type: float,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        ceil_mode: bool = False,
        *,
        edges: Sequence[EdgeWords] = (),
    ) -> Tensor:
        cuts = cut_dims(edges)
        y = plain(windows(input, cuts), norm_type, kernel_size, stride, ceil_mode)
        return trimmed(y, cuts)

    lp_pool.__name__ = f"lp_pool{num_dims}d"
    lp_pool.__doc__ = f"``F.lp_pool{num_dims}d``; dims of space are cut as ``edges`` say."
    return lp_pool


def _adaptive(name: str) -> Callable[..., Tensor]:
    plain: Callable[..., Tensor] = getattr(F, name)
    num_dims = int(name[-2])

    def adaptive_pool(
        input: Tensor,
        output_size: Any,
        *,
        edges: Sequence[EdgeWords] = (),
        shares: Sequence[tuple[int, int]] = (),
    ) -> Tensor:
        cuts = cut_dims(edges)
        x = windows(input, cuts)
        first = input.ndim - num_dims
        sizes = [
            input.shape[first + i] if size is None else size
            for i, size in enumerate(per_dim(output_size, num_dims))
        ]
        for cut in cuts:
            start, stop = cut.made
            # A rank without places makes one, which is trimmed: torch makes no empty results.
            sizes[cut.edge.dim - first] = max(1, stop - start)
        # A dim that becomes one place: an average over this rank's places, by its share of all.
        share = 1.0
        for dim, size in shares:
            share *= input.shape[dim] / size
            if not input.shape[dim]:
                x = torch.cat([x, x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]])], dim)
        y = plain(x, sizes if num_dims > 1 else sizes[0])
        return trimmed(y if share == 1.0 else y * share, cuts)

    adaptive_pool.__name__ = name
    adaptive_pool.__doc__ = f"""``F.{name}``; dims of space are cut as ``edges`` say.

    ``shares``: dims that are cut and become one place, with their whole sizes; the result is then a
    summand.
    """
    return adaptive_pool


def _beside(
    padding: Numbers, cuts: Sequence[CutDim], ndim: int, num_dims: int
) -> Numbers | tuple[int, ...]:
    """The padding of dims that are whole: the windows of the others have theirs."""
    paddings = list(per_dim(padding, num_dims))
    for cut in cuts:
        paddings[cut.edge.dim - (ndim - num_dims)] = 0
    return tuple(paddings)


max_pool1d, max_pool2d, max_pool3d = map(_max_pool, (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = map(_avg_pool, (1, 2, 3))
lp_pool1d, lp_pool2d, lp_pool3d = map(_lp_pool, (1, 2, 3))
adaptive_avg_pool1d = _adaptive("adaptive_avg_pool1d")
adaptive_avg_pool2d = _adaptive("adaptive_avg_pool2d")
adaptive_avg_pool3d = _adaptive("adaptive_avg_pool3d")
adaptive_max_pool1d = _adaptive("adaptive_max_pool1d")
adaptive_max_pool2d = _adaptive("adaptive_max_pool2d")
adaptive_max_pool3d = _adaptive("adaptive_max_pool3d")
