"""Cross entropy and negative log likelihood with split classes, split rows, or both.

Along ``class_axes`` logits and class weights are split, the result is whole. Along ``row_axes``
rows (batch, positions) are split, and the result is a summand of the reduced loss: each rank
divides its local sum by the global denominator, through which no gradient flows. Legend: N rows of
any shape, C classes, here the local ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.adapters import all_reduce
from shardwright.runtime.ops.axes import (
    Axes,
    accumulation_dtype,
    cast_by_autocast,
    communicating,
    sum_over,
)
from shardwright.runtime.ops.indices import check_indices
from shardwright.runtime.ops.softmax import exponentials, log_softmax
from shardwright.runtime.second_derivatives import differentiable_once


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    class_axes: Axes = (),
    row_axes: Axes = (),
    num_classes: int | None = None,
    start: int = 0,
    count: int | None = None,
) -> Tensor:
    """``F.cross_entropy`` of logits ``[N, C, d1...]`` or ``[C]``.

    ``target``: global class indices ``[N, d1...]``, or probabilities of the shape of ``input``.
    ``num_classes``: of all ranks, where indices that none of them has are refused; ``start``: the
    first local class. ``count``: rows of all ranks, needed for the mean with probabilities.
    """
    class_axes, row_axes = communicating(class_axes), communicating(row_axes)
    # Split along a dim that needs nothing: torch's own function.
    if not class_axes and not row_axes:
        return F.cross_entropy(
            input, target, weight, None, ignore_index, None, reduction, label_smoothing
        )
    input = cast_by_autocast(input, _cross_entropy)
    if class_axes and num_classes is not None and not target.is_floating_point():
        _check_targets(target, num_classes, ignore_index)
    # Smoothing is spread over the classes of all ranks.
    num_classes = num_classes if num_classes is not None else input.shape[_class_dim(input)]
    # Probabilities instead of indices.
    if target.is_floating_point():
        rows = _soft_rows(input, target, weight, label_smoothing, num_classes, class_axes)
        if reduction == "none":
            return rows
        if reduction == "sum":
            return rows.sum()
        assert count is not None, (
            "the mean of a cross entropy with probabilities needs the global number of rows"
        )
        return rows.sum() / count
    # Split classes: each row needs its maximum and its sum over all ranks.
    if class_axes:
        rows, row_weights = _VocabularyCrossEntropy.apply(  # type: ignore[no-untyped-call]
            input, target, weight, ignore_index, label_smoothing, class_axes, num_classes, start
        )
    else:
        rows = F.cross_entropy(
            input, target, weight, None, ignore_index, None, "none", label_smoothing
        )
        row_weights = _row_weights(target, weight, ignore_index, rows.dtype)
    return _reduced(rows, row_weights, reduction, row_axes).to(input.dtype)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    class_axes: Axes = (),
    row_axes: Axes = (),
    num_classes: int | None = None,
    start: int = 0,
) -> Tensor:
    """``F.nll_loss`` of log-probabilities ``[N, C, d1...]`` or ``[C]`` and global class indices
    ``[N, d1...]``.
    """
    class_axes, row_axes = communicating(class_axes), communicating(row_axes)
    if class_axes or row_axes:
        input = cast_by_autocast(input, _nll_loss)
    if not class_axes:
        if not row_axes:
            return F.nll_loss(input, target, weight, None, ignore_index, None, reduction)
        rows = F.nll_loss(input, target, weight, None, ignore_index, None, "none")
        return _reduced(
            rows, _row_weights(target, weight, ignore_index, rows.dtype), reduction, row_axes
        )
    if num_classes is not None:
        _check_targets(target, num_classes, ignore_index)
    # A rank without the class of a row adds zero: as if the row were ignored there.
    dim = _class_dim(input)
    index, here = _local_targets(target, start, input.shape[dim], ignore_index)
    row_weights = here.to(input.dtype)
    if weight is not None and input.shape[dim]:
        row_weights = row_weights * weight.detach()[index]
    picked = _picked(input, dim, index)
    rows = torch.where(here, -picked * row_weights, 0.0)
    for axis in class_axes:
        rows = all_reduce(rows, axis)
    return _reduced(rows, sum_over(row_weights, class_axes), reduction, row_axes)


# Those that are asked what autocast makes of their input.


def _cross_entropy(input: Tensor) -> Tensor:
    return F.cross_entropy(input, input.new_zeros(1, dtype=torch.long))


def _nll_loss(input: Tensor) -> Tensor:
    return F.nll_loss(input, input.new_zeros(1, dtype=torch.long))


def _check_targets(target: Tensor, num_classes: int, ignore_index: int) -> None:
    known = ((target >= 0) & (target < num_classes)) | (target == ignore_index)
    check_indices(known, f"a class that is no ignore_index ({ignore_index})", num_classes)


def _class_dim(input: Tensor) -> int:
    return 1 if input.ndim > 1 else 0


def _reduced(rows: Tensor, row_weights: Tensor, reduction: str, row_axes: Axes) -> Tensor:
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    wide = accumulation_dtype(rows.dtype)
    # The divisor is that of all ranks, so results are summands: their sum is the mean.
    return (rows.sum(dtype=wide) / sum_over(row_weights.sum(dtype=wide), row_axes)).to(rows.dtype)


def _row_weights(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """The weight of each row's class, zero for ignored rows; all classes are local."""
    valid = target != ignore_index
    if weight is None:
        return valid.to(dtype)
    return torch.where(valid, weight.detach()[torch.where(valid, target, 0)], 0.0)


