"""The models of published runs, by the columns of their tables; without memory behind their
weights.

Models that transformers has are built from their configs, with norms, gates and rotary positions
that are one kernel each, as they were in the systems that were measured (``fused_kernels.py``).
Those of Megatron-LM and llm-foundry are written here with the operators that these launch: linear
layers add their bias, scale and mask are part of the softmax, and attention is written out where
Megatron's was, or flash attention where it was that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fused_kernels import with_fused_kernels
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    logging,
)

logging.set_verbosity_error()  # random weights are meant


@dataclass(frozen=True)
class Sizes:
    """The columns of a table that describe a model. ``one_softmax``: whether the softmax of
    attention that is written out is one kernel together with its scale and its mask.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    one_softmax: bool = True


DROPOUT = 0.1
"""That of Megatron-LM's models and of NeMo's GPT-3 (``hidden_dropout`` and ``attention_dropout`` of
NeMo-Framework-Launcher, ``launcher_scripts/conf/training/gpt3``).
"""


class WrittenAttention(nn.Module):
    """Attention as Megatron wrote it before flash attention: two products, scale, mask and softmax
    between them, in ``one`` kernel or in one each, and dropout.
    """

    def __init__(self, seq: int, *, one: bool) -> None:
        super().__init__()
        self.one = one
        if not one:
            mask = torch.ones(seq, seq, dtype=torch.bool).triu(1)
            self.register_buffer("mask", mask, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Turned so that it stays what is written: a compile takes query @ key.transpose(-1, -2) and
        # its softmax for one operator, and here each had a kernel.
        turned = key.permute(0, 1, 3, 2)
        scores = torch.matmul(query, turned)  # [batch, heads, seq, seq]
        if self.one:
            weights = torch.softmax(scores, -1)
        else:
            scores = (scores.float() * query.shape[-1] ** -0.5).masked_fill(self.mask, -10000.0)
            weights = torch.softmax(scores, -1).to(query.dtype)
        return torch.matmul(F.dropout(weights, DROPOUT), value)


class FlashAttention(nn.Module):
    """One kernel for all of it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True
        )


class Layer(nn.Module):
    """A pre-norm layer. ``core``: what selective recomputation computes again."""

    def __init__(self, sizes: Sizes, *, flash: bool, bias: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        hidden, ffn = sizes.hidden, sizes.ffn
        self.heads = sizes.heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, bias=bias) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)
        self.up, self.down = nn.Linear(hidden, ffn, bias=bias), nn.Linear(ffn, hidden, bias=bias)
        self.core = (
            FlashAttention(dropout) if flash else WrittenAttention(sizes.seq, one=sizes.one_softmax)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, self.heads, 3, hidden // self.heads)
        mixed = self.core(*qkv.permute(3, 0, 2, 1, 4).unbind(0))  # [batch, heads, seq, head]
        x = x + self._dropped(self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden)))
        return x + self._dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Gpt(nn.Module):
    """A GPT whose embedding and head share their weight. ``forward(input_ids, labels)``, both
    [B, S], gives the mean loss.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        flash: bool = False,
        bias: bool = True,
        positions: bool = True,
        dropout: float = DROPOUT,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocab, sizes.hidden)
        # MPT has none: its attention is biased by distance, inside the kernel.
        self.position = nn.Embedding(sizes.seq, sizes.hidden) if positions else None
        layers = (
            Layer(sizes, flash=flash, bias=bias, dropout=dropout) for _ in range(sizes.layers)
        )
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(sizes.hidden, bias=bias)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(input_ids)
        if self.position is not None:
            x = x + self.position.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def megatron(sizes: Sizes) -> nn.Module:
    return Gpt(sizes)


def megatron_flash(sizes: Sizes) -> nn.Module:
    return Gpt(sizes, flash=True)


def mpt(sizes: Sizes) -> nn.Module:
    return Gpt(sizes, flash=True, bias=False, positions=False, dropout=0.0)


def llama(sizes: Sizes) -> nn.Module:
    return with_fused_kernels(LlamaForCausalLM(LlamaConfig(**_llama_sizes(sizes))))


def nemotron(sizes: Sizes) -> nn.Module:
    return NemotronForCausalLM(NemotronConfig(**_llama_sizes(sizes)))


def _llama_sizes(sizes: Sizes) -> dict[str, Any]:
    """The sizes under the names that configs of Llama and its kin have for them."""
    return {
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.seq,
    }


def qwen3_30b(sizes: Sizes) -> nn.Module:
    return qwen3(sizes.layers, 2048, 32, 768)


def qwen3_235b(sizes: Sizes) -> nn.Module:
    return qwen3(sizes.layers, 4096, 64, 1536)


def qwen3(layers: int, hidden: int, heads: int, inner: int) -> nn.Module:
    """A Qwen3-MoE of 128 experts."""
    config = Qwen3MoeConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        moe_intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    return with_fused_kernels(Qwen3MoeForCausalLM(config))


