"""A hand-written attention block with query, key and value in one product, cut by slices of unequal
size, as in Phi-3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedAttention(nn.Module):
    """``num_heads`` query heads share ``num_kv_heads`` key and value heads; residual, loss is the
    mean square.
    """

    def __init__(
        self, hidden: int = 12, num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 3
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.qkv_proj = nn.Linear(hidden, (num_heads + 2 * num_kv_heads) * head_size, bias=False)
        self.o_proj = nn.Linear(num_heads * head_size, hidden, bias=False)

    def heads(self, x: Tensor, count: int) -> Tensor:
        """[B, S, count * D] -> [B, count, S, D]."""
        return x.view(x.shape[0], x.shape[1], count, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(x)
        query_end = self.num_heads * self.head_size
        key_end = query_end + self.num_kv_heads * self.head_size
        query = self.heads(qkv[..., :query_end], self.num_heads)
        key = self.heads(qkv[..., query_end:key_end], self.num_kv_heads)
        value = self.heads(qkv[..., key_end:], self.num_kv_heads)
        repeats = self.num_heads // self.num_kv_heads
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        out = x + self.o_proj(mixed.reshape(x.shape[0], x.shape[1], query_end))
        return out.square().mean()


def fused_attention(**sizes: int) -> FusedAttention:
    """In float64, seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FusedAttention(**sizes).double()


def hidden_states(batch: int = 4, seq: int = 5, hidden: int = 12) -> Tensor:
    """[B, S, H] in float64."""
    return torch.randn(
        batch, seq, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
