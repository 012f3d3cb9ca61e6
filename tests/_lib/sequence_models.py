"""Models whose sequence is split: those of the zoo that have one, and Gemma 3, in which layers with
a window alternate with full ones.

    report = sequence_models.verify_sequences("llama", "cp", {"plan_ngpus": 2, "runtime_ngpus": 2})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    )
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