def row_weights(target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """What the mean of a loss with class indices divides by: how many rows count, or the sum of the
    weights of their classes.
    """
    if weight is None:
        return (target != ignore_index).sum()
    return _row_weights(target, weight, ignore_index, weight.dtype).sum()


def row_weights_of(
    target: Tensor, weight: Tensor | None, ignore_index: int, start: int, class_axes: Axes
) -> Tensor:
    """The weight of each row's class, zero for ignored rows. Classes, and with them ``weight``, may
    be cut over ``class_axes``; ``start``: the first local one.
    """
    if weight is None:
        return target != ignore_index
    if not class_axes:
        return _row_weights(target, weight, ignore_index, weight.dtype)
    index, here = _local_targets(target, start, weight.shape[0], ignore_index)
    found = (
        weight.detach()[index] if weight.numel() else torch.zeros_like(index, dtype=weight.dtype)
    )
    return sum_over(torch.where(here, found, 0.0), class_axes)


def _local_targets(
    target: Tensor, start: int, num_local: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """``(index, here)``: local class indices, 0 where the class is on another rank or the row is
    ignored.
    """
    index = target - start
    here = (index >= 0) & (index < num_local) & (target != ignore_index)
    return torch.where(here, index, 0), here


def _picked(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x`` at one class per row: zeros if there is no local class."""
    if x.shape[dim] == 0:
        return x.sum(dim)
    return x.gather(dim, index.unsqueeze(dim)).squeeze(dim)


def _soft_rows(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    label_smoothing: float,
    num_classes: int,
    class_axes: Axes,
) -> Tensor:
    """The loss of each row ``[N, d1...]`` for targets that are probabilities."""
    dim = _class_dim(input)
    if label_smoothing:
        # By the number of all classes, of which this rank has a part.
        target = target * (1 - label_smoothing) + label_smoothing / num_classes
    terms = log_softmax(input, dim, dim_axes=class_axes) * target
    if weight is not None:
        terms = terms * _along(weight, dim, input.ndim)
    rows = -terms.sum(dim)
    for axis in class_axes:
        rows = all_reduce(rows, axis)
    return rows


def _along(weight: Tensor, dim: int, ndim: int) -> Tensor:
    """``[C]`` as a tensor that broadcasts along ``dim``."""
    return weight.view([weight.shape[0] if d == dim else 1 for d in range(ndim)])


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Per-row loss over split classes, and the weight of each row. Of the size of the logits only
    the softmax is kept.

    With ``a = (1 - smoothing) * weight[target]`` and ``b = smoothing / num_classes`` the loss of a
    row is ``a * (lse - x[target]) + b * sum(weight * (lse - x))``, where ``lse`` is the log of the
    sum of exponentials.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        axes: Axes,
        num_classes: int,
        start: int,
    ) -> tuple[Tensor, Tensor]:
        # ``[N, C/axes, d1...]``
        dim = _class_dim(input)
        x = input.to(accumulation_dtype(input.dtype))
        valid = target != ignore_index
        index, here = _local_targets(target, start, x.shape[dim], ignore_index)
        # exp(x - max): the maximum is that of all ranks, so the sums may be added.
        powers, maximum = exponentials(x, (dim,), axes)
        maximum = maximum.squeeze(dim)

        # Everything that is summed over the ranks travels in one message: [rows of sums, N, d1...].
        sums = [powers.sum(dim), torch.where(here, _picked(x, dim, index) - maximum, 0.0)]
        if weight is not None:
            row_weight = weight.to(x.dtype)[index] if weight.numel() else torch.zeros_like(maximum)
            sums.append(torch.where(here, row_weight, 0.0))
        # Label smoothing: each class gets ``smoothing / num_classes`` of the target.
        if smoothing:
            along = None if weight is None else _along(weight.to(x.dtype), dim, x.ndim)
            shifted = x - maximum.unsqueeze(dim)
            sums.append((shifted if along is None else shifted * along).sum(dim))
            if weight is not None:
                sums.append(weight.to(x.dtype).sum().expand_as(maximum))
        # In the order in which they were put in.
        summed = iter(sum_over(torch.stack(sums), axes).unbind(0))

        total, picked = next(summed), next(summed)
        row_weights = valid.to(x.dtype) if weight is None else next(summed)
        # loss = log(sum of powers) - (x of the target - max)
        lse = total.log()
        a, b = (1 - smoothing) * row_weights, smoothing / num_classes
        rows, slope = a * (lse - picked), a
        if smoothing:
            all_x = next(summed)
            all_weights = num_classes if weight is None else next(summed)
            rows = rows + b * (all_weights * lse - all_x)
            slope = a + b * all_weights
        ctx.dim, ctx.b = dim, b
        # The softmax is saved in place of the logits, as its gradient needs nothing else.
        softmax = powers.div_(total.unsqueeze(dim)).to(input.dtype)
        ctx.save_for_backward(softmax, index, here, valid, a, slope, weight)
        ctx.mark_non_differentiable(row_weights)
        return torch.where(valid, rows, 0.0), row_weights

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        softmax, index, here, valid, a, slope, weight = ctx.saved_tensors
        dim = ctx.dim
        wide = accumulation_dtype(softmax.dtype)
        grad = torch.where(valid, grad.to(wide), 0.0)
        # d loss / d x = softmax - 1 at the target; only the rank that has the class subtracts.
        grad_input = softmax.to(wide) * (grad * slope).unsqueeze(dim)
        if grad_input.shape[dim]:
            grad_input.scatter_add_(
                dim, index.unsqueeze(dim), torch.where(here, -grad * a, 0.0).unsqueeze(dim)
            )
        if ctx.b:
            smoothed = (ctx.b * grad).unsqueeze(dim)
            grad_input -= (
                smoothed
                if weight is None
                else smoothed * _along(weight.to(wide), dim, softmax.ndim)
            )
        return grad_input.to(softmax.dtype), None, None, None, None, None, None, None
