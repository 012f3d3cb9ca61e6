"""Layer norm and RMS norm over a split dim: each rank normalises its piece of every row, and only
sums of whole rows travel.

Forward, layer norm sums the elements of a row, and then their squared distances from the mean, so
that no variance cancels; RMS norm sums squares. Backward, two sums of a row (one for RMS norm)
travel as one. Exact for uneven and empty pieces.
"""

from __future__ import annotations

import math
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
    sum_over,
)
from shardwright.runtime.second_derivatives import differentiable_once

# Those that are asked what autocast makes of their input.
_layer_norm = partial(F.layer_norm, normalized_shape=(1,))
_rms_norm = partial(F.rms_norm, normalized_shape=(1,))


def layer_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    norm_axes: Axes = (),
) -> Tensor:
    """``F.layer_norm`` of a piece ``[*, h/axes]``. ``normalized_shape``: the whole one. ``weight``
    and ``bias``: their pieces ``[h/axes]``.
    """
    axes = communicating(norm_axes)
    if not axes:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    x = cast_by_autocast(input, _layer_norm)
    return cast(
        Tensor,
        _Norm.apply(x, weight, bias, axes, normalized_shape, eps, True),  # type: ignore[no-untyped-call]
    )


def rms_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    norm_axes: Axes = (),
) -> Tensor:
    """``F.rms_norm`` of a piece; see :func:`layer_norm`."""
    axes = communicating(norm_axes)
    if not axes:
        return F.rms_norm(input, normalized_shape, weight, eps)
    x = cast_by_autocast(input, _rms_norm)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return cast(
        Tensor,
        _Norm.apply(x, weight, None, axes, normalized_shape, eps, False),  # type: ignore[no-untyped-call]
    )


class _Norm(torch.autograd.Function):
    """The normalised piece. ``centres``: the mean is taken off first, as layer norm does.

    With y = (x - mean) / deviation, g the gradient of the result times the weight, and n the
    elements of a row: dx = (g - sum(g)/n - y sum(g y)/n) / deviation; RMS norm has no sum(g).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        axes: Axes,
        shape: tuple[int, ...],
        eps: float,
        centres: bool,
    ) -> Tensor:
        # The dims of ``shape``, split over the ranks of ``axes``.
        dims = list(range(input.ndim - len(shape), input.ndim))
        count = math.prod(shape)
        x = input.to(accumulation_dtype(input.dtype))
        mean = None
        # ``rms_norm`` does not centre.
        if centres:
            mean = sum_over(x.sum(dims, keepdim=True), axes) / count
            x = x - mean
        mean_square = sum_over(x.square().sum(dims, keepdim=True), axes) / count
        scale = (mean_square + eps).rsqrt()
        ctx.axes, ctx.dims, ctx.count = axes, dims, count
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight, mean, scale)
        result = x * scale
        if weight is not None:
            result = result * weight.to(x.dtype)
        if bias is not None:
            result = result + bias.to(x.dtype)
        return result.to(input.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad = grad.to(scale.dtype)
        x = input.to(scale.dtype)
        normalised = (x if mean is None else x - mean) * scale
        rows = list(range(input.ndim - len(ctx.dims)))
        grad_input = None
        # grad_input = scale * (g - normalised * mean(g * normalised) - mean(g)): both means go in
        # one message.
        if wants_input:
            g = grad if weight is None else grad * weight.to(grad.dtype)
            sums = [(g * normalised).sum(ctx.dims, keepdim=True)]
            if mean is not None:
                sums.append(g.sum(ctx.dims, keepdim=True))
            means = sum_over(torch.stack(sums), ctx.axes, "backward") / ctx.count
            grad_input = g - normalised * means[0]
            if mean is not None:
                grad_input = grad_input - means[1]
            grad_input = (grad_input * scale).to(input.dtype)
        # Rows are local, so these are partial sums of the whole gradient.
        grad_weight = (grad * normalised).sum(rows).to(weight.dtype) if wants_weight else None
        grad_bias = grad.sum(rows).to(ctx.bias_dtype) if wants_bias else None
        return grad_input, grad_weight, grad_bias, None, None, None, None
