"""Group normalisation of images and sequences that are cut along space, exact for uneven and empty
pieces.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.axes import (
    Axes,
    accumulation_dtype,
    cast_by_autocast,
    communicating,
    sum_over,
)
from shardwright.runtime.second_derivatives import differentiable_once


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    space_axes: Axes = (),
    count: int | None = None,
) -> Tensor:
    """``F.group_norm`` of ``[N, C, ...]`` with dims of space cut over ``space_axes``.

    ``count``: elements per group on all ranks together. The gradients of weight and bias are
    summands.
    """
    axes = communicating(space_axes)
    if not axes:
        return F.group_norm(input, num_groups, weight, bias, eps)
    assert count is not None, "group norm over split dims needs the global number of elements"
    input = cast_by_autocast(input, partial(F.group_norm, num_groups=1))
    x = _by_group(input, num_groups)
    y: Tensor = _Normalised.apply(x, axes, count, eps)  # type: ignore[no-untyped-call]
    y = y.to(input.dtype).view(input.shape)
    shape = (1, -1, *[1] * (input.ndim - 2))
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    return y.to(input.dtype)


def _by_group(x: Tensor, num_groups: int) -> Tensor:
    """``[N, C, ...]`` as ``[N, groups, elements]``, which also holds where there are none."""
    num_elements = x.numel() // max(1, x.shape[0] * num_groups)
    return x.reshape(x.shape[0], num_groups, num_elements)


class _Normalised(torch.autograd.Function):
    """Rows ``[N, groups, elements]`` less their mean, over their deviation. Two passes, so that no
    variance cancels.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, axes: Axes, count: int, eps: float) -> Tensor:
        x = input.to(accumulation_dtype(input.dtype))
        mean = sum_over(x.sum(-1, keepdim=True), axes) / count
        centred = x - mean
        var = sum_over(centred.square().sum(-1, keepdim=True), axes) / count
        scale = (var + eps).rsqrt()
        ctx.axes, ctx.count = axes, count
        ctx.save_for_backward(input, mean, scale)
        return centred.mul_(scale)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, mean, scale = ctx.saved_tensors
        normalised = (input.to(mean.dtype) - mean).mul_(scale)
        grad = grad.to(mean.dtype)
        sums = torch.stack([grad.sum(-1, keepdim=True), (grad * normalised).sum(-1, keepdim=True)])
        along_mean, along_normalised = sum_over(sums, ctx.axes, "backward") / ctx.count
        result = (grad - along_mean - normalised * along_normalised) * scale
        return result.to(input.dtype), None, None, None
