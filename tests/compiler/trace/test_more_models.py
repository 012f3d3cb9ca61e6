"""Models beyond the zoo: mixtures of experts, state spaces, convolutions with attention, recurrent
networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from precision import float64_casts
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.trace import trace

IDS = torch.randint(2, 60, (2, 8), generator=torch.Generator().manual_seed(0))
LM = {"input_ids": IDS, "labels": IDS}
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SMALL = {
    **TOKENS, "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
GPT = {key: SMALL[key] for key in SMALL if key != "num_key_value_heads"}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
}
BART = {
    **TOKENS, "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "decoder_start_token_id": 0,
}  # fmt: skip


def model(architecture: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, architecture)(getattr(hf, config)(**fields))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "mixtral": (model("MixtralForCausalLM", "MixtralConfig", **SMALL, num_local_experts=4), LM),
    "qwen3-moe": (
        model(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **SMALL,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            head_dim=4,
        ),
        LM,
    ),
    "gemma2": (model("Gemma2ForCausalLM", "Gemma2Config", **SMALL, head_dim=4), LM),
    "phi3": (model("Phi3ForCausalLM", "Phi3Config", **SMALL), LM),
    "gpt-neox": (model("GPTNeoXForCausalLM", "GPTNeoXConfig", **GPT), LM),
    "mamba": (
        model(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=64,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
        ),
        LM,
    ),
    "bart": (
        model("BartForConditionalGeneration", "BartConfig", **BART, max_position_embeddings=32),
        LM,
    ),
    "swin": (
        model("SwinForImageClassification", "SwinConfig", **SWIN),
        {"pixel_values": IMAGES, "labels": torch.tensor([0, 1])},
    ),
    "lstm": (
        lambda: nn.LSTM(6, 5, 2, batch_first=True, dropout=0.1, bidirectional=True),
        {"input": IMAGES[0, :, :, :6]},
    ),
}


MIXTURES = ("mixtral", "qwen3-moe")
"""Models whose experts are run by other operators, which add up in another order."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS.keys() - set(MIXTURES)))
def test_bit_equal_to_eager(name: str) -> None:
    build, inputs = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        traced(build(), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_equal_eager(name: str) -> None:
    build, inputs = MODELS[name]
    with torch.random.fork_rng(), float64_casts():
        torch.manual_seed(0)
        module = build().double()
        module.config._experts_implementation = "eager"  # torch's kernel has no float64
        traced(module, inputs, exact=False)


class Losses(nn.Module):
    """Losses that look at values, or refuse targets with gradients."""

    def forward(self, x: Tensor, y: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        lengths = torch.tensor([4, 3])
        log_probs = x.view(4, 2, 6).log_softmax(-1)
        return (
            F.gaussian_nll_loss(x, y, torch.ones_like(x), reduction="none"),
            F.ctc_loss(log_probs, labels, lengths, torch.tensor([2, 1]), reduction="sum"),
            F.soft_margin_loss(x, y.detach().sign()),
            torch.sort(x, 1).values,
            torch.max(x, 1),
        )


def test_losses_and_struct_sequences() -> None:
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(4, 12)
    traced(Losses(), {"x": x, "y": x.flip(0), "labels": torch.tensor([[1, 2], [3, 0]])})


def test_targets_that_refuse_gradients() -> None:
    graph = trace(nn.SoftMarginLoss(), {"input": torch.zeros(3), "target": torch.ones(3)})
    assert graph.outputs[0].requires_grad and graph.outputs[0].shape == ()
