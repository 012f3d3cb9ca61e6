"""Tiny mixtures of experts: families of transformers, and a layer by hand that traces fast.

    model = expert_models.get("qwen3_moe").build()
    inputs = expert_models.get("qwen3_moe").inputs(batch=4, seq=6)
    report = expert_models.verify_experts("by hand", "ep", {"plan_ngpus": 2, "runtime_ngpus": 2})

Entries are those of the zoo (``zoo.ZooModel``): float64, seeded, disturbed. They have 4, 6 or 8
experts, so that 3 ranks get unequal shares. Families with an auxiliary loss have it in their loss
and their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from traces import shared_traces
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from shardwright.frontend.verification.verify import VerifyReport, verify
from shardwright.policies.policy import PolicyFunction
from shardwright.runtime.config import ComputeConfig

BATCH, SEQ, VOCAB = 4, 6, 32
BY_HAND = "by hand"


@use_experts_implementation
class Experts(nn.Module):
    """Gated experts, stored as transformers stores them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(
            torch.randn(config.num_experts, 2 * config.inner, config.hidden)
        )
        self.down_proj = nn.Parameter(torch.randn(config.num_experts, config.hidden, config.inner))
        self.act_fn = ACT2FN["silu"]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The loop over experts that a registry of functions stands for."""
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, choice = torch.where(chosen == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            made = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            y = y.index_add(0, token, (made * weights[token, choice, None]).to(y.dtype))
        return y


class Mixture(nn.Module):
    """A router, experts and a shared expert: the layer and its auxiliary loss."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k, self.num_experts = config.top_k, config.num_experts
        self.norm = nn.LayerNorm(config.hidden)
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.up = nn.Linear(config.hidden, config.inner)
        self.down = nn.Linear(config.inner, config.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [B, S, H]
        tokens = self.norm(x).reshape(-1, x.shape[-1])
        scores = self.router(tokens).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        load = F.one_hot(chosen, self.num_experts).float().mean((0, 1))
        balance = self.num_experts * (load * scores.mean(0)).sum()
        y = self.experts(tokens, chosen, weights) + self.down(F.silu(self.up(tokens)))
        return x + y.view(x.shape), balance


class ByHand(nn.Module):
    """Two mixtures between two projections: few operators, and all that experts are run by."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        config = SimpleNamespace(
            **{"hidden": 8, "inner": 4, "num_experts": 6, "top_k": 2, "num_layers": 2} | sizes,
            _experts_implementation="grouped_mm",
        )
        self.embed = nn.Linear(5, config.hidden)
        self.layers = nn.ModuleList(Mixture(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.hidden, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # [B, S, 5], [B, S, 3]
        hidden, balances = self.embed(x), []
        for layer in self.layers:
            hidden, balance = layer(hidden)
            balances.append(balance)
        out = self.head(hidden)
        aux = torch.stack(balances).sum()
        return {"loss": F.mse_loss(out, y) + 0.1 * aux, "aux_loss": aux, "out": out}


def signals(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    """What :class:`ByHand` reads."""
    x, y = (
        torch.randn(batch, seq, size, generator=generator, dtype=torch.float64) for size in (5, 3)
    )
    return {"x": x, "y": y}


COMMON = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIX = {"num_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True}
SIX_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True}
GROUPED = {
    "num_key_value_heads": 4, "moe_intermediate_size": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "n_group": 2, "topk_group": 1,
}  # fmt: skip
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", SIX_LOCAL),
    "qwen2_moe": (
        "Qwen2Moe",
        {**SIX, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
    ),
    "qwen3_moe": ("Qwen3Moe", {**SIX, "moe_intermediate_size": 8, "head_dim": 4}),
    "olmoe": ("Olmoe", {**SIX, "num_experts_per_tok": 3}),
    "deepseek_v2": (
        "DeepseekV2",
        {**GROUPED, **LATENT, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3", {**GROUPED, **LATENT}),
    "glm4_moe": ("Glm4Moe", {**GROUPED, "head_dim": 4, "n_group": 1, "topk_group": 1}),
    "gpt_oss": ("GptOss", {**SIX_LOCAL, "head_dim": 4, "sliding_window": 4}),
    "granitemoe": ("GraniteMoe", SIX_LOCAL),
    "phimoe": ("Phimoe", {**SIX_LOCAL, "original_max_position_embeddings": 32}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 8, "moe_num_experts": 6, "moe_k": 2,
            "moe_num_shared_experts": 1, "moe_layer_start_index": 0, "moe_layer_end_index": 2,
            "output_router_logits": True,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2,
            "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4,
            "output_router_logits": True,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["moe", "full_attention", "moe"], "num_hidden_layers": 3,
            "head_dim": 4, "ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 4,
            "n_groups": 2, "chunk_size": 4, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "moe_intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 2,
            "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
        },
    ),
    "minimax": ("MiniMax", {**SIX_LOCAL, "num_local_experts": 4, "head_dim": 4, "block_size": 4}),
    "longcat_flash": (
        "LongcatFlash",
        {
            **LATENT, "num_key_value_heads": 4, "num_layers": 2, "ffn_hidden_size": 12,
            "expert_ffn_hidden_size": 8, "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 3,
            "head_dim": 4, "qk_head_dim": 8,
        },
    ),
    "dots1": ("Dots1", {**GROUPED, "head_dim": 4, "n_group": 1, "topk_group": 1}),
}  # fmt: skip
"""What is special of each family: the prefix of its classes, and fields of its config."""


def _family(prefix: str, fields: Mapping[str, Any]) -> Callable[..., nn.Module]:
    return zoo.hf(f"{prefix}ForCausalLM", f"{prefix}Config", **{**COMMON, **fields})


MODELS: dict[str, zoo.ZooModel] = {
    BY_HAND: zoo.ZooModel(BY_HAND, lambda **sizes: ByHand(**sizes), signals, BATCH, SEQ)
} | {
    name: zoo.ZooModel(name, _family(*found), zoo.causal_lm(VOCAB), BATCH, SEQ)
    for name, found in FIELDS.items()
}


TRANSLATOR = {
    "vocab_size": VOCAB, "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 2,
    "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    "num_experts": 3, "expert_capacity": 20, "dropout_rate": 0.0, "router_jitter_noise": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS["switch"] = zoo.ZooModel(
    "switch",
    zoo.hf("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", **TRANSLATOR),
    zoo.causal_lm(VOCAB),
    BATCH,
    SEQ,
)


def get(name: str) -> zoo.ZooModel:
    """The entry called ``name``."""
    return MODELS[name]


def verify_experts(
    name: str,
    policy: str | PolicyFunction,
    config: Mapping[str, Any] | ComputeConfig,
    *,
    sizes: Mapping[str, int] | None = None,
    batch: int = BATCH,
    **options: Any,
) -> VerifyReport:
    """:func:`verify` of an entry. ``sizes``: fields of the model that are not as in its recipe."""
    entry, sizes = get(name), sizes or {}
    with shared_traces(f"experts {name} {sizes}"):
        inputs = entry.inputs(batch=batch)
        return verify(entry.build(**sizes), inputs, policy, config, **options)
