"""Models of transformers beyond the zoo that once failed, and two of reinforcement learning and
Fourier layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

from shardwright.frontend.verification.verify import verify


class Actor(nn.Module):
    """The loss of proximal policy optimisation, by ``torch.distributions`` with its checks of
    values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(16, 1)

    def forward(self, x: Tensor, actions: Tensor, old: Tensor, gains: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        choices = torch.distributions.Categorical(logits=self.policy(hidden))
        ratio, gains = (choices.log_prob(actions) - old).exp(), (gains - gains.mean()) / gains.std()
        surrogate = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
        return (
            F.mse_loss(self.value(hidden).squeeze(-1), gains)
            - surrogate
            - 0.01 * choices.entropy().mean()
        )


class FourierLayer(nn.Module):
    """Some frequencies times complex weights, written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 8), nn.Linear(8, 1)
        self.weight = nn.Parameter(torch.randn(8, 8, 5, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # [B, S, 2], [B, S]
        hidden = self.up(x).transpose(1, 2)
        found = torch.fft.rfft(hidden)
        out = torch.zeros(found.shape, dtype=torch.cfloat)
        out[..., :5] = torch.einsum(
            "bix,iox->box", found[..., :5], torch.view_as_complex(self.weight)
        )
        hidden = F.gelu(hidden + torch.fft.irfft(out, n=x.shape[1]))
        return F.mse_loss(self.down(hidden.transpose(1, 2)).squeeze(-1), y)


class Gumbel(nn.Module):
    """Choices by Gumbel noise, of exponential numbers that are drawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.choose, self.down = nn.Linear(2, 12), nn.Linear(12, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.choose(F.gelu(self.up(x)))
        noise = torch.empty_like(scores).exponential_().log()
        return F.mse_loss(self.down((scores - noise).softmax(-1)).squeeze(-1), y)


class Looks(nn.Module):
    """Qwen2-VL for one image of one size in each row, always at the same place: its grids and
    positions are constants.
    """

    def __init__(self) -> None:
        super().__init__()
        import transformers

        text = {
            **zoo.LLAMA,
            "vocab_size": 40,
            "num_attention_heads": 2,
            "rope_parameters": QWEN_ROPE,
            "pad_token_id": 0,
        }
        tokens = {
            "image_token_id": 35,
            "video_token_id": 36,
            "vision_start_token_id": 37,
            "vision_end_token_id": 38,
        }
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=QWEN_VISION, **tokens)
        self.model = transformers.Qwen2VLForConditionalGeneration(config)

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, position_ids: Tensor, labels: Tensor
    ) -> Tensor:
        grids = torch.tensor([[1, 4, 4]] * 2)
        inputs = {"input_ids": input_ids, "pixel_values": pixel_values, "labels": labels}
        return self.model(**inputs, position_ids=position_ids, image_grid_thw=grids).loss  # type: ignore[no-any-return]


def seen(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    ids = torch.randint(1, 30, (2, 12), generator=generator)
    ids[:, 2], ids[:, 3:7] = 37, 35
    positions = torch.arange(12).expand(3, 2, 12).contiguous()
    pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "position_ids": positions, "labels": ids}


