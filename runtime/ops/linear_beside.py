"""Products whose weight gets its gradient while a message is under way.

The backward of ``F.linear`` computes two products: one for the gradient of its input, and one for
that of its weight. Behind the first, tensor-parallel ranks have something to send. So
:func:`linear_beside` and :func:`addmm_beside` compute the first alone, and leave the second to the
``arrived`` that brought their input (``started.py``). If nothing was started there, they are
``F.linear`` and ``torch.addmm``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.flights import Flight, flight_of
from shardwright.runtime.second_derivatives import differentiable_once


def linear_beside(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of ``input [..., in]``, ``weight [out, in]`` and ``bias [out]``."""
    found = _beside(input, weight)
    if found is None:
        return F.linear(input, weight, bias)
    return _product(input, weight, bias, *found, transposed=False)


def addmm_beside(input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """``torch.addmm`` of a bias ``input [out]``, ``mat1 [rows, in]`` and a weight ``mat2 [in,
    out]``.
    """
    found = _beside(mat1, mat2)
    if found is None:
        return torch.addmm(input, mat1, mat2)
    return _product(mat1, mat2, input, *found, transposed=True)


def _beside(x: Tensor, weight: Tensor) -> tuple[Flight, int] | None:
    """The flight that takes the gradient of a weight, and its number there."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    flight = flight_of(x)
    number = None if flight is None else flight.number_of(weight)
    return None if flight is None or number is None else (flight, number)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    flight: Flight,
    number: int,
    *,
    transposed: bool,
) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    # Detached: autograd must not wait for a gradient of the weight here.
    return cast(
        Tensor,
        _Beside.apply(x, bias, weight.detach(), flight, number, transposed, dtype),  # type: ignore[no-untyped-call]
    )


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        flight: Flight,
        number: int,
        transposed: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.flight, ctx.number, ctx.transposed = flight, number, transposed
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        if dtype is not None:  # what autocast does
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            if transposed:
                assert bias is not None
                return torch.addmm(bias, x, weight)
            return F.linear(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        rows = _rows(grad)  # [rows, out]
        transposed = ctx.transposed

        def product() -> Tensor:
            flat = _rows(x)  # [rows, in]
            return (flat.t() @ rows if transposed else rows.t() @ flat).to(of_weight)

        ctx.flight.products[ctx.number] = product
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ (weight.t() if transposed else weight)).view(x.shape).to(of_x)
        if ctx.needs_input_grad[1]:
            grad_bias = rows.sum(0).to(of_bias)
        return grad_x, grad_bias, None, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """All dims but the last as one."""
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
