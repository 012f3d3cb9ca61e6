"""Models that the benchmarks compile and run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    logging,
)

logging.set_verbosity_error()  # random weights are meant


def gpt2_on_meta(num_layers: int, num_heads: int = 16, head_size: int = 64) -> nn.Module:
    """A GPT-2 without memory behind its weights; the defaults are GPT-2 medium's."""
    with torch.device("meta"):
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=num_layers, n_head=num_heads, n_embd=num_heads * head_size, n_positions=1024
            )
        )


def llama_on_meta(num_layers: int) -> nn.Module:
    """A Llama of the 7B shape, without memory behind its weights."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers))


def qwen3_235b_on_meta(num_layers: int) -> nn.Module:
    """A Qwen3-MoE of the shape of Qwen3-235B-A22B, without memory behind its weights."""
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                num_hidden_layers=num_layers,
                hidden_size=4096,
                intermediate_size=12288,
                moe_intermediate_size=1536,
                num_attention_heads=64,
                num_key_value_heads=4,
                head_dim=128,
                num_experts=128,
                num_experts_per_tok=8,
                norm_topk_prob=True,
            )
        )


def qwen3_moe(num_experts: int = 16) -> nn.Module:
    """A Qwen3-MoE small enough for a CPU: four layers, four experts for each token."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=4096,
            num_hidden_layers=4,
            hidden_size=256,
            moe_intermediate_size=256,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            num_experts=num_experts,
            num_experts_per_tok=min(4, num_experts),
            norm_topk_prob=True,
            use_cache=False,
        )
    )


class Attention(nn.Module):
    """Causal self-attention with separate projections, the form that DTensor's
    ``parallelize_module`` can split.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.heads(self.query(x)),
            self.heads(self.key(x)),
            self.heads(self.value(x)),
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """``forward(tokens, labels)``, both [B, S], gives the mean loss."""

    def __init__(
        self, num_layers: int, hidden_size: int, num_heads: int, vocab_size: int, max_length: int
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, hidden_size)
        self.position = nn.Embedding(max_length, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class StateSpaceLoop(nn.Module):
    """``forward(x)``, [B, S, 64], gives a loss: a selective scan, written out step by step in
    Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mixed = nn.Linear(64, 128), nn.Linear(64, 32)
        self.a, self.out = nn.Parameter(torch.randn(64, 16)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        u, dt = self.into(x).chunk(2, -1)
        b, c = self.mixed(x).chunk(2, -1)
        dt, decay = F.softplus(dt), -torch.exp(self.a)
        state, made = x.new_zeros(x.shape[0], 64, 16), []
        for t in range(x.shape[1]):
            state = torch.exp(dt[:, t, :, None] * decay) * state
            state = state + dt[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
            made.append((state * c[:, t, None]).sum(-1))
        return self.out(torch.stack(made, 1)).square().mean()
