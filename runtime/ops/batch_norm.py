"""Batch normalisation with statistics over a split batch, exact for uneven and empty pieces."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.errors import InputError
from shardwright.runtime.ops.axes import Axes, accumulation_dtype, communicating, sum_over
from shardwright.runtime.second_derivatives import differentiable_once


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    batch_axes: Axes = (),
    count: int | None = None,
) -> Tensor:
    """``F.batch_norm`` of ``[N, C, ...]`` with N or spatial dims split over ``batch_axes``.

    ``count``: elements per channel on all ranks together. Running statistics, changed in place, are
    equal on all ranks. The gradients of weight and bias are summands.

    Raises :class:`InputError` in training if there is one element per channel only.
    """
    axes = communicating(batch_axes)
    if not axes or not (training or running_mean is None):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    assert count is not None, (
        "batch norm over split dims needs the global number of elements per channel"
    )
    if training and count == 1:
        raise InputError(
            "batch norm needs more than one value per channel in training",
            why=f"the input is {list(input.shape)}",
        )
    result, mean, var = _BatchNorm.apply(input, weight, bias, axes, count, eps)  # type: ignore[no-untyped-call]
    # Normalising divides by ``count``, running statistics by ``count - 1``, as torch does (Bessel's
    # correction); ``count`` is that of all ranks.
    if training and running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    return result  # type: ignore[no-any-return]


def _per_channel(x: Tensor, ndim: int) -> Tensor:
    """``[C]`` as ``[1, C, 1...]``."""
    return x.view(1, x.shape[0], *[1] * (ndim - 2))


class _BatchNorm(torch.autograd.Function):
    """The normalised input, and mean and (biased) variance per channel. Two passes, so that no
    variance cancels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        axes: Axes,
        count: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # All dims but the channels; over the ranks of ``axes`` as well.
        dims = [dim for dim in range(input.ndim) if dim != 1]
        x = input.to(accumulation_dtype(input.dtype))
        mean = sum_over(x.sum(dims), axes) / count
        # The variance of centred numbers: a difference of large squares would lose digits.
        centred = x - _per_channel(mean, x.ndim)
        var = sum_over(centred.square().sum(dims), axes) / count
        scale = (var + eps).rsqrt()
        ctx.axes, ctx.dims, ctx.count, ctx.bias_dtype = (
            axes,
            dims,
            count,
            None if bias is None else bias.dtype,
        )
        ctx.save_for_backward(input, weight, mean, scale)
        result = centred.mul_(_per_channel(scale, x.ndim))
        if weight is not None:
            result = result.mul_(_per_channel(weight.to(x.dtype), x.ndim))
        if bias is not None:
            result = result.add_(_per_channel(bias.to(x.dtype), x.ndim))
        # Running statistics are made of them, without gradients.
        ctx.mark_non_differentiable(mean, var)
        return result.to(input.dtype), mean, var

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        ndim = input.ndim
        grad = grad.to(mean.dtype)
        # Computed again from the input, which is there anyway, instead of kept since the forward.
        normalised = (input.to(mean.dtype) - _per_channel(mean, ndim)).mul_(
            _per_channel(scale, ndim)
        )
        # The gradients of weight and bias are summed over local rows only: they are partial.
        grad_bias, grad_weight = grad.sum(ctx.dims), (grad * normalised).sum(ctx.dims)
        grad_input = None
        # grad_input = slope * (grad - mean(grad) - normalised * mean(grad * normalised)): both
        # means go in one message.
        if ctx.needs_input_grad[0]:
            means = (
                sum_over(torch.stack([grad_bias, grad_weight]), ctx.axes, "backward") / ctx.count
            )
            slope = scale if weight is None else scale * weight.to(scale.dtype)
            along_mean, along_normalised = (_per_channel(m, ndim) for m in means)
            grad_input = (grad - along_mean - normalised * along_normalised) * _per_channel(
                slope, ndim
            )
            grad_input = grad_input.to(input.dtype)
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        return (
            grad_input,
            grad_weight.to(weight.dtype) if wants_weight else None,
            grad_bias.to(ctx.bias_dtype) if wants_bias else None,
            None,
            None,
            None,
        )
