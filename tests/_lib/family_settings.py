"""Settings and arguments of single folders of transformers, for the recipe of tiny models: where a
default is missing, or sizes must fit each other in a way that names do not tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

BATCH = 4

Settings = Mapping[str, Any]

_EXPERTS = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_SERIES = {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2, 3]}
_BACKBONE = {
    "backbone_config.num_hidden_layers": 4,
    "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_HYBRID = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "hybrid_layer_ids": [1, 3],
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "num_key_value_heads": 4,
}
_PINPOINTS = {"image_grid_pinpoints": [[64, 64]], "vision_config.image_size": 32}

_HIERA = {
    "image_size": [64, 64],
    "hidden_size": 16,
    "embed_dim_per_stage": [16, 32, 64, 128],
    "blocks_per_stage": [1, 1, 2, 1],
    "global_attention_blocks": [3],
    "window_size_per_stage": [4, 2, 4, 2],
}

_FPN = {
    "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 32,
}

_STROKES = {
    name: [[2 * reach + 1 if tall else 1, 2 * reach + 1 if wide else 1], [1, 1], padding]
    for shape, tall, wide in (
        ("vertical_long_to_small_conv", True, False),
        ("horizontal_small_to_long_conv", False, True),
        ("symmetric_conv_long", True, True),
    )
    for ratio, reach in (("long", 3), ("mid", 2), ("short", 1))
    for name in [f"{shape}_{ratio}ratio"]
    for padding in [[reach if tall else 0, reach if wide else 0]]
} | {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
_DETECTED_TEXT = {
    "intraclass_block_config": _STROKES,
    "neck_out_channels": 32,
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}
_LCNET = {
    "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"],
    "backbone_config.stage_out_channels": [96, 96, 192, 384],
    "backbone_config.block_configs": [
        [[3, 96, 96, 1, True]],
        [[3, 96, 96, 2, False]],
        [[3, 96, 192, 2, False]],
        [[3, 192, 384, 2, False]],
    ],
}
_SOUNDS = {"num_filters": 4, "downsampling_ratios": [2, 2, 4], "depths": [1] * 4}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_ROPE_BY_KIND = {"full_attention": _ROPE, "sliding_attention": _ROPE}

# Small models of the package timm, by the names of their classes' own arguments.
_TIMM_VIT = {
    "architecture": "vit_pe_core_tiny_patch16_384",
    "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8},
}
_TIMM_STAGES = {"layers": [1, 1, 1, 1], "embed_dims": [16, 32, 32, 64]}


def _at(path: str, settings: Settings) -> Settings:
    """Settings of the part of a config at ``path``."""
    return {f"{path}.{name}": value for name, value in settings.items()}


CLASSES: Mapping[str, str] = {
    "fastspeech2_conformer": "FastSpeech2ConformerModel",
    "rag": "RagTokenForGeneration",
    "sam_hq": "SamHQVisionModel",
    "sam2": "Sam2VisionModel",
    "edgetam": "EdgeTamVisionModel",
    "cohere_compass": "CohereCompassForCausalLM",
    "flava": "FlavaModel",
    "musicgen": "MusicgenForCausalLM",
    "musicgen_melody": "MusicgenMelodyForCausalLM",
    "decision_transformer": "DecisionTransformerModel",
    "ernie4_5_vl_moe": "Ernie4_5_VL_MoeTextModel",
    "glm_image": "GlmImageTextModel",
    "inkling2": "Inkling2ForCausalLM",
    "paddleocr_vl": "PaddleOCRTextModel",
    "qwen2_5_omni": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
}
"""Which class of a folder is taken where the best name is not the one that the recipe reaches."""

SETTINGS: Mapping[str, Settings] = {
    # Both of its models of sound make one frame of 320 samples.
    "xcodec": {"semantic_model_config.num_feat_extract_layers": 7, "codebook_dim": 64},
    # The widths of both of their models of sound, side by side.
    "xcodec2": {"quantization_dim": 64, "num_key_value_heads": 4},
    "neucodec": {"quantization_dim": 64, "num_key_value_heads": 4},
    "timm_backbone": {"backbone": "resnet10t", "out_indices": [1, 2, 3, 4]},
    "fast_vlm": {
        "vision_config.architecture": "fastvit_t8",
        "vision_config.model_args": {"inference_mode": True, **_TIMM_STAGES},
        "vision_config.hidden_size": 128,
    },
    "perception_lm": _at("vision_config", _TIMM_VIT),
    "pe_video": {
        **_at("vision_config", _TIMM_VIT),
        **_at("video_config.vision_config", _TIMM_VIT),
    },
    "pe_audio_video": {
        **_at("video_config.vision_config", _TIMM_VIT),
        **_at("audio_video_config.video_config.vision_config", _TIMM_VIT),
    },
    "edgetam": {
        "backbone_config.architecture": "repvit_m0_9",
        "vision_config.backbone_config.architecture": "repvit_m0_9",
    },
    "autoformer": {**_SERIES, "num_time_features": 2, "moving_average": 3},
    "bailing_hybrid": _EXPERTS,
    "bridgetower": {
        "hidden_size": 64,
        "text_config.hidden_size": 64,
        "vision_config.hidden_size": 64,
    },
    "chmv2": _BACKBONE,
    "chameleon": {
        "vocabulary_map": {"<image>": 80, "IMGIMGAZ": 81, "IMGIMGBZ": 82},
        "vq_config.base_channels": 32,
    },
    "cohere_compass": {
        "text_config.rope_parameters": _ROPE_BY_KIND,
        "rope_parameters": _ROPE_BY_KIND,
    },
    "cvt": {"depth": [1, 2, 3]},
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 64, "hidden_size": 128},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "decision_transformer": {"state_dim": 6, "act_dim": 3},
    "depth_anything": _BACKBONE,
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "vision_config.sam_config.downsample_channels": [16, 32],
    },
    "deepseek_v2": _EXPERTS,
    "depth_pro": {"intermediate_hook_ids": [1, 0]},
    "dia": {
        "decoder_config.cross_num_key_value_heads": 4,
        "decoder_config.cross_num_attention_heads": 4,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 24,
    },
    "dots1": {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320},
    "ernie4_5_vl_moe": {
        name: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        for name in ("rope_parameters", "text_config.rope_parameters")
    },
    "deepseek_vl_hybrid": {"high_res_vision_config.global_attn_indexes": [1]},
    "pp_ocrv5_server_det": {
        **_DETECTED_TEXT,
        "backbone_config.stage_in_channels": [48, 16, 64, 128],
    },
    "pp_ocrv6_medium_det": {
        **_DETECTED_TEXT,
        **_LCNET,
    },
    "pp_ocrv6_small_det": {
        **_LCNET,
        "layer_list_out_channels": [96, 96, 192, 384],
    },
    "vibevoice_asr": {
        f"{part}.{name}": value
        for part in ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
        for name, value in _SOUNDS.items()
    },
    "esm": {"vocab_size": 100, "mask_token_id": 32, "pad_token_id": 1},
    "esmc": {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "granite_speech5": {"encoder_config.num_key_value_heads": 4},
    "informer": {**_SERIES, "num_time_features": 2},
    "kosmos2": {"latent_query_num": 4},
    "led": {"attention_window": [8, 8]},
    "kyutai_speech_to_text": {
        "num_codebooks": 4,
        "codec_config.upsample_groups": 32,
        "codec_config.num_filters": 8,
    },
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "kimi_linear": {"num_experts_per_token": 2, "num_experts_per_tok": 2},
    "lfm2_moe": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts_per_tok": 2,
    },
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "longcat_flash": {"qk_head_dim": 16, "zero_expert_num": 4},
    "lw_detr": {
        "backbone_config.out_features": ["stage1", "stage2"],
        "projector_scale_factors": [1.0],
    },
    "mamba2": {"hidden_size": 32, "expand": 2, "num_heads": 4, "head_dim": 16, "n_groups": 2},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 16},
    "neomme": {"head_dim": 32},
    "perceiver": {
        "d_latents": 32,
        "d_model": 32,
        "max_position_embeddings": 16,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "qk_channels": 32,
        "v_channels": 32,
    },
    "sam3_tracker": {"vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "sam2": {f"backbone_config.{name}": value for name, value in _HIERA.items()} | _FPN,
    "vibevoice_acoustic_tokenizer": {
        "num_filters": 4,
        "downsampling_ratios": [2, 2, 4],
        "depths": [1] * 4,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "n_groups": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
    },
    "nemotron_h_omni": {
        "text_config.layers_block_type": ["linear_attention", "full_attention", "moe"],
        "text_config.n_groups": 2,
        "text_config.mamba_num_heads": 4,
        "text_config.mamba_head_dim": 16,
    },
    "prompt_depth_anything": _BACKBONE,
    "qwen4_exp": {
        f"text_config.{name}": value
        for name, value in {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }.items()
    },
    "rf_detr": {"backbone_config.out_features": ["stage1", "stage2"]},
    "radio": {"patch_dim": 192},
    "sapiens2": {
        "head_config.upsample_out_channels": [16, 16],
        "head_config.upsample_kernel_sizes": [4, 4],
        "head_config.conv_out_channels": [16],
        "head_config.conv_kernel_sizes": [3],
        "num_key_value_heads_per_layer": [4, 4],
    },
    "seggpt": {"image_size": [64, 32], "pretrain_image_size": 32, "patch_size": 8},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 5, "no_token_index": 6},
    "switch_transformers": {"num_experts": 2, "expert_capacity": 16},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "textnet": {"stem_out_channels": 16, "image_size": [32, 32]},
    "time_series_transformer": {**_SERIES, "num_time_features": 2},
    "tipsv2_dpt": _BACKBONE,
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "vitmatte": {
        "backbone_config.out_features": ["stage2"],
        "backbone_config.num_channels": 4,
        "backbone_config.patch_size": 16,
    },
    "vitpose": {"backbone_config.out_features": ["stage2"]},
    "vitpose_backbone": {"out_features": ["stage2"]},
    "vits": {"vocab_size": 100},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID,
    "zamba2": {**_HYBRID, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1},
    "zoedepth": {**_BACKBONE, "bottleneck_features": 32},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4)},
}
"""Settings by folder. A dot leads to a part of the config."""


def _past(config: Any) -> dict[str, Any]:
    length = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.rand(BATCH, length) + 1,
        "past_time_features": torch.rand(BATCH, length, 2),
        "past_observed_mask": torch.ones(BATCH, length),
        "future_values": torch.rand(BATCH, config.prediction_length) + 1,
        "future_time_features": torch.rand(BATCH, config.prediction_length, 2),
    }


def _decisions(config: Any) -> dict[str, Any]:
    shape = (BATCH, 6)
    return {
        "states": torch.randn(*shape, config.state_dim),
        "actions": torch.randn(*shape, config.act_dim),
        "rewards": torch.randn(*shape, 1),
        "returns_to_go": torch.randn(*shape, 1),
        "timesteps": torch.arange(6).repeat(BATCH, 1),
        "attention_mask": torch.ones(shape, dtype=torch.long),
    }


def _actions(config: Any) -> dict[str, Any]:
    shape = (BATCH, config.chunk_size, config.max_action_dim)
    text = torch.randint(3, 80, (BATCH, 40))
    text[:, :32] = config.vlm_config.image_token_index
    return {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "pixel_values": torch.rand(BATCH, 2, 3, 32, 32),
        "pixel_attention_mask": torch.ones(BATCH, 2, dtype=torch.bool),
        "state": torch.randn(BATCH, config.max_state_dim),
        "actions": torch.randn(shape),
        "noise": torch.randn(shape),
        "timestep": torch.rand(BATCH),
    }


def _visual(config: Any) -> dict[str, Any]:
    return {
        "visual_feats": torch.randn(BATCH, 5, config.visual_feat_dim),
        "visual_pos": torch.rand(BATCH, 5, config.visual_pos_dim),
    }


def _pairs(config: Any) -> dict[str, Any]:
    return {"pixel_values": torch.rand(BATCH, 2, 3, 64, 64)}


def _half_sound(config: Any) -> dict[str, Any]:
    """Texts of which every second token stands for sound."""
    text = torch.randint(3, 79, (BATCH, 16))
    text[:, ::2] = config.audio_token_id
    return {"input_ids": text}


def _parts_of_images(config: Any) -> dict[str, Any]:
    """Four parts of an image, and all of it."""
    return {
        "pixel_values": torch.rand(BATCH, 5, 3, 32, 32),
        "image_sizes": torch.tensor([[64, 64]] * BATCH),
    }


def _flat_patches(config: Any) -> dict[str, Any]:
    # [B, patches, 2 + features]: the row and the column of each patch come first.
    places = torch.arange(1.0, 9.0).view(1, 8, 1).repeat(BATCH, 1, 2)
    size = config.vision_config.patch_embed_hidden_size
    return {"flattened_patches": torch.cat([places, torch.randn(BATCH, 8, size)], -1)}


def _spoken(config: Any) -> dict[str, Any]:
    """Texts of 6 sounds, each of which lasts for 2 to 3 frames."""
    durations = torch.tensor([2, 3, 2, 3, 2, 3]).repeat(BATCH, 1)
    frames = int(durations[0].sum())
    return {
        "input_ids": torch.randint(3, 70, (BATCH, 6)),
        "attention_mask": torch.ones(BATCH, 6, dtype=torch.long),
        "duration_labels": durations,
        "spectrogram_labels": torch.randn(BATCH, frames, config.num_mel_bins),
        "pitch_labels": torch.randn(BATCH, 6, 1),
        "energy_labels": torch.randn(BATCH, 6, 1),
    }


def _retrieved(config: Any) -> dict[str, Any]:
    """Documents that belong to each question, with their scores."""
    documents = (BATCH * config.n_docs, 16)
    return {
        "context_input_ids": torch.randint(3, 80, documents),
        "context_attention_mask": torch.ones(documents, dtype=torch.long),
        "doc_scores": torch.randn(BATCH, config.n_docs),
    }


def _codebooks(config: Any) -> dict[str, Any]:
    """Sounds as ids, one row for each of the codebooks of each sample."""
    rows = BATCH * getattr(config, "decoder", config).num_codebooks
    return {"input_ids": torch.randint(3, 80, (rows, 16)), "attention_mask": None, "labels": None}


def _seen_twice(config: Any) -> dict[str, Any]:
    """Images in two resolutions, and texts with a place for each of their 16 patches."""
    text = torch.randint(3, 80, (BATCH, 22))
    text[:, 2:18] = config.image_token_id
    return {
        "input_ids": text,
        "high_res_pixel_values": torch.rand(BATCH, 3, 32, 32),
        "labels": torch.where(text == config.image_token_id, -100, text),
    }


def _shared_keys(config: Any) -> dict[str, Any]:
    """What the model that is assisted knows of 16 tokens: keys and values by kind of layer."""
    text = config.text_config
    shape = (BATCH, text.num_key_value_heads, 16, text.hidden_size // text.num_attention_heads)
    return {
        "input_ids": None,
        "inputs_embeds": torch.randn(BATCH, 16, 2 * config.backbone_hidden_size),
        "position_ids": torch.arange(16).repeat(BATCH, 1),
        "shared_kv_states": {
            kind: (torch.randn(shape), torch.randn(shape)) for kind in set(text.layer_types)
        },
    }


def _sound_and_spectrogram(config: Any) -> dict[str, Any]:
    """Sounds of five frames, and as many frames of their spectrograms."""
    frames = 5
    samples = frames * math.prod(config.downsampling_ratios)
    return {
        "input_values": torch.randn(BATCH, 1, samples),
        "input_features": torch.randn(
            BATCH, frames, config.semantic_model_config.feature_projection_input_dim
        ),
        "padding_mask": None,
        "input_features_mask": None,
    }


ARGUMENTS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "deepseek_vl_hybrid": _seen_twice,
    "gemma4_unified_assistant": _shared_keys,
    "audio_spectrogram_transformer": lambda c: {
        "input_values": torch.randn(BATCH, c.max_length, c.num_mel_bins)
    },
    "autoformer": _past,
    "decision_transformer": _decisions,
    "dia": lambda c: {
        "decoder_input_ids": None,
        "labels": None,
    },
    "efficientloftr": _pairs,
    "fun_asr_nano": lambda c: {
        "input_features": torch.randn(
            BATCH, 64, c.audio_config.num_mel_bins * c.audio_config.num_stacked_frames
        ),
        "input_features_mask": torch.ones(BATCH, 64, dtype=torch.long),
    },
    "fuyu": lambda c: {"pixel_values": None},
    "granite_speech5": lambda c: {
        "input_features": torch.randn(BATCH, 16, 64),
        "attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
    },
    "granite_speech": lambda c: {
        "input_features": torch.randn(BATCH, 16, c.encoder_config.input_dim),
        "input_features_mask": None,
    },
    "granite_speech_plus": lambda c: {
        "input_features": torch.randn(BATCH, 16, c.encoder_config.input_dim),
        "input_features_mask": None,
    },
    "chameleon": lambda c: {"pixel_values": None},
    "fastspeech2_conformer": _spoken,
    "nemotron_h_omni": lambda c: {"pixel_values": None, "input_features": None},
    "pp_ocrv5_server_det": lambda c: {"pixel_values": torch.rand(BATCH, 3, 64, 64)},
    "pp_ocrv5_mobile_rec": lambda c: {"pixel_values": torch.rand(BATCH, 3, 96, 64)},
    "rag": _retrieved,
    "neucodec": _sound_and_spectrogram,
    "xcodec": lambda c: {"input_values": torch.randn(BATCH, 1, 1600)},
    "xcodec2": _sound_and_spectrogram,
    "vibevoice_acoustic_tokenizer": lambda c: {"input_values": torch.randn(BATCH, 1, 1600)},
    "higgs_audio_v2": _half_sound,
    "idefics": lambda c: {
        "pixel_values": torch.rand(BATCH, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(BATCH, 16, 1, dtype=torch.long),
    },
    "informer": _past,
    "kyutai_speech_to_text": lambda c: {
        "input_ids": torch.randint(3, 80, (BATCH, 16, c.num_codebooks + 1)),
        "labels": None,
    },
    "kosmos2": lambda c: {
        "image_embeds_position_mask": ((torch.arange(16) > 1) & (torch.arange(16) < 6)).repeat(
            BATCH, 1
        )
    },
    "lfm2_vl": lambda c: {"spatial_shapes": torch.tensor([[4, 4], [2, 4]] * (BATCH // 2))},
    "lightglue": _pairs,
    "llava": lambda c: {"image_sizes": None},
    "llava_next": _parts_of_images,
    "llava_next_video": _parts_of_images,
    "llava_onevision": _parts_of_images,
    "lxmert": _visual,
    "muse_glimmer_assistant": lambda c: {
        "noise_embeds": torch.randn(BATCH, 4, c.hidden_size),
        "context_hidden_states": torch.randn(BATCH, 8, 2 * c.hidden_size),
    },
    "nemotron3_5_asr": lambda c: {"labels": None},
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
    "neomme": lambda c: {"pixel_values": None},
    "pe_audio": lambda c: {"input_values": torch.randn(BATCH, 1, 3840)},
    "pe_audio_video": lambda c: {"input_values": torch.randn(BATCH, 1, 3840)},
    "oneformer": lambda c: {"task_inputs": torch.randint(3, 80, (BATCH, c.task_seq_len))},
    "pi0": _actions,
    "pix2struct": _flat_patches,
    "seggpt": lambda c: {
        name: torch.rand(BATCH, 3, c.image_size[0] // 2, c.image_size[1])
        for name in ("pixel_values", "prompt_pixel_values", "prompt_masks", "labels")
    },
    "shieldgemma2": lambda c: {"labels": None},
    "speech_encoder_decoder": lambda c: {"input_features": None},
    "superglue": _pairs,
    "vitmatte": lambda c: {"pixel_values": torch.rand(BATCH, 4, 32, 32), "labels": None},
    "time_series_transformer": _past,
    "pop2piano": lambda c: {"input_features": None},
}
"""Arguments by folder, made from the config; without those that are ``None``."""
