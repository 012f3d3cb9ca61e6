"""Softmax and its logarithms over a dim that is split.

The maximum and the sum of exponentials are reduced over the axes, in the forward; the backward of
the first two reduces one more sum. Pieces may be uneven or empty, and entries minus infinity.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.axes import (
    Axes,
    accumulation_dtype,
    cast_by_autocast,
    communicating,
    local_max,
    max_over,
    sum_over,
)
from shardwright.runtime.second_derivatives import differentiable_once

# Those that are asked what autocast makes of their input.
_softmax = partial(F.softmax, dim=0)
_log_softmax = partial(F.log_softmax, dim=0)
_logsumexp = partial(torch.logsumexp, dim=0)


def softmax(
    input: Tensor, dim: int, dtype: torch.dtype | None = None, *, dim_axes: Axes = ()
) -> Tensor:
    """``F.softmax``; ``dim`` of input and result is split over ``dim_axes``."""
    axes = communicating(dim_axes)
    if not axes:
        return F.softmax(input, dim, dtype=dtype)
    x = cast_by_autocast(input, _softmax) if dtype is None else input.to(dtype)
    return cast(Tensor, _Softmax.apply(x, dim % x.ndim, axes))  # type: ignore[no-untyped-call]


def log_softmax(
    input: Tensor, dim: int, dtype: torch.dtype | None = None, *, dim_axes: Axes = ()
) -> Tensor:
    """``F.log_softmax``; ``dim`` of input and result is split over ``dim_axes``."""
    axes = communicating(dim_axes)
    if not axes:
        return F.log_softmax(input, dim, dtype=dtype)
    x = cast_by_autocast(input, _log_softmax) if dtype is None else input.to(dtype)
    return cast(Tensor, _LogSoftmax.apply(x, dim % x.ndim, axes))  # type: ignore[no-untyped-call]


def logsumexp(
    input: Tensor, dim: int | tuple[int, ...], keepdim: bool = False, *, dim_axes: Axes = ()
) -> Tensor:
    """``torch.logsumexp``; a dim of the input is split over ``dim_axes``, the result is whole on
    every rank.
    """
    axes = communicating(dim_axes)
    if not axes:
        return torch.logsumexp(input, dim, keepdim)
    input = cast_by_autocast(input, _logsumexp)
    dims = tuple(d % input.ndim for d in ((dim,) if isinstance(dim, int) else dim))
    result = cast(Tensor, _LogSumExp.apply(input, dims, axes))  # type: ignore[no-untyped-call]
    if keepdim:
        return result
    return result.view([size for d, size in enumerate(result.shape) if d not in dims])


def exponentials(x: Tensor, dims: tuple[int, ...], axes: Axes) -> tuple[Tensor, Tensor]:
    """``exp(x - maximum)`` and the maximum over ``dims`` and ``axes``, with size 1 there."""
    maximum = max_over(local_max(x, dims), axes)
    return (x - maximum).exp_(), maximum


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int, axes: Axes) -> Tensor:
        ctx.dim, ctx.axes = dim, axes
        x = input.to(accumulation_dtype(input.dtype))
        powers, _ = exponentials(x, (dim,), axes)
        result = powers.div_(sum_over(powers.sum(dim, keepdim=True), axes)).to(input.dtype)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        wide = accumulation_dtype(grad.dtype)
        mean = sum_over(
            (grad * result).sum(ctx.dim, keepdim=True, dtype=wide), ctx.axes, "backward"
        )
        return ((grad - mean) * result).to(grad.dtype), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int, axes: Axes) -> Tensor:
        ctx.dim, ctx.axes = dim, axes
        x = input.to(accumulation_dtype(input.dtype))
        powers, maximum = exponentials(x, (dim,), axes)
        total = sum_over(powers.sum(dim, keepdim=True), axes)
        result = (x - maximum - total.log()).to(input.dtype)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        wide = accumulation_dtype(grad.dtype)
        total = sum_over(grad.sum(ctx.dim, keepdim=True, dtype=wide), ctx.axes, "backward")
        return (grad - result.to(wide).exp() * total).to(grad.dtype), None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dims: tuple[int, ...], axes: Axes) -> Tensor:
        x = input.to(accumulation_dtype(input.dtype))
        maximum = max_over(local_max(x, dims), axes)
        finite = maximum.masked_fill(maximum.isinf(), 0.0)  # inf - inf is nan
        total = sum_over((x - finite).exp_().sum(dims, keepdim=True), axes)
        result = (total.log() + finite).to(input.dtype)
        ctx.save_for_backward(input, result)
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, result = ctx.saved_tensors
        return grad * (input - result).exp(), None, None
