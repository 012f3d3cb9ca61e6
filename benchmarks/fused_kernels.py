"""Kernels that Megatron and NeMo have, and torch has not: gates and rotary positions in one each.

They are functions that compute the same, registered as operators, so that each is priced as one
kernel: what goes in is read once, and what comes out is written once. :func:`with_fused_kernels`
puts gates and norms into a model of transformers, :func:`one_rotary_kernel` is for its trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama import modeling_llama
from transformers.models.nemotron import modeling_nemotron
from transformers.models.qwen3_moe import modeling_qwen3_moe

import shardwright
from shardwright.experts import combine, dispatch, grouped_linear


@shardwright.register_op("*, * -> *")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up


@shardwright.register_op("r i, r i, r -> r i", linear=["gains"])
def weighted_swiglu(gate: Tensor, up: Tensor, gains: Tensor) -> Tensor:
    """``silu(gate) * up * gains``, in the dtype of the gate, for rows ``[R, I]`` of experts with
    ``gains`` [R].
    """
    return (F.silu(gate) * up * gains.unsqueeze(-1)).to(gate.dtype)


@shardwright.register_op("r (i pair=2^) -> r i")
def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """What GPT-OSS has between the products of its experts; gate and up lie in turns: [R, 2 I]."""
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def _rotary_dims(x: Any, cos: Any, sin: Any) -> str:
    # Samples may share their positions.
    table = "b s r^" if cos.shape[0] == x.shape[0] else "1 s r^"
    return f"b h s d^, {table}, {table} -> b h s d^"


@shardwright.register_op(_rotary_dims, linear=["x"])
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of ``x`` [B, H, S, D], by the tables [B or 1, S, R]. They turn the first R
    elements of each head.
    """
    turning, staying = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turning.chunk(2, -1)
    turned = torch.cat((-right, left), -1)
    return torch.cat((turning * cos.unsqueeze(1) + turned * sin.unsqueeze(1), staying), -1)


def _rotated(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    assert unsqueeze_dim == 1
    return rotary(query, cos, sin), rotary(key, cos, sin)


MODULES = (modeling_deepseek_v3, modeling_llama, modeling_nemotron, modeling_qwen3_moe)
"""Where transformers has a function of rotary positions that :func:`rotary` replaces."""


@contextlib.contextmanager
def one_rotary_kernel() -> Iterator[None]:
    """Models that run meanwhile, such as to be traced, turn by :func:`rotary`."""
    own = [module.apply_rotary_pos_emb for module in MODULES]
    try:
        for module in MODULES:
            module.apply_rotary_pos_emb = _rotated
        yield
    finally:
        for module, function in zip(MODULES, own, strict=True):
            module.apply_rotary_pos_emb = function


class GatedMLP(nn.Module):
    """A layer of Llama with its gate in one kernel."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return gated


class GatedExperts(nn.Module):
    """Experts of Qwen3 or DeepSeek-V3 whose gate multiplies each row by the weight of its choice,
    too. The last product is linear, so what comes out is the same.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts: int = experts.num_experts
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows, gains, routing = dispatch(x, chosen, weights, num_experts=self.num_experts)
        gate, up = grouped_linear(rows, self.gate_up_proj, routing).chunk(2, -1)
        rows = weighted_swiglu(gate, up, gains)
        return combine(grouped_linear(rows, self.down_proj, routing), routing)


def with_fused_kernels(model: nn.Module) -> nn.Module:
    """The model with gates in one kernel, and torch's RMS norms, of which each is one, where it had
    its own.
    """
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        parent, _, own = name.rpartition(".")
        if kind.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm):
            weight, eps = module.weight, module.variance_epsilon
            assert isinstance(weight, Tensor) and isinstance(eps, float)
            norm = nn.RMSNorm(tuple(weight.shape), eps, device=weight.device, dtype=weight.dtype)
            setattr(model.get_submodule(parent), own, norm)
        elif kind in ("LlamaMLP", "DeepseekV3MLP"):
            setattr(model.get_submodule(parent), own, GatedMLP(module))
        elif kind in ("Qwen3MoeExperts", "DeepseekV3Experts"):
            setattr(model.get_submodule(parent), own, GatedExperts(module))
        elif kind == "GptOssExperts":
            module._apply_gate = partial(clamped_swiglu, alpha=module.alpha, limit=module.limit)
    return model
