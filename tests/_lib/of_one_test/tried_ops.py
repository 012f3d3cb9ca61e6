"""Registered operators for proofs at compile time: hard to try, or wrong where only trying
tells.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.compiler.ops.register import register_op

# ---------------------------------------------------------------- right, but not on every tensor


@register_op("b h^, h^ -> b h^")
def float32_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Computes in float32 whatever it is given."""
    wide = x.to(torch.float32)
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


@register_op("b, v^ h -> b h")
def rows(index: Tensor, table: Tensor) -> Tensor:
    return F.embedding(index, table)


@register_op("b c, b c, ? -> b c")
def masked(x: Tensor, keep: Tensor, otherwise: float) -> Tensor:
    return x.masked_fill(~keep.bool(), otherwise)


@register_op("a b -> a b")
def logarithm(x: Tensor) -> Tensor:
    return torch.log(x)


@register_op(
    lambda x, size: "(b s) h -> b s h",
    localise=lambda op, rule, local: {"size": local.segments["s"][0]},
)
def unfolded(x: Tensor, size: int) -> Tensor:
    return x.view(-1, size, x.shape[-1])


def _offsets(op: Any) -> list[Tensor]:
    x, offsets = op.operands
    return [torch.ones(x.shape), torch.linspace(0, x.shape[0], offsets.shape[0]).long()]


def _segment_sums(x: Tensor, offsets: Tensor) -> Tensor:
    if int(offsets[-1]) != x.shape[0] or bool((offsets.diff() < 0).any()):
        raise ValueError("offsets end where x ends")
    return torch.stack([part.sum(0) for part in x.tensor_split(offsets[1:-1].tolist())])


def _fake_sums(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, x.shape[1])


@register_op("t^ h, n^ -> m^ h", input_gen=_offsets, fake=_fake_sums)
def segment_sums(x: Tensor, offsets: Tensor) -> Tensor:
    return _segment_sums(x, offsets)


@register_op("t^ h, n^ -> m^ h", fake=_fake_sums)
def segment_sums_unhelped(x: Tensor, offsets: Tensor) -> Tensor:
    return _segment_sums(x, offsets)


@register_op("a b -> a b", grad_linear=True)
@torch.library.custom_op("shardwright_tests::float32_only", mutates_args=())
def float32_only(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError("expected Float")
    return x * 3


float32_only.register_fake(torch.empty_like)
float32_only.register_autograd(lambda ctx, grad: grad * 3)


@register_op("a b -> a b", grad_linear=True)
@torch.library.custom_op("shardwright_tests::float32_inside", mutates_args=())
def float32_inside(x: Tensor) -> Tensor:
    """A kernel that rounds: each element by itself, so pieces round alike, but not their sums."""
    return (x.float() * 3).to(x.dtype)


float32_inside.register_fake(torch.empty_like)
float32_inside.register_autograd(lambda ctx, grad: (grad.float() * 3).to(grad.dtype))


def _inside(x: Tensor) -> Tensor:
    return x.exp()


@register_op("a b -> a b")
def edited(x: Tensor) -> Tensor:
    """Calls another function of its file."""
    return _inside(x)


@register_op("b h -> b h")
def scaled_by(x: Tensor, by: float) -> Tensor:
    return x * by


@register_op(
    "b h^ -> b k^ j^",
    localise=lambda op, rule, local: {"sizes": (local.segments["b"][0], *op.arg("sizes")[1:])},
)
def viewed(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return x.view(sizes)


@register_op("a b -> a b", fake=lambda x, function: torch.empty_like(x))
def mapped(x: Tensor, function: Any) -> Tensor:
    return x


# ---------------------------------------------------------------- what cannot be proved


@register_op("a b -> a b")
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


_calls = [0]


@register_op("a b -> a b", fake=torch.empty_like)
def counting(x: Tensor) -> Tensor:
    _calls[0] += 1
    return x * _calls[0]


@register_op("a b -> a b", fake=torch.empty_like, name="tried_ops.trusted", prove=False)
def trusted(x: Tensor) -> Tensor:
    return x + torch.rand_like(x) * 0


# ---------------------------------------------------------------- wrong


@register_op("b k+, n k+ -> b n", name="wrong.scaled_product")
def scaled_product(x: Tensor, weight: Tensor) -> Tensor:
    """Divides by the size of the dim that is summed over."""
    return x @ weight.T / x.shape[1] ** 0.5


@register_op("b h, h -> b h", name="wrong.normed")
def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight)


@register_op("a b -> a b", name="wrong.in_bfloat16")
def in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().softmax(-1)


@register_op("a b -> a b", grad_linear=True, name="wrong.float32_only")
@torch.library.custom_op("shardwright_tests::wrong_float32_only", mutates_args=())
def wrong_float32_only(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError("expected Float")
    return x.softmax(-1)


wrong_float32_only.register_fake(torch.empty_like)
wrong_float32_only.register_autograd(lambda ctx, grad: grad)


@register_op("s b -> s b", name="wrong.running")
def running(x: Tensor) -> Tensor:
    return x.cumsum(0)


@register_op(lambda x, size: "(b s) h -> b s h", name="wrong.unfolded")
def unfolded_without(x: Tensor, size: int) -> Tensor:
    return x.view(-1, size, x.shape[-1])


@register_op("a b -> a b", name="wrong.gradient")
class Squashed(torch.autograd.Function):
    """A wrong gradient alone: each rank divides by its own largest one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / grads[0].abs().max()
