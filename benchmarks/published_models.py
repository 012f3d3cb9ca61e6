"""The models of published runs, by the columns of their tables; without memory behind their
weights.

Models that transformers has are built from their configs, with norms, gates and rotary positions
that are one kernel each, as they were in the systems that were measured (``fused_kernels.py``).
Those of Megatron-LM, of what grew from it (BLOOM, GPT-NeoX, OPT), and of llm-foundry are written
here with the operators that these launch: linear layers add their bias, scale and mask are part of
the softmax, and attention is written out where Megatron's was, or flash attention where it was
that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
import torch.nn.functional as F
from fused_kernels import rotary, with_fused_kernels
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    logging,
)

from shardwright.runtime.errors import did_you_mean

logging.set_verbosity_error()  # random weights are meant


@dataclass(frozen=True)
class Sizes:
    """The columns of a table that describe a model. ``experts``, ``top_k``: how many experts a
    layer has and a token is sent to, 0 of a dense model. ``moe_ffn``: the width of one expert.
    ``one_softmax``: whether the softmax of attention that is written out is one kernel together
    with its scale and its mask.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
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
    """A pre-norm layer. ``core``: what selective recomputation computes again. ``neox``: attention
    and the dense part read the same input, and rotary positions turn a quarter of each head.
    """

    def __init__(
        self, sizes: Sizes, *, flash: bool, bias: bool, dropout: float, neox: bool
    ) -> None:
        super().__init__()
        self.dropout, self.neox = dropout, neox
        hidden, ffn = sizes.hidden, sizes.ffn
        self.heads = sizes.heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, bias=bias) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)
        self.up, self.down = nn.Linear(hidden, ffn, bias=bias), nn.Linear(ffn, hidden, bias=bias)
        self.core = (
            FlashAttention(dropout) if flash else WrittenAttention(sizes.seq, one=sizes.one_softmax)
        )
        if neox:
            for name in ("cos", "sin"):
                table = torch.ones(1, sizes.seq, hidden // sizes.heads // 4)
                self.register_buffer(name, table.bfloat16(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, self.heads, 3, hidden // self.heads)
        query, key, value = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # [batch, heads, seq, head]
        if self.neox:
            query, key = (rotary(part, self.cos, self.sin) for part in (query, key))
        mixed = self.core(query, key, value)
        attended = x + self._dropped(self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden)))
        read = x if self.neox else attended
        return attended + self._dropped(self.down(F.gelu(self.up(self.norm2(read)))))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Gpt(nn.Module):
    """A GPT whose embedding and head share their weight, but for those of GPT-NeoX.
    ``forward(input_ids, labels)``, both [B, S], gives the mean loss.

    ``positions``: whether it has learned ones. ``first_norm``: whether the embedding is normed.
    ``neox``: see :class:`Layer`.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        flash: bool = False,
        bias: bool = True,
        positions: bool = True,
        first_norm: bool = False,
        neox: bool = False,
        dropout: float = DROPOUT,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocab, sizes.hidden)
        # MPT and BLOOM have none: their attention is biased by distance, inside a kernel.
        self.position = nn.Embedding(sizes.seq, sizes.hidden) if positions else None
        self.first_norm = nn.LayerNorm(sizes.hidden) if first_norm else nn.Identity()
        layers = (
            Layer(sizes, flash=flash, bias=bias, dropout=dropout, neox=neox)
            for _ in range(sizes.layers)
        )
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(sizes.hidden, bias=bias)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if not neox:
            self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(input_ids)
        if self.position is not None:
            x = x + self.position.weight
        x = self.first_norm(x)
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


def bloom(sizes: Sizes) -> nn.Module:
    return Gpt(sizes, positions=False, first_norm=True, dropout=0.0)


def gpt_neox(sizes: Sizes) -> nn.Module:
    return Gpt(sizes, positions=False, neox=True, dropout=0.0)


def falcon(sizes: Sizes) -> nn.Module:
    """A Falcon; those with more than one head of keys have a norm each for attention and for the
    dense part, as 40B and 180B have.
    """
    config = FalconConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        new_decoder_architecture=sizes.kv_heads > 1,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.seq,
    )
    return with_fused_kernels(FalconForCausalLM(config))


def mixtral(sizes: Sizes) -> nn.Module:
    """Layers of Llama, each with experts in the place of its dense part."""
    named = _llama_sizes(sizes) | {"intermediate_size": sizes.moe_ffn or sizes.ffn}
    config = MixtralConfig(
        num_local_experts=sizes.experts, num_experts_per_tok=sizes.top_k, **named
    )
    return with_fused_kernels(MixtralForCausalLM(config))


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


def gpt_oss(sizes: Sizes) -> nn.Module:
    named = _llama_sizes(sizes) | {"intermediate_size": sizes.moe_ffn}
    del named["max_position_embeddings"]  # its config scales rotary positions by its own
    config = GptOssConfig(num_local_experts=sizes.experts, num_experts_per_tok=sizes.top_k, **named)
    return with_fused_kernels(GptOssForCausalLM(config))


@dataclass(frozen=True)
class Family:
    """How the models of a family are built, and what their modules are called.

    ``core``: the part of a layer that selective recomputation computes again. ``norm``: what
    follows on the last layer. ``period``: every so many layers are alike. ``experts``: whether its
    layers have experts.
    """

    make: Callable[[Sizes], nn.Module]
    layers: str
    core: str
    norm: str
    period: int = 1
    experts: bool = False


def _of_megatron(make: Callable[[Sizes], nn.Module]) -> Family:
    """The family of models that are written here."""
    return Family(make, "layers.*", "layers.*.core", "norm")


def _like_llama(
    make: Callable[[Sizes], nn.Module], period: int = 1, experts: bool = False
) -> Family:
    """The family of models of transformers whose modules are called as those of Llama."""
    layers = "model.layers.*"
    return Family(make, layers, f"{layers}.self_attn", "model.norm", period, experts)


_FALCON = Family(falcon, "transformer.h.*", "transformer.h.*.self_attention", "transformer.ln_f")

BY_SIZES = {False: _like_llama(llama), True: _like_llama(mixtral, experts=True)}
"""What a model of an unknown name is built as where a table has all of its sizes: a Llama, or, with
experts, a Mixtral.
"""

FAMILIES: dict[str, Family | None] = {
    "BLOOM": _of_megatron(bloom),
    "DeepSeekV3": _like_llama(deepseek_v3, experts=True),
    "Falcon": _FALCON,
    "GPT OSS": _like_llama(gpt_oss, 2, experts=True),
    "GPT": _of_megatron(megatron),
    "GPT3": _of_megatron(megatron_flash),
    "GPT-NeoX": _of_megatron(gpt_neox),
    "LLAMA": _like_llama(llama),
    "Mixtral": _like_llama(mixtral, experts=True),
    "MPT": _of_megatron(mpt),
    "Nemotron": _like_llama(nemotron),
    "OPT": _of_megatron(megatron),
    "Qwen3_30B_a3B": _like_llama(qwen3_30b, experts=True),
    "Qwen3_235B_a22B": _like_llama(qwen3_235b, experts=True),
    # These begin like others, and have layers of other kinds.
    **dict.fromkeys(("Falcon-H1", "Falcon Mamba", "Falcon 3", "LLAMA4"), None),
    **dict.fromkeys(("Nemotron-H", "Nemotron V3", "Nemotron Nano"), None),
    **dict.fromkeys(("Nemotron 3 Nano", "Nemotron 3 Super", "Nemotron 3 Ultra"), None),
}
"""Families by the beginning of a model's name; the longest beginning counts. ``None``: a model that
cannot be built here.
"""

OTHERS = ("GPT-J", "GPT4", "LLAMA MoE")
"""Beginnings of names that are longer than one of a family, of models that are not of it."""


def _known(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    experts: int = 0,
    top_k: int = 0,
    moe_ffn: int = 0,
) -> Sizes:
    return Sizes(layers, hidden, heads, kv_heads, ffn, vocab, 0, experts, top_k, moe_ffn)


KNOWN_SIZES: dict[str, Sizes] = {
    "BLOOM-176B": _known(70, 14336, 112, 112, 57344, 250880),
    "BLOOM-7B1": _known(30, 4096, 32, 32, 16384, 250880),
    "DeepSeekV3": _known(61, 7168, 128, 128, 18432, 129280, 256, 8, 2048),
    "Falcon-7B": _known(32, 4544, 71, 1, 18176, 65024),
    "Falcon-40B": _known(60, 8192, 128, 8, 32768, 65024),
    "Falcon-180B": _known(80, 14848, 232, 8, 59392, 65024),
    "GPT3-175B": _known(96, 12288, 96, 96, 49152, 51200),
    "GPT-NeoX-20B": _known(44, 6144, 64, 64, 24576, 50432),
    "GPT OSS 20B": _known(24, 2880, 64, 8, 2880, 201088, 32, 4, 2880),
    "GPT OSS 120B": _known(36, 2880, 64, 8, 2880, 201088, 128, 4, 2880),
    "LLAMA-7B": _known(32, 4096, 32, 32, 11008, 32000),
    "LLAMA-13B": _known(40, 5120, 40, 40, 13824, 32000),
    "LLAMA-65B": _known(80, 8192, 64, 64, 22016, 32000),
    "LLAMA2-7B": _known(32, 4096, 32, 32, 11008, 32000),
    "LLAMA2-13B": _known(40, 5120, 40, 40, 13824, 32000),
    "LLAMA2-70B": _known(80, 8192, 64, 8, 28672, 32000),
    "LLAMA3-8B": _known(32, 4096, 32, 8, 14336, 128256),
    "LLAMA3-70B": _known(80, 8192, 64, 8, 28672, 128256),
    "LLAMA3-405B": _known(126, 16384, 128, 8, 53248, 128256),
    "LLAMA3.1-8B": _known(32, 4096, 32, 8, 14336, 128256),
    "LLAMA3.1-70B": _known(80, 8192, 64, 8, 28672, 128256),
    "LLAMA3.1-405B": _known(126, 16384, 128, 8, 53248, 128256),
    "Mixtral-8x7B": _known(32, 4096, 32, 8, 14336, 32000, 8, 2, 14336),
    "Mixtral-8x22B": _known(56, 6144, 48, 8, 16384, 32000, 8, 2, 16384),
    "OPT-175B": _known(96, 12288, 96, 96, 49152, 50272),
    "Qwen3_30B_a3B": _known(48, 2048, 32, 4, 6144, 151936, 128, 8, 768),
    "Qwen3_235B_a22B": _known(94, 4096, 64, 4, 12288, 151936, 128, 8, 1536),
}
"""Sizes of models of which a table says the name only, by the beginning of the name; without the
length of sequences. They are those of the configs that were published with their weights. Those of
DeepSeek-V3, Falcon-7B, GPT-NeoX-20B, GPT-OSS 120B, Llama-7B and Mixtral 8x7B are also what the
configs of transformers say by default. No weights of GPT-3 were published: its sizes are those of
"Language Models are Few-Shot Learners" (table 2.1), and its 50,257 words are padded to 51,200: so
Megatron-LM pads them, with eight ranks of tensor parallelism, and NeMo's runs have as many.
"""


def _plain(model: str) -> str:
    """A model's name without what tables spell differently: ``meta-llama/Llama-3.1-8B`` is
    ``llama318b``. ``GPT 3.6B`` is no ``GPT3``: what parts a GPT from its size stays. ``GPT-3 175B``
    is one: its size is said apart.
    """
    name = model.lower().rpartition("/")[2].strip()
    name = re.sub(r"^gpt[^a-z0-9]+3[^a-z0-9.]+(?=[0-9])", "gpt3", name)
    name = re.sub(r"^gpt[^a-z0-9]+(?=[0-9])", "gpt#", name)
    return re.sub(r"[^a-z0-9#]", "", name).removeprefix("meta")


def is_named(model: str) -> bool:
    """Whether a model's name tells what it is built of, or that it cannot be built here."""
    return _longest_beginning(model) in FAMILIES


def family_of(model: str, experts: int = 0) -> Family | None:
    """The family of a model by its name, or, of a name that is not known, by its sizes; nothing if
    it cannot be built here.
    """
    return FAMILIES[_longest_beginning(model)] if is_named(model) else BY_SIZES[experts > 0]


def built_by_sizes(experts: int) -> str:
    """What stands for a model of an unknown name."""
    return "Mixtral" if experts else "Llama"


def _longest_beginning(model: str) -> str:
    names = (name for name in (*FAMILIES, *OTHERS) if _plain(model).startswith(_plain(name)))
    return max(names, key=len, default="")


def known_sizes(model: str) -> Sizes:
    """The entry of :data:`KNOWN_SIZES` for a model; zeros if there is none."""
    names = (name for name in KNOWN_SIZES if _plain(model).startswith(_plain(name)))
    return next((KNOWN_SIZES[name] for name in names), _known(0, 0, 0, 0, 0, 0))


def meant(model: str) -> str:
    """What to add to a name of which no sizes are known: `` (did you mean 'LLAMA3-8B'?)``, or
    nothing if no name with sizes is near.
    """
    name = model.rpartition("/")[2].strip()
    # The letters in front must be near by themselves: sizes like ``-7B`` make all names alike. A
    # model of another size is not meant.
    near = tuple(
        known
        for known in KNOWN_SIZES
        if _is_near(_letters(name), _letters(known))
        and (not _billions(name) or _billions(name) == _billions(known))
    )
    return f" ({did_you_mean(name, near)})" if near else ""


def _is_near(one: str, other: str) -> bool:
    alike = SequenceMatcher(None, one, other).ratio() > LEAST_ALIKE
    return alike or sorted(one) == sorted(other)  # ``Gtp``


LEAST_ALIKE = 0.75
"""How alike the letters of two names are at least, if one may be meant by the other: ``Llamma`` and
``LLAMA`` are (0.91), ``GPT`` and ``OPT`` are not (0.67).
"""


def _letters(name: str) -> str:
    """``llama`` of ``LLAMA3.1-8B``."""
    return re.split(r"[^a-z]", name.lower(), maxsplit=1)[0]


def _billions(name: str) -> str:
    """``8`` of ``LLAMA3.1-8B``, ``8x7`` of ``Mixtral-8x7B``; nothing of ``DeepSeekV3``."""
    found = re.search(r"([0-9.x]*[0-9])b", name.lower())
    return found[1] if found else ""


def on_meta(family: Family, sizes: Sizes) -> nn.Module:
    """A model in bfloat16 on the meta device."""
    with torch.device("meta"):
        return family.make(sizes).to(torch.bfloat16)
