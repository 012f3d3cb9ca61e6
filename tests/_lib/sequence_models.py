"""Models whose sequence is split: those of the zoo that have one, and some whose masks say more:
windows that alternate with full attention (Gemma 3), scores that are capped (Gemma 2), sinks
(GPT-OSS), rows of packed documents, sound (Whisper), scans (Mamba) and images (U-Net).

    report = sequence_models.verify_sequences("llama", "cp", {"plan_ngpus": 2, "runtime_ngpus": 2})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from traces import shared_traces

from shardwright.frontend.verification.verify import VerifyReport, verify
from shardwright.runtime.config import ComputeConfig

_GEMMA3 = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "sliding_window": 3,
    "max_position_embeddings": 32,
}

LENGTH = 11
PACKED_POSITIONS = ((0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3), (0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9))
"""Where the tokens of each row lie in their documents: three of 5, 2 and 4, and two of 1 and 10."""


def inputs(**more: torch.Tensor) -> Callable[..., zoo.Inputs]:
    """Tokens with labels, in 2 rows; ``more`` may replace these."""

    def make(batch: int, seq: int, generator: torch.Generator) -> dict[str, Any]:
        tokens = torch.randint(32, (2, LENGTH), generator=generator)
        return {"input_ids": tokens, "labels": tokens, "use_cache": False, **more}

    return make


_ANSWERS = torch.arange(14).view(2, 7) + 2
_PADDED = torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[3], [0]])


class MambaBlock(nn.Module):
    """A selective state space, whose scan is two cumulative sums (Gu and Dao, "Mamba", 2023)."""

    def __init__(self, hidden: int, state: int) -> None:
        super().__init__()
        self.state, inner = state, 2 * hidden
        self.norm, self.enter = nn.RMSNorm(hidden), nn.Linear(hidden, 2 * inner)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.select, self.step = nn.Linear(inner, 2 * state + 1), nn.Linear(1, inner)
        self.decay, self.skip = (
            nn.Parameter(torch.rand(inner, state)),
            nn.Parameter(torch.ones(inner)),
        )
        self.leave = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.enter(self.norm(x)).chunk(2, -1)  # [B, S, inner]
        y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, write, read = self.select(y).split([1, self.state, self.state], -1)
        step = F.softplus(self.step(step))
        # What is left of a state after each position, as a logarithm: [B, S, inner, state].
        left = (step[..., None] * -self.decay.exp()).cumsum(1)
        added = (step * y)[..., None] * write[:, :, None]
        states = (added * (-left).exp()).cumsum(1) * left.exp()
        out = (states * read[:, :, None]).sum(-1) + self.skip * y
        return x + self.leave(out * F.silu(gate))


class Mamba(nn.Module):
    """A language model of such blocks."""

    def __init__(self, hidden: int = 8, state: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, hidden), nn.Linear(hidden, 32)
        self.blocks = nn.Sequential(*(MambaBlock(hidden, state) for _ in range(2)))

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embed(input_ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


class Prefixed(nn.Module):
    """Causal attention over learned positions and tokens, which lie end to end."""

    def __init__(self, prefix: int = 3) -> None:
        super().__init__()
        self.embed, self.prefix = nn.Embedding(32, 16), nn.Parameter(torch.randn(prefix, 16))
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        batch = input_ids.shape[0]
        x = torch.cat([self.prefix.expand(batch, -1, -1), self.embed(input_ids)], 1)
        query, key, value = self.qkv(x).view(batch, -1, 12, 4).transpose(1, 2).split(4, 1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.head(y.transpose(1, 2).flatten(2)[:, len(self.prefix) :])
        return F.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def tokens_alone(batch: int, seq: int, generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": torch.randint(32, (2, LENGTH), generator=generator)}


def sound(batch: int, seq: int, generator: torch.Generator) -> dict[str, Any]:
    """Frames of sound, two for each position of the encoder, and 7 tokens of text."""
    frames = torch.randn(2, 4, 2 * LENGTH, generator=generator, dtype=torch.float64)
    text = torch.randint(32, (2, 7), generator=generator)
    return {"input_features": frames, "labels": text, "use_cache": False}


MODELS: dict[str, zoo.ZooModel] = {
    name: zoo.get(name)
    for name in (
        "gpt2", "gpt2-uneven", "gpt2-eager", "gpt2-padded", "llama", "llama-uneven", "llama-padded",
        "mistral", "mistral-uneven", "bert", "bert-uneven", "t5", "t5-uneven", "vit", "vit-uneven",
        "dit", "encoder-decoder-uneven", "transformer-uneven", "unet",
    )
} | {
    "gemma3": zoo.ZooModel(
        "gemma3", zoo.hf("Gemma3ForCausalLM", "Gemma3TextConfig", **_GEMMA3), zoo.causal_lm(32)
    ),
    "llama-packed": zoo.ZooModel(
        "llama-packed",
        zoo.hf("LlamaForCausalLM", "LlamaConfig", **zoo.LLAMA),
        inputs(position_ids=torch.tensor(PACKED_POSITIONS)),
    ),
    "gemma2": zoo.ZooModel(
        "gemma2", zoo.hf("Gemma2ForCausalLM", "Gemma2Config", **_GEMMA3), inputs()
    ),
    "gemma2-padded": zoo.ZooModel(
        "gemma2-padded",
        zoo.hf("Gemma2ForCausalLM", "Gemma2Config", **_GEMMA3),
        inputs(attention_mask=_PADDED.long()),
    ),
    "gemma2-flex": zoo.ZooModel(
        "gemma2-flex",
        zoo.hf(
            "Gemma2ForCausalLM",
            "Gemma2Config",
            **_GEMMA3,
            attn_implementation="flex_attention",
        ),
        inputs(attention_mask=_PADDED.long()),
    ),
    "gpt-oss": zoo.ZooModel(
        "gpt-oss",
        zoo.hf(
            "GptOssForCausalLM",
            "GptOssConfig",
            **_GEMMA3,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        inputs(attention_mask=_PADDED.long()),
    ),
    "whisper": zoo.ZooModel(
        "whisper",
        zoo.hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=32,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_mel_bins=4,
            max_source_positions=LENGTH,
            max_target_positions=16,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dropout=0.0,
        ),
        sound,
    ),
    "bloom": zoo.ZooModel(
        "bloom",
        zoo.hf(
            "BloomForCausalLM",
            "BloomConfig",
            **zoo.NO_SPECIAL_TOKENS,
            vocab_size=32,
            hidden_size=16,
            n_layer=2,
            n_head=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        inputs(),
    ),
    "mamba": zoo.ZooModel("mamba", Mamba, tokens_alone),
    "prefixed": zoo.ZooModel("prefixed", Prefixed, tokens_alone),
    "gemma2-dropout": zoo.ZooModel(
        "gemma2-dropout",
        zoo.hf("Gemma2ForCausalLM", "Gemma2Config", **_GEMMA3, attention_dropout=0.3),
        inputs(attention_mask=_PADDED.long()),
    ),
    "gpt-oss-dropout": zoo.ZooModel(
        "gpt-oss-dropout",
        zoo.hf(
            "GptOssForCausalLM",
            "GptOssConfig",
            **_GEMMA3,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_dropout=0.3,
        ),
        inputs(attention_mask=_PADDED.long()),
    ),
    "packed-dropout": zoo.ZooModel(
        "packed-dropout",
        zoo.hf("LlamaForCausalLM", "LlamaConfig", **{**zoo.LLAMA, "attention_dropout": 0.3}),
        inputs(position_ids=torch.tensor(PACKED_POSITIONS)),
    ),
    "window-dropout": zoo.ZooModel(
        "window-dropout",
        zoo.hf(
            "MistralForCausalLM",
            "MistralConfig",
            **{**zoo.LLAMA, "attention_dropout": 0.3},
            sliding_window=3,
            attn_implementation="eager",
        ),
        inputs(attention_mask=_PADDED.long()),
    ),
    "gpt2-dropout": zoo.ZooModel(
        "gpt2-dropout",
        zoo.hf("GPT2LMHeadModel", "GPT2Config", **{**zoo.GPT2_UNEVEN, "attn_pdrop": 0.3}),
        inputs(),
    ),
    "t5-eager": zoo.ZooModel(
        "t5-eager",
        zoo.hf(
            "T5ForConditionalGeneration", "T5Config", **zoo.T5_UNEVEN, attn_implementation="eager"
        ),
        inputs(labels=_ANSWERS),
    ),
    "t5-dropout": zoo.ZooModel(
        "t5-dropout",
        zoo.hf(
            "T5ForConditionalGeneration",
            "T5Config",
            **{**zoo.T5_UNEVEN, "dropout_rate": 0.2},
            attn_implementation="eager",
        ),
        inputs(labels=_ANSWERS, attention_mask=_PADDED.long()),
    ),
}  # fmt: skip

NAMED = {"unet": ["dim5"]}
"""The dims that are cut where nothing tells what the sequence is: rows of pixels."""


def get(name: str) -> zoo.ZooModel:
    """The entry called ``name``."""
    return MODELS[name]


def verify_sequences(
    name: str, policy: str, config: Mapping[str, Any] | ComputeConfig, **options: Any
) -> VerifyReport:
    """:func:`verify` of an entry."""
    entry = get(name)
    with shared_traces(f"sequences {name}"):
        return verify(entry.build(), entry.inputs(), policy, config, **options)
