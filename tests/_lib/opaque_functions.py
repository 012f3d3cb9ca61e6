"""Functions that tests keep as one operator: at the top level of a module, as generated code must
import them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.ops.register import register_op


class Cube(torch.autograd.Function):
    """``x ** 3`` with a backward of its own, which is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x * 7 * ctx.scale, None


class Split(torch.autograd.Function):
    """Two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * 2 + b * 3


@torch.library.custom_op("shardwright_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda ctx, grad: grad * 2)


@register_op("b h^, ? -> b h^", fake=lambda x, keep: torch.empty_like(x))
def route(x: Tensor, keep: float) -> Tensor:
    """Looks at values: it cannot run on fake tensors."""
    result = x * 1
    for row in range(x.shape[0]):
        if x[row].sum().item() > keep:
            result[row] = x[row] * 2
    return result


@register_op("b h, h -> b h")
def gated(x: Tensor, gate: Tensor, *, power: int = 1) -> Tensor:
    return x * gate.sigmoid() ** power


@register_op("b h, ? -> b h", name="cube")
class Registered(Cube):
    """The function, with a rule."""