def deepseek_v3(sizes: Sizes) -> nn.Module:
    """DeepSeek-V3 without the head that predicts a further token. Its first three layers are dense,
    however many there are.
    """
    # How pairs of elements lie that are turned together changes no kernel.
    config = DeepseekV3Config(num_hidden_layers=sizes.layers, rope_interleave=False)
    return with_fused_kernels(DeepseekV3ForCausalLM(config))


def gpt_oss_120b(sizes: Sizes) -> nn.Module:
    return with_fused_kernels(GptOssForCausalLM(GptOssConfig(num_hidden_layers=sizes.layers)))


@dataclass(frozen=True)
class Family:
    """How the models of a family are built, and what their layers are called.

    ``core``: the part of a layer that selective recomputation computes again. ``period``:
    every so many layers are alike. ``experts``: whether its layers have experts.
    """

    make: Callable[[Sizes], nn.Module]
    layers: str
    core: str
    period: int = 1
    experts: bool = False


def _with_experts(make: Callable[[Sizes], nn.Module], period: int = 1) -> Family:
    return Family(make, "model.layers.*", "model.layers.*.self_attn", period, experts=True)


FAMILIES: dict[str, Family | None] = {
    "DeepSeekV3": _with_experts(deepseek_v3),
    "GPT OSS 120B": _with_experts(gpt_oss_120b, 2),
    "GPT": Family(megatron, "layers.*", "layers.*.core"),
    "GPT3": Family(megatron_flash, "layers.*", "layers.*.core"),
    "MPT": Family(mpt, "layers.*", "layers.*.core"),
    "LLAMA": Family(llama, "model.layers.*", "model.layers.*.self_attn"),
    "Nemotron": Family(nemotron, "model.layers.*", "model.layers.*.self_attn"),
    "Qwen3_30B_a3B": _with_experts(qwen3_30b),
    "Qwen3_235B_a22B": _with_experts(qwen3_235b),
    # These begin like others, and are other models.
    **dict.fromkeys(("GPT OSS", "GPT-J", "GPT-NeoX", "GPT4", "LLAMA4", "LLAMA MoE"), None),
    **dict.fromkeys(("Nemotron-H", "Nemotron V3", "Nemotron Nano"), None),
    **dict.fromkeys(("Nemotron 3 Nano", "Nemotron 3 Super", "Nemotron 3 Ultra"), None),
}
"""Families by the beginning of a model's name; the longest beginning counts. ``None``: a model that
is not known here.
"""

KNOWN_SIZES: dict[str, tuple[int, int, int, int, int, int]] = {
    "LLAMA2-7B": (32, 4096, 32, 32, 11008, 32000),
    "LLAMA2-13B": (40, 5120, 40, 40, 13824, 32000),
    "LLAMA2-70B": (80, 8192, 64, 8, 28672, 32000),
    "LLAMA3-8B": (32, 4096, 32, 8, 14336, 128256),
    "LLAMA3-70B": (80, 8192, 64, 8, 28672, 128256),
    "LLAMA3.1-8B": (32, 4096, 32, 8, 14336, 128256),
    "LLAMA3.1-70B": (80, 8192, 64, 8, 28672, 128256),
    "LLAMA3.1-405B": (126, 16384, 128, 8, 53248, 128256),
}
"""Layers, hidden size, heads, key and value heads, inner size and vocabulary of models of which a
table says the name only (from their published configs), by the beginning of the name.
"""


def _plain(model: str) -> str:
    """A model's name without what tables spell differently: ``meta-llama/Llama-3.1-8B`` is
    ``llama318b``. ``GPT 3.6B`` is no ``GPT3``: what parts a GPT from its size stays.
    """
    name = model.lower().rpartition("/")[2].strip()
    name = re.sub(r"^gpt[^a-z0-9]+(?=[0-9])", "gpt#", name)
    return re.sub(r"[^a-z0-9#]", "", name).removeprefix("meta")


def family_of(model: str) -> Family | None:
    """The family of a model by its name; nothing if it is not known here."""
    matching = [name for name in FAMILIES if _plain(model).startswith(_plain(name))]
    return FAMILIES[max(matching, key=len)] if matching else None


def known_sizes(model: str) -> tuple[int, int, int, int, int, int]:
    """The entry of :data:`KNOWN_SIZES` for a model; zeros if there is none."""
    names = (name for name in KNOWN_SIZES if _plain(model).startswith(_plain(name)))
    return next((KNOWN_SIZES[name] for name in names), (0, 0, 0, 0, 0, 0))


def on_meta(family: Family, sizes: Sizes) -> nn.Module:
    """A model in bfloat16 on the meta device."""
    with torch.device("meta"):
        return family.make(sizes).to(torch.bfloat16)
