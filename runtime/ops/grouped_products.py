"""Products of rows with the matrix of their group: one product for each expert, or one kernel for
all of them.

    rows = grouped_linear(rows, up, routing)   # rows [20, 64], up [8, 256, 64] -> [20, 256]

``rows`` are sorted by expert, as ``dispatch`` of ``experts.py`` returns them. An expert without
rows takes part: its matrix gets a gradient of zeros.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.runtime.ops.routing import Routing, checked_routing


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    autocast: bool = False,
) -> Tensor:
    """Each row times the matrix of its expert, plus its bias.

    ``weight [experts, out, in]``, or ``[experts, in, out]`` if ``transposed``; ``bias [experts,
    out]``. ``autocast``: whether it follows autocast as ``F.linear`` does. Otherwise rows are
    converted to the dtype of the weight.
    """
    checked_routing(routing)
    device = rows.device.type
    dtype = weight.dtype
    if autocast and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    # [experts, in, out], however the model stores them.
    matrices = weight.to(dtype) if transposed else weight.to(dtype).transpose(-2, -1)
    out = _grouped_product(rows.to(dtype), matrices, routing.counts)
    if bias is not None:
        out = out + torch.repeat_interleave(
            bias.to(out.dtype), routing.counts, dim=0, output_size=rows.shape[0]
        )
    return out


def grouped_mm(
    input: Tensor,
    mat2: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``F.grouped_mm`` of rows ``[rows, in]`` or ``[groups, rows, in]`` and matrices ``[groups, in,
    out]``, also where torch's kernel refuses pieces of rows that are no multiple of 16 bytes.
    """
    if all(width * input.element_size() % 16 == 0 for width in mat2.shape[1:]):
        return F.grouped_mm(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
    if offs is None:
        out = input @ mat2
    else:
        ends = offs.long()
        counts = ends.diff(prepend=ends.new_zeros(1))
        used = int(counts.sum())  # rows beyond are in no group
        out = F.pad(_grouped_product(input[:used], mat2, counts), (0, 0, 0, input.shape[0] - used))
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)


def _grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """``rows [rows, in]`` times ``matrices [experts, in, out]``, by groups of ``counts`` rows."""
    return cast(Tensor, _GroupedProduct.apply(rows, matrices, counts))  # type: ignore[no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    """One product for each expert. The weights of an expert without rows have gradients of
    zeros.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices, counts)
        return _by_expert(rows, matrices, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = grad_matrices = None
        if ctx.needs_input_grad[0]:
            grad_rows = _by_expert(grad, matrices.mT, counts)
        if ctx.needs_input_grad[1]:
            # In the order in which the weight lies in memory, so that nobody has to copy it.
            turned = not matrices.is_contiguous()
            left, right = (grad, rows) if turned else (rows, grad)
            grad_matrices = _by_expert(left.T, right, counts)
            grad_matrices = grad_matrices.mT if turned else grad_matrices
        return grad_rows, grad_matrices, None


def _by_expert(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Products by groups of ``counts``: of the rows of ``left [rows, k]`` with ``right [experts, k,
    n]``, or of the columns of ``left [k, rows]`` with the rows of ``right [rows, n]``, which gives
    ``[experts, k, n]``.
    """
    if _has_kernel(left, right, counts):
        return F.grouped_mm(left, right, offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    if right.dim() == 3:
        out = left.new_empty(left.shape[0], right.shape[2])
        operands, outs = (left.split_with_sizes(sizes), right.unbind()), out.split_with_sizes(sizes)
    else:
        out = left.new_empty(len(sizes), left.shape[0], right.shape[1])
        operands, outs = (
            (left.split_with_sizes(sizes, 1), right.split_with_sizes(sizes)),
            out.unbind(),
        )
    for a, b, result in zip(*operands, outs, strict=True):
        if result.numel() > 0:
            torch.mm(a, b, out=result)  # zeros where there are no rows to sum over
    return out


_KERNEL_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def _has_kernel(left: Tensor, right: Tensor, counts: Tensor) -> bool:
    """Whether torch has one kernel for all groups. It wants rows of whole 16 bytes, in memory that
    begins at a multiple of 16 bytes.
    """
    if left.dtype not in _KERNEL_DTYPES.get(left.device.type, ()):
        return False
    sizes = (counts.shape[0], *left.shape, *right.shape)
    whole = right.shape[-1] * right.element_size() % 16 == 0  # rows of the result
    return min(sizes) > 0 and whole and _is_aligned(left) and _is_aligned(right)


def _is_aligned(x: Tensor) -> bool:
    small, large = sorted(x.stride()[-2:])
    return small == 1 and large * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
