"""Kernels that Megatron and NeMo have, and torch has not: gates and rotary positions in one each.

They are functions that compute the same, registered as operators, so that each is priced as one
kernel: what goes in is read once, and what comes out is written once. :func:`with_fused_kernels`
puts gates and norms into a model of transformers, :func:`one_rotary_kernel` is for its trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.falcon import modeling_falcon
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
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


@shardwright.register_op("r (pair=2^ i), r -> r i", linear=["gains"])
def weighted_quick_geglu(gate_up: Tensor, gains: Tensor) -> Tensor:
    """``gate * sigmoid(1.702 gate) * (up + 1) * gains``, in the dtype of the gate, for rows
    ``[R, 2 I]`` of experts, gates first, with ``gains`` [R].
    """
    gate, up = gate_up.chunk(2, -1)
    gated = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (gated * gains.unsqueeze(-1)).to(gate_up.dtype)


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


MODULES = (
    modeling_deepseek_v3,
    modeling_falcon,
    modeling_llama,
    modeling_mixtral,
    modeling_nemotron,
    modeling_qwen3_moe,
)
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
    """Experts of Qwen3, Mixtral or DeepSeek-V3 whose gate multiplies each row by the weight of its
    choice, too. The last product is linear, so what comes out is the same.
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


class BiasedExperts(nn.Module):
    """Experts of GPT-OSS as Megatron has them (``megatron/core/transformer/moe/experts.py``,
    ``TEGroupedMLP``). Both halves are clamped and joined by kernels of their own, the gate
    multiplies each row by the weight of its choice, and the last bias, times that weight, is added
    and the rows of all experts are joined by one kernel each. Its dispatcher sends a token once for
    each choice (``moe_token_dispatcher_type`` of ``GPTOSSProvider`` in Megatron-Bridge), so tokens
    are repeated here.

    Gates come first, where transformers has gate and up in turns; that changes no kernel.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts: int = experts.num_experts
        self.limit: float = experts.limit
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.gate_up_proj_bias = experts.gate_up_proj_bias
        self.down_proj_bias = experts.down_proj_bias

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = chosen.shape
        repeated = x.unsqueeze(1).expand(tokens, top_k, -1).reshape(tokens * top_k, -1)
        rows, gains, routing = dispatch(
            repeated, chosen.view(-1, 1), weights.view(-1, 1), num_experts=self.num_experts
        )
        gate_up = grouped_linear(
            rows, self.gate_up_proj, routing, self.gate_up_proj_bias, transposed=True
        )
        gate, up = gate_up.chunk(2, -1)
        gate_up = torch.cat((gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)), -1)
        rows = weighted_quick_geglu(gate_up, gains)
        rows = grouped_linear(rows, self.down_proj, routing, transposed=True)
        # The bias of a row's expert times the weight of its choice.
        biases = grouped_linear(gains.unsqueeze(-1), self.down_proj_bias.unsqueeze(-1), routing)
        rows = (rows + biases).clone()
        return combine(rows, routing).view(tokens, top_k, -1).sum(1)


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
        elif kind in REPLACED:
            setattr(model.get_submodule(parent), own, REPLACED[kind](module))
    return model


REPLACED: dict[str, Callable[[Any], nn.Module]] = {
    "LlamaMLP": GatedMLP,
    "DeepseekV3MLP": GatedMLP,
    "MixtralExperts": GatedExperts,
    "Qwen3MoeExperts": GatedExperts,
    "DeepseekV3Experts": GatedExperts,
    "GptOssExperts": BiasedExperts,
}
"""What stands in the place of modules of transformers, by the names of their classes."""
