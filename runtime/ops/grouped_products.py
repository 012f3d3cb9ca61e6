"""Products of rows with the matrix of their group: one product for each expert, or one kernel for
all of them.

    rows = grouped_linear(rows, up, routing)   # rows [20, 64], up [8, 256, 64] -> [20, 256]

``rows`` are sorted by expert, as ``dispatch`` of ``experts.py`` returns them. An expert without
rows takes part: its matrix gets a gradient of zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from shardwright.runtime.ops.graph_ends import leave_graph
from shardwright.runtime.ops.routing import Routing, checked_routing
from shardwright.runtime.second_derivatives import differentiable_once, refuse_second


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
    leave_graph("products of experts depend on how many rows each has")
    return _grouped_linear(rows, weight, routing, bias, transposed, autocast)


@_disable_dynamo
def _grouped_linear(
    rows: Tensor,
    weight: Tensor,
    routing: Routing,
    bias: Tensor | None,
    transposed: bool,
    autocast: bool,
) -> Tensor:
    checked_routing(routing)
    device = rows.device.type
    dtype = weight.dtype
    if autocast and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    # [experts, in, out], however the model stores them.
    if weight.dtype != dtype:
        weight = weight.to(dtype)
    if rows.dtype != dtype:
        rows = rows.to(dtype)
    out = _grouped_product(rows, weight if transposed else weight.mT, routing.ends)
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
        leave_graph("products of groups depend on how many rows each has")
        out = _padded_product(input, mat2, offs)
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)


@_disable_dynamo
def _padded_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The products of groups, and zeros for rows beyond, which are in no group."""
    used = int(ends[-1]) if len(ends) else 0
    return F.pad(_grouped_product(rows[:used], matrices, ends), (0, 0, 0, rows.shape[0] - used))


def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``rows [rows, in]`` times ``matrices [experts, in, out]``, by groups that end at ``ends``."""
    if not _has_kernel(rows, matrices):
        return cast(Tensor, _GroupedProduct.apply(rows, matrices, ends))  # type: ignore[no-untyped-call]
    # Torch's own backward runs the same products as the function below, without Python.
    out = F.grouped_mm(rows, matrices, offs=ends)
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(_for_kernel)
    return out


def _for_kernel(grads: Sequence[Tensor]) -> tuple[Tensor] | None:
    """The gradient of a product as torch's kernel takes it, which refuses some strides and places
    in memory. ``None`` where it can stay as it is.
    """
    refuse_second()
    (given,) = grads
    grad = given.contiguous()
    if not _begins_aligned(grad):
        grad = grad.clone()
    return None if grad is given else (grad,)


class _GroupedProduct(torch.autograd.Function):
    """One product for each expert. The weights of an expert without rows have gradients of
    zeros.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        return _by_expert(rows, matrices, ends)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = grad_matrices = None
        if ctx.needs_input_grad[0]:
            grad_rows = _by_expert(grad, matrices.mT, ends)
        if ctx.needs_input_grad[1]:
            # In the order in which the weight lies in memory, so that nobody has to copy it.
            turned = not matrices.is_contiguous()
            left, right = (grad, rows) if turned else (rows, grad)
            grad_matrices = _by_expert(left.T, right, ends)
            grad_matrices = grad_matrices.mT if turned else grad_matrices
        return grad_rows, grad_matrices, None


def _by_expert(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Products by groups that end at ``ends``: of the rows of ``left [rows, k]`` with ``right
    [experts, k, n]``, or of the columns of ``left [k, rows]`` with the rows of ``right [rows, n]``,
    which gives ``[experts, k, n]``.
    """
    sizes = [end - begin for begin, end in itertools.pairwise([0, *ends.tolist()])]
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


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch has one kernel for all groups, in forward and in backward. It wants rows of
    whole 16 bytes, in memory that begins at a multiple of 16 bytes.
    """
    if rows.dtype not in _KERNEL_DTYPES.get(rows.device.type, ()):
        return False
    count, size = rows.shape[0], rows.element_size()
    experts, width_in, width_out = matrices.shape
    if not (count and experts and width_in and width_out):
        return False
    if width_in * size % 16 or width_out * size % 16:
        return False
    return _is_aligned(rows) and _is_aligned(matrices)


def _is_aligned(x: Tensor) -> bool:
    *_, one, other = x.stride()
    small, large = (one, other) if one < other else (other, one)
    return small == 1 and large * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def _begins_aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0
