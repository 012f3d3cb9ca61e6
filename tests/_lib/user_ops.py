"""Operators of a user's own, at the top level of a module as ``register_op`` asks, right and wrong
ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.ops.register import register_op
from shardwright.compiler.ops.rule import ParallelFactor, ParallelForm


@register_op("b s h^, h^ -> b s h^")
def scaled(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


@register_op("b k+, n k+, n -> b n", linear=[("x", "bias"), ("weight", "bias")], additive=["bias"])
def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@register_op("b k+, n k, n -> b n", additive=["biases"])
def with_biases(x: Tensor, weight: Tensor, biases: tuple[Tensor, ...]) -> Tensor:
    return torch.nn.functional.linear(x, weight) + sum(biases)


@register_op("a b^, ?, a b -> a b, a")
def two_results(x: Tensor, factor: float, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * factor + y, x[:, 0].clone()


@register_op(lambda xs, dim: "a b, ? -> " + ["s^ a b", "a s^ b"][dim])
def stacked(xs: list[Tensor], dim: int = 0) -> Tensor:
    return torch.stack(xs, dim)


@register_op("* -> *", linear=True)
def with_dtype(x: Tensor, dtype: torch.dtype = torch.float64, *, flip: bool = False) -> Tensor:
    return -x.to(dtype) if flip else x.to(dtype)


@register_op("a b, ? -> a b")
def applied(x: Tensor, function: Any) -> Any:
    return function(x)


@register_op("n d -> n d", fake=torch.empty_like)
def by_value(x: Tensor) -> Tensor:
    """Looks at values, which fake tensors do not have."""
    return x * 2 if x.abs().max() > 1e6 else x.exp()


@register_op("* n^, n^ -> *")
class Clipped(torch.autograd.Function):
    """A dot product whose backward clips the gradient: linear in nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, limit: float = 0.5) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.limit = limit
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        grad = grads[0].clamp(-ctx.limit, ctx.limit)
        return grad.unsqueeze(-1) * w, (grad.unsqueeze(-1) * x).flatten(0, -2).sum(0), None


@register_op("*, * -> *")
class FirstAlone(torch.autograd.Function):
    """A sum that gives its second operand no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@register_op("* -> *", grad_linear=True)
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


@register_op("* -> *", grad_linear=True)
@torch.library.custom_op("shardwright_tests::tripled", mutates_args=())
def tripled(x: Tensor, factor: float = 3.0) -> Tensor:
    return x * factor


tripled.register_fake(lambda x, factor=3.0: torch.empty_like(x))
tripled.register_autograd(lambda ctx, grad: (grad * 3.0, None))


@register_op("a b -> a b", emit=lambda args: f"{args['x']}.mul({args['by']})")
def emitted(x: Tensor, by: float) -> Tensor:
    return x * by


# ---------------------------------------------------------------- wrong in one way each, for the
# prover to find


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


@register_op("a b -> a b", name="wrong.free")
def wrong_free(x: Tensor) -> Tensor:
    return _softmax(x)


@register_op("a b+ -> a", name="wrong.summed")
def wrong_summed(x: Tensor) -> Tensor:
    return x.mean(-1)


@register_op("a b -> b a", name="wrong.order")
def wrong_order(x: Tensor) -> Tensor:
    return x + 1


@register_op("a b -> a b", linear=["x"], name="wrong.linear")
def wrong_linear(x: Tensor) -> Tensor:
    return x + 1


@register_op("b k+, n k+, n -> b n", name="wrong.additive")
def wrong_additive(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@register_op("(a=2 b) -> a b", name="wrong.local")
def wrong_local(x: Tensor) -> Tensor:
    return x.view(2, -1)


@register_op("* -> *", grad_linear=True, name="wrong.backward")
class WrongBackward(torch.autograd.Function):
    """The forward is right under every strategy; only gradients tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-0.1, 0.1)


# ---------------------------------------------------------------- with all the options


def plain(x: Tensor) -> Tensor:
    return x * 2


def one_more_dim(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).expand(*x.shape, 3)


def with_keywords(x: Tensor, **options: Any) -> Tensor:
    return x


@register_op("a b -> a b")
@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x.sin()


@register_op("a b -> a b")
@torch.compile(backend="eager")  # any backend does, and importing the default one takes a second
def compiled(x: Tensor) -> Tensor:
    return x.sin()


@register_op(
    lambda x, num_blocks: f"(n={num_blocks} r) c -> n c r^",
    localise=lambda op, rule, local: {"num_blocks": local.shape(rule.results[0])[0]},
    input_gen=lambda op: [torch.zeros(op.operands[0].shape)],
    nonempty=True,
)
def row_blocks(x: Tensor, num_blocks: int = 2) -> Tensor:
    return x.view(num_blocks, -1, x.shape[-1]).transpose(1, 2)


def mean_square_form(x: Tensor, count: int) -> Tensor:
    """The mean of squares of a row of which ``x`` is a piece, as a summand."""
    return x.square().sum(-1) / count


@register_op(
    "a b+ -> a",
    parallel=ParallelForm(
        "user_ops.mean_square_form",
        {"b": ParallelFactor()},
        {},
        lambda op, local: {"count": op.operands[0].shape[1]},
    ),
)
def mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1)


def forgetful(x: Tensor) -> Tensor:
    """Right in every number, but cut from the gradient where there is a single row."""
    return 2 * (x if x.shape[0] > 1 else x.detach())
