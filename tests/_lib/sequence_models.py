"""Models whose sequence is split: those of the zoo that have one, and some whose masks say more:
windows that alternate with full attention (Gemma 3), scores that are capped (Gemma 2), sinks
(GPT-OSS), and rows of packed documents.

    report = sequence_models.verify_sequences("llama", "cp", {"plan_ngpus": 2, "runtime_ngpus": 2})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import zoo
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

MODELS: dict[str, zoo.ZooModel] = {
    name: zoo.get(name)
    for name in (
        "gpt2", "gpt2-uneven", "gpt2-eager", "gpt2-padded", "llama", "llama-uneven", "llama-padded",
        "mistral", "mistral-uneven", "bert", "bert-uneven", "t5", "t5-uneven", "vit", "vit-uneven",
        "dit", "encoder-decoder-uneven", "transformer-uneven",
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
