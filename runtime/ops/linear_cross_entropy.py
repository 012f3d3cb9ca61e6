"""A linear layer and the cross entropy of what it gives, as one operator: the logits of a long
sequence are never whole.

Rows are taken a chunk at a time; the backward computes the logits of a chunk again. Rows, classes
or both may be cut over ranks, as in :mod:`shardwright.runtime.ops.cross_entropy`. Legend: N rows, K
features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.axes import Axes, accumulation_dtype, communicating, sum_over
from shardwright.runtime.ops.cross_entropy import cross_entropy, row_weights_of
from shardwright.runtime.second_derivatives import differentiable_once

RowsOf = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""The loss of each row, from inputs, weight, bias and targets."""


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_rows: int | None = None,
    *,
    class_axes: Axes = (),
    row_axes: Axes = (),
    num_classes: int | None = None,
    start: int = 0,
    count: int | None = None,
) -> Tensor:
    """``F.linear_cross_entropy`` of ``[N, K]`` or ``[K]`` and a matrix ``[C, K]``, ``chunk_rows``
    rows at a time, or all. The other arguments are those of ``cross_entropy``.
    """

    def loss(
        logits: Tensor,
        target: Tensor,
        reduction: str,
        row_axes: Axes = (),
        count: int | None = None,
    ) -> Tensor:
        return cross_entropy(
            logits,
            target,
            weight,
            ignore_index,
            reduction,
            label_smoothing,
            class_axes=class_axes,
            row_axes=row_axes,
            num_classes=num_classes,
            start=start,
            count=count,
        )

    if input.ndim == 1 or chunk_rows is None or input.shape[0] <= chunk_rows:
        logits = F.linear(input, linear_weight, linear_bias)
        return loss(logits, target, reduction, row_axes, count)

    def rows_of(x: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        return loss(F.linear(x, matrix, bias), target, "none")

    rows: Tensor = _Chunked.apply(input, linear_weight, linear_bias, target, rows_of, chunk_rows)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return rows
    # Sums over many rows lose digits in half precision, and ranks would lose different ones.
    wide = accumulation_dtype(rows.dtype)
    total = rows.sum(dtype=wide)
    if reduction == "mean" and target.is_floating_point():
        total = total / (rows.shape[0] if count is None else count)
    elif reduction == "mean":
        weights = row_weights_of(target, weight, ignore_index, start, communicating(class_axes))
        total = total / sum_over(weights.sum().to(wide), communicating(row_axes))
    return total.to(rows.dtype)


class _Chunked(torch.autograd.Function):
    """The loss of each row ``[N]``. Only the operands are kept, and the logits of one chunk are
    there at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        target: Tensor,
        rows_of: RowsOf,
        chunk_rows: int,
    ) -> Tensor:
        ctx.save_for_backward(input, matrix, bias, target)
        ctx.rows_of, ctx.chunk_rows = rows_of, chunk_rows
        ctx.autocast = _autocast(input)
        chunks = zip(torch.split(input, chunk_rows), torch.split(target, chunk_rows), strict=True)
        return torch.cat([rows_of(x, matrix, bias, labels) for x, labels in chunks])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, matrix, bias, target = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        # Sums over chunks are kept in a wide dtype.
        sums = [
            torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) if wants else None
            for x, wants in zip((matrix, bias), wanted[1:], strict=True)
        ]
        grad_input = torch.empty_like(input) if wanted[0] else None
        start = 0
        for labels in torch.split(target, ctx.chunk_rows):
            here = slice(start, start + labels.shape[0])
            start = here.stop
            operands = [
                None if x is None else x.detach().requires_grad_(wants)
                for x, wants in zip((input[here], matrix, bias), wanted, strict=True)
            ]
            with torch.enable_grad(), ctx.autocast():
                rows = ctx.rows_of(*operands, labels)
            # The order of input, matrix and bias, in which gradients are taken up below.
            asked = [x for x in operands if x is not None and x.requires_grad]
            found = iter(torch.autograd.grad(rows, asked, grad[here]))
            if grad_input is not None:
                grad_input[here] = next(found)
            for total in sums:
                if total is not None:
                    total += next(found)
        grads = [
            None if total is None else total.to(x.dtype)
            for total, x in zip(sums, (matrix, bias), strict=True)
        ]
        return grad_input, *grads, None, None, None


def _autocast(x: Tensor) -> Callable[[], Any]:
    """The autocast at hand, for what is computed again in the backward."""
    kind = x.device.type
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=on)
