"""Scans along a dim that is cut: each rank scans its own piece, after what the pieces before it
come to.

Every rank gets the totals of all pieces, one place each, and scans those of earlier pieces and its
own places in one go, with torch's operator. So what torch makes of zeros, infinities and their
gradients holds here too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.adapters import all_gather
from shardwright.runtime.ops.axes import Axes, cast_by_autocast, communicating


def cumsum(
    input: Tensor, dim: int, *, dtype: torch.dtype | None = None, dim_axes: Axes = ()
) -> Tensor:
    """``torch.cumsum``; ``dim`` of input and result is cut over ``dim_axes``."""
    axes = communicating(dim_axes)
    if not axes:
        return torch.cumsum(input, dim, dtype=dtype)
    x = _summable(input, dtype, torch.cumsum)
    return _scan(x, dim % x.ndim, axes, partial(torch.sum, keepdim=True), torch.cumsum)


def cumprod(
    input: Tensor, dim: int, *, dtype: torch.dtype | None = None, dim_axes: Axes = ()
) -> Tensor:
    """``torch.cumprod``; ``dim`` of input and result is cut over ``dim_axes``."""
    axes = communicating(dim_axes)
    if not axes:
        return torch.cumprod(input, dim, dtype=dtype)
    x = _summable(input, dtype, torch.cumprod)
    return _scan(x, dim % x.ndim, axes, partial(torch.prod, keepdim=True), torch.cumprod)


def logcumsumexp(input: Tensor, dim: int, *, dim_axes: Axes = ()) -> Tensor:
    """``torch.logcumsumexp``; ``dim`` of input and result is cut over ``dim_axes``."""
    axes = communicating(dim_axes)
    if not axes:
        return torch.logcumsumexp(input, dim)
    x = cast_by_autocast(input, partial(torch.logcumsumexp, dim=0))
    total = partial(torch.logsumexp, keepdim=True)
    return _scan(x, dim % x.ndim, axes, total, torch.logcumsumexp)


def _summable(x: Tensor, dtype: torch.dtype | None, scan: Callable[..., Tensor]) -> Tensor:
    """``x`` in the dtype in which it is scanned: integers are scanned as 64-bit ones."""
    if dtype is not None:
        return x.to(dtype)
    if not x.is_floating_point() and not x.is_complex():
        return x.to(torch.int64)
    return cast_by_autocast(x, partial(scan, dim=0))


def _scan(
    x: Tensor, dim: int, axes: Axes, total: Callable[..., Tensor], scan: Callable[..., Any]
) -> Tensor:
    """``total``: what a piece comes to, kept with size 1; ``scan``: what makes the result."""
    totals, index = total(x, dim), 0
    for axis in reversed(axes):  # minor to major, so that pieces come in order
        totals = all_gather(totals, axis, dim, backward="reduce_scatter")
    # This rank's number among all pieces, the first axis counting most.
    for axis in axes:
        index = index * axis.size + axis.index
    # Also where no piece comes before: a rank that left out the gathering would miss in its
    # backward.
    before = totals.narrow(dim, 0, index)
    # The scan of what the pieces before come to, and of the own piece: the places behind are right.
    scanned: Tensor = scan(torch.cat([before, x], dim), dim)
    return scanned.narrow(dim, index, x.shape[dim])