def acted(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    x, old, gains = (
        torch.randn(*shape, generator=generator).double()
        for shape in ((batch, 8), (batch,), (batch,))
    )
    return {
        "x": x,
        "actions": torch.randint(5, (batch,), generator=generator),
        "old": old - 1,
        "gains": gains,
    }


def signals(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    x, y = (
        torch.randn(*shape, generator=generator).double() for shape in ((batch, 16, 2), (batch, 16))
    )
    return {"x": x, "y": y}


def sounds(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    waves = torch.randn(batch, 64, generator=generator).double()
    return {"input_values": waves, "labels": torch.randint(3, (batch,), generator=generator)}


QWEN_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN_VISION = {
    "depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2, "mlp_ratio": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WAV2VEC2 = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_stride": (2, 2), "conv_kernel": (4, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "num_labels": 3,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout",
        "feat_proj_dropout"), 0.0),
    **dict.fromkeys(("final_dropout", "layerdrop", "mask_time_prob", "mask_feature_prob"), 0.0),
}  # fmt: skip

MAMBA = {"vocab_size": 32, "hidden_size": 12, "state_size": 4, "num_hidden_layers": 2}
RWKV = {
    "vocab_size": 32, "hidden_size": 12, "attention_hidden_size": 12, "num_hidden_layers": 2,
    "context_length": 16,
    "rescale_every": 0,
}  # fmt: skip
GRIFFIN = {
    **zoo.LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 4, "lru_width": 16,
    "attention_window_size": 8,
}  # fmt: skip
QWEN3_NEXT = {
    **zoo.LLAMA, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def transcribed(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    """Waves, and what was said, of another length in each row."""
    waves = torch.randn(batch, 64, generator=generator).double()
    labels = torch.randint(1, 8, (batch, 3), generator=generator)
    labels[0, 1:] = -100
    return {"input_values": waves, "labels": labels}


PROPHETNET = {
    "vocab_size": 32, "hidden_size": 16, "encoder_ffn_dim": 24, "num_encoder_layers": 1,
    "num_encoder_attention_heads": 2,
    "decoder_ffn_dim": 24, "num_decoder_layers": 1, "num_decoder_attention_heads": 2,
    "decoder_start_token_id": 1,
    "max_position_embeddings": 32,
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
}  # fmt: skip
WHISPER = {
    "vocab_size": 32, "num_mel_bins": 6, "d_model": 12, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20,
    "max_source_positions": 5, "pad_token_id": 1,
    "max_target_positions": 8, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2,
    "dropout": 0.0,
}  # fmt: skip


def spoken(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    """Spectra of 10 frames, and what was said."""
    features = torch.randn(batch, 6, 10, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": zoo.tokens(32, batch, seq, generator, low=4)}


FLAUBERT = {
    "vocab_size": 32, "emb_dim": 16, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 16,
    "pad_token_id": 0,
    **dict.fromkeys(("dropout", "attention_dropout", "layerdrop"), 0.0),
}  # fmt: skip


def unmasked(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    """Rows without padding: with a mask, Longformer looks whether some token attends globally."""
    inputs = zoo.masked_lm(32)(batch, seq, generator)
    del inputs["attention_mask"]
    return inputs


def asked(batch: int, seq: int, generator: torch.Generator) -> zoo.Inputs:
    """Images, questions about them, and how far each of three answers holds."""
    answers = torch.rand(batch, 3, generator=generator, dtype=torch.float64)
    return {
        "input_ids": zoo.tokens(32, batch, seq, generator, low=4),
        "pixel_values": zoo.images(batch, 8, generator),
        "labels": answers,
    }


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[..., zoo.Inputs]]] = {
    "mixtral": (
        zoo.hf("MixtralForCausalLM", "MixtralConfig", **zoo.LLAMA, **EXPERTS),
        zoo.causal_lm(32),
    ),
    "gpt-oss": (
        zoo.hf(
            "GptOssForCausalLM",
            "GptOssConfig",
            **zoo.LLAMA,
            **EXPERTS,
            head_dim=4,
            sliding_window=4,
            rope_scaling=None,
        ),
        zoo.causal_lm(32),
    ),
    "llama4": (
        zoo.hf(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            **zoo.LLAMA,
            num_local_experts=4,
            head_dim=4,
            intermediate_size_mlp=24,
        ),
        zoo.causal_lm(32),
    ),
    "beit": (
        zoo.hf(
            "BeitForImageClassification",
            "BeitConfig",
            **zoo.VIT,
            use_relative_position_bias=True,
            drop_path_rate=0.0,
        ),
        zoo.classified_images(8, 6, "pixel_values"),
    ),
    "wav2vec2": (zoo.hf("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **WAV2VEC2), sounds),
    "hubert-ctc": (zoo.hf("HubertForCTC", "HubertConfig", **WAV2VEC2, vocab_size=8), transcribed),
    "xmod": (
        zoo.hf(
            "XmodForMaskedLM",
            "XmodConfig",
            **zoo.BERT,
            languages=["en_XX", "de_DE"],
            default_language="de_DE",
        ),
        zoo.masked_lm(32),
    ),
    "prophetnet": (
        zoo.hf("ProphetNetForConditionalGeneration", "ProphetNetConfig", **PROPHETNET),
        zoo.causal_lm(32),
    ),
    "whisper": (zoo.hf("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), spoken),
    "longformer": (
        zoo.hf("LongformerForMaskedLM", "LongformerConfig", **zoo.BERT, attention_window=[4, 4]),
        unmasked,
    ),
    "flaubert": (
        zoo.hf("FlaubertWithLMHeadModel", "FlaubertConfig", **FLAUBERT),
        zoo.masked_lm(32),
    ),
    "vilt": (
        zoo.hf(
            "ViltForQuestionAnswering",
            "ViltConfig",
            **zoo.BERT,
            image_size=8,
            patch_size=2,
            num_labels=3,
        ),
        asked,
    ),
    "mamba": (zoo.hf("MambaForCausalLM", "MambaConfig", **MAMBA), zoo.causal_lm(32)),
    "rwkv": (zoo.hf("RwkvForCausalLM", "RwkvConfig", **RWKV), zoo.causal_lm(32)),
    "recurrent-gemma": (
        zoo.hf("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", **GRIFFIN),
        zoo.causal_lm(32),
    ),
    "qwen3-next": (
        zoo.hf("Qwen3NextForCausalLM", "Qwen3NextConfig", **QWEN3_NEXT),
        zoo.causal_lm(32),
    ),
    "qwen2-vl": (lambda **sizes: Looks(), seen),
    "actor": (lambda **sizes: Actor(), acted),
    "gumbel": (lambda **sizes: Gumbel(), signals),
    "fourier": (lambda **sizes: FourierLayer(), signals),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "policy", "ranks"),
    [(name, *(("tp", 3), ("data", 2))[n % 2]) for n, name in enumerate(MODELS)],
)
def test_model(name: str, policy: str, ranks: int) -> None:
    make, make_inputs = MODELS[name]
    entry: Any = zoo.ZooModel(name, make, make_inputs)
    report = verify(
        entry.build(), entry.inputs(), policy, {"plan_ngpus": ranks, "runtime_ngpus": ranks}
    )
    assert report.ok, str(report)
