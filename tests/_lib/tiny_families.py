"""Tiny models of transformers, with inputs for them, by a recipe that knows names of settings and
not single models.

A model's default config is made small by :data:`SMALL`, a table of setting names and sizes; the
arguments of ``forward`` are made by name, too. The recipe does not reach every model: what it makes
may fail on one device, and the caller finds out.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
import transformers
from family_settings import ARGUMENTS, BATCH, SETTINGS
from torch import Tensor, nn

LENGTH, VOCAB = 16, 100
WIDTH, HEADS, HEAD_DIM = 32, 4, 8
MOST_PIXELS = 64
"""The most rows or columns of an image whose two sizes a setting tells."""
FIRST_SPECIAL = 80
"""Ids from here on stand for images, sounds and the like; text has smaller ones."""

PREFERRED = (
    "ForConditionalGeneration",
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForImageClassification",
    "ForSequenceClassification",
    "ForAudioClassification",
    "ForCTC",
    "ForVideoClassification",
    "ForObjectDetection",
    "ForSemanticSegmentation",
    "ForDepthEstimation",
    "ForUniversalSegmentation",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForPrediction",
    "ForPreTraining",
    "ForMaskedImageModeling",
    "ForTextToSpeech",
    "ForSpeechToText",
)
"""Which class of a folder is taken: the first of these that a name has, else the first model there
is.
"""

SMALL: tuple[tuple[str, Any], ...] = (
    (r"vocab_size|num_embeddings|entity_vocab_size|vocab_size_or_config_json_file", VOCAB),
    (r"(num_)?(key_value_heads|kv_heads|kv_head|multi_query_groups)|num_query_groups", 2),
    (r"num_key_value_heads|n_kv_heads|swa_num_key_value_heads", 2),
    (r".*(num_attention_heads|attention_heads|n_heads?|num_heads|n_head|num_head)", HEADS),
    (
        r"head_dim|swa_head_dim|global_head_dim|v_head_dim|linear_key_head_dim|linear_value_head_dim|d_kv|attention_head_dim",
        HEAD_DIM,
    ),
    (
        r"qk_nope_head_dim|qk_rope_head_dim|qk_head_dim|index_head_dim|rope_head_dim|nope_head_dim",
        HEAD_DIM,
    ),
    (r"rotary_dim|rotary_ndims", HEAD_DIM),
    (r"num_kv_shared_layers", 0),
    (r"vocab_size_per_layer_input", VOCAB),
    (r"hidden_size_per_layer_input", HEAD_DIM),
    (r".*_lora_rank|lora_rank|.*_low_rank|lora_dim", 16),
    (
        r"moe_intermediate_size|shared_expert_intermediate_size|expert_intermediate_size|expert_ffn_dim|expert_hidden_size",
        24,
    ),
    (
        r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|intermediate_dim|mlp_dim|feed_forward_size)",
        48,
    ),
    (r"(word_|char_)?embedding_size|embed_dim|emb_dim|d_embed|decoder_embed_dim|n_embed", WIDTH),
    (
        r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|dim|width|projection_dim|hidden_channels|proj_size|output_size)",
        WIDTH,
    ),
    (
        r"(.*_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth|num_blocks|layers)",
        2,
    ),
    (
        r"num_experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k_experts|experts_per_token|moe_top_k",
        2,
    ),
    (r"(num_|n_routed_|num_local_|moe_num_|n_)experts|num_routed_experts|moe_num_experts", 4),
    (r"n_group|topk_group|num_expert_group|num_groups_moe", 1),
    (
        r"max_position_embeddings|n_positions|max_sequence_length|max_seq_len|max_length_positions",
        128,
    ),
    (r"image_size|input_size|img_size|resolution", 32),
    (r"patch_size|patch_height|patch_width", 8),
    (r"num_mel_bins|num_mels|feature_size_mel|n_mels|input_feat_per_channel", 16),
    (r"max_source_positions", 16),
    (r"num_queries|num_object_queries|num_query_tokens|num_latents|num_learnable_queries", 8),
    (r"mamba_(expand)|expand", 2),
    (r"mamba_d_state|state_size|d_state|ssm_state_size", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_n_heads|mamba_num_heads", 4),
    (r"chunk_size|mamba_chunk_size|attention_chunk_size", 8),
    (r"sliding_window|window_size_text|local_attention_window", 8),
    (r"relative_attention_num_buckets|position_buckets", 8),
    (r"num_frames|frames_per_clip", 4),
)
"""Settings whose names match an expression as a whole get the value, if it is smaller than
theirs.
"""

_PATTERNS = tuple((re.compile(expression), value) for expression, value in SMALL)
_WIDTH_LISTS = re.compile(
    r".*(hidden_sizes|embed_dims?|dims|channels|widths|conv_dim|out_channels|neck_hidden_sizes|filters)"
)
_AMOUNTS = re.compile(
    r".*(vocab_size|num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth|num_queries|num_experts|position_buckets)"
)
"""Settings that are made small where widths are kept. Relative positions belong to no sample: a
layer that projects 512 of them for 4 short sounds does little else, and no batch of real sounds is
like that.
"""
_COUNTED = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS}
"""Settings that follow from others where they are not given."""
_RATES = re.compile(
    r"dropout|drop_path|drop_rate|layerdrop|_drop$|pdrop|jitter_noise|^mask_(time|feature)_prob$"
)
"""Settings of what happens at random."""
_DEPTH_LISTS = re.compile(r"(.*_)?(depths?|layer_repeats|stage_repeats|num_blocks|encoder_layers)")


def classes_of(module: ModuleType) -> list[type[nn.Module]]:
    """The models that a modeling file of transformers exports and that have a config."""
    found = (getattr(module, name, None) for name in getattr(module, "__all__", ()))
    return [
        model
        for model in found
        if inspect.isclass(model)
        and issubclass(model, transformers.PreTrainedModel)
        and model.__module__ == module.__name__
        and not model.__name__.endswith("PreTrainedModel")
        and getattr(model, "config_class", None) is not None
    ]


def place(name: str) -> int:
    """How early a class comes in :data:`PREFERRED`."""
    return next((index for index, word in enumerate(PREFERRED) if word in name), len(PREFERRED))


# configs


def tiny_config(model: type[nn.Module], *, narrow: bool = True) -> Any:
    """The model's default config, made small; parts of it too. Without ``narrow`` it keeps its
    widths, and is not as deep.
    """
    by_hand = SETTINGS.get(_folder(model), {})
    config = _config_class(model)(**{k: v for k, v in by_hand.items() if "." not in k})
    _shrink(config, set(), narrow=narrow)
    for path, value in by_hand.items():
        *parts, name = path.split(".")
        part = config
        for step in parts:
            part = getattr(part, step, None)
        if part is not None:
            _set(part, name, value)
    _number_special_tokens(config)
    if type(getattr(config, "backbone_config", None)).__name__ == "TimmBackboneConfig":
        config.backbone_config = _resnet()
    if "image_grid_thw" in inspect.signature(model.forward).parameters or "Text" in model.__name__:
        for part in _parts(config):
            rope = getattr(part, "rope_parameters", None)
            if isinstance(rope, dict) and narrow and "rope_parameters" not in by_hand:
                _set(part, "rope_parameters", {**rope, "mrope_section": _sections(rope)})
    return config


def _folder(model: type[nn.Module]) -> str:
    """The folder of transformers that a model comes from."""
    return model.__module__.split(".")[-2]


def _resnet() -> transformers.PreTrainedConfig:
    """A backbone that needs no other library."""
    stages = ["stage2", "stage3", "stage4"]
    sizes = [16, 16, 32, 32]
    return transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=sizes,
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=stages,
    )


def _config_class(model: type[nn.Module]) -> Any:
    """The config that the constructor says it takes, which may be a part of the folder's own."""
    parameter = next(iter(list(inspect.signature(model.__init__).parameters.values())[1:]), None)
    hints = model.config_class
    if parameter is not None and inspect.isclass(parameter.annotation):
        hints = parameter.annotation
    elif parameter is not None and isinstance(parameter.annotation, str):
        hints = getattr(transformers, parameter.annotation, hints)
    return (
        hints
        if isinstance(hints, type) and issubclass(hints, transformers.PreTrainedConfig)
        else model.config_class
    )


def _shrink(config: Any, seen: set[int], *, narrow: bool) -> None:
    if id(config) in seen:
        return
    seen.add(id(config))
    settings = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    old_layers = next(
        (settings[key] for key in ("num_hidden_layers", "n_layer") if key in settings), None
    )
    for name, value in settings.items():
        if isinstance(value, transformers.PreTrainedConfig):
            _shrink(value, seen, narrow=narrow)
        elif isinstance(value, list | tuple) and value and value != []:
            if narrow or not _WIDTH_LISTS.fullmatch(name):
                _set(config, name, _small_list(name, list(value), old_layers))
        elif value is None and name in _COUNTED and narrow:
            _set(config, name, _COUNTED[name])
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int) and (narrow or _AMOUNTS.fullmatch(name)):
            _set(config, name, _small_number(name, value))
        elif isinstance(value, float) and _RATES.search(name):
            _set(config, name, 0.0)
        elif isinstance(value, dict) and "mrope_section" in value and narrow:
            _set(config, name, {**value, "mrope_section": _sections(value)})
    # All heads have keys of their own, made of one latent.
    if narrow and "kv_lora_rank" in settings:
        _set(config, "num_key_value_heads", HEADS)
    for name in ("use_cache", "apply_spec_augment"):
        if settings.get(name) is True:
            _set(config, name, False)


def without_chance(config: Any) -> None:
    """Turn off what happens at random, in a config and its parts."""
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and _RATES.search(name):
                _set(part, name, 0.0)


def _small_number(name: str, value: int) -> int:
    for pattern, small in _PATTERNS:
        if pattern.fullmatch(name):
            return min(value, small)
    return value


def _small_list(name: str, value: list[Any], old_layers: int | None) -> list[Any]:
    numbers = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if numbers and name.endswith(("num_heads", "attention_heads")):
        return [2] * len(value)
    if numbers and re.fullmatch("image_size|input_size|img_size", name):
        return [min(item, MOST_PIXELS) for item in value]
    if numbers and _DEPTH_LISTS.fullmatch(name):
        return [1] * len(value)
    if numbers and _WIDTH_LISTS.fullmatch(name) and min(value) >= 16:
        return [max(8, item * 16 // min(value) // 8 * 8) for item in value]
    if old_layers is not None and len(value) == old_layers and old_layers > 2:
        kinds = list(dict.fromkeys(map(repr, value)))
        firsts = [value[[repr(item) for item in value].index(kind)] for kind in kinds][:2]
        return (firsts * 2)[:2]
    return value


def _sections(rope: Mapping[str, Any]) -> list[int]:
    """Sections of a rotary embedding of three positions, for heads of :data:`HEAD_DIM`."""
    turned = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    return [turned - 2, 1, 1] if turned > 2 else [turned - 1, 1, 0]


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a setting that follows from others
        return


def _number_special_tokens(config: Any) -> None:
    """Give ids of special tokens places in the small vocabulary, the same in all parts of the
    config.
    """
    places: dict[str, int] = {}
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            if not (
                name.endswith(("_token_id", "_token_index", "_token_ids"))
                and isinstance(value, int)
            ):
                continue
            if name in (
                "pad_token_id",
                "bos_token_id",
                "eos_token_id",
                "decoder_start_token_id",
                "sep_token_id",
            ):
                if value >= FIRST_SPECIAL:
                    _set(part, name, {"pad_token_id": 0, "bos_token_id": 1}.get(name, 2))
                continue
            word = name.rpartition("_token_")[0]
            _set(part, name, places.setdefault(word, FIRST_SPECIAL + len(places)))


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _parts(value)


# inputs


def working_inputs(model: Any, *, mask: bool = True, labels: bool = True) -> dict[str, Any]:
    """Arguments that ``model.forward`` takes, of all :data:`FORMS` the first that it takes. Raises
    what the first one met.
    """
    errors: list[Exception] = []
    for form in FORMS:
        try:
            given = tiny_inputs(model, form, mask=mask)
            if not labels:
                given.pop("labels", None)
            for _ in range(2):
                try:
                    with torch.no_grad():
                        model(**given)
                    return given
                except ValueError as error:  # says how many placeholders it wants
                    wanted = re.search(r"tokens: (\d+), features:? (\d+)", str(error))
                    token = _find(
                        model.config,
                        "image_token_id",
                        "audio_token_id",
                        "image_token_index",
                        "audio_token_index",
                    )
                    if wanted is None or token is None:
                        raise
                    given |= _placed([int(wanted[2]) // BATCH] * BATCH, token, given)
        except Exception as error:
            errors.append(error)
    raise errors[0]


FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"audio": "bins first"},
    {"audio": "one channel"},
    {"images": "a list"},
    {"images": "large"},
    {"images": "frames"},
)
"""Forms of inputs that names do not tell: whether spectrograms count time or pitch first, and the
like.
"""


def tiny_inputs(
    model: Any, form: Mapping[str, Any] = FORMS[0], *, mask: bool = True
) -> dict[str, Any]:
    """Arguments for ``model.forward`` in training, made by the names of its parameters."""
    torch.manual_seed(1)
    config, signature = model.config, inspect.signature(model.forward).parameters
    names = {name for name in signature if name not in ("self", "kwargs", "args")}
    given: dict[str, Any] = {}
    if "input_ids" in names:
        given["input_ids"] = torch.randint(3, FIRST_SPECIAL - 1, (BATCH, LENGTH))
    if {"pixel_values", "image_grid_thw"} <= names:
        given |= _patches(config)
        names -= {"pixel_values", "pixel_values_videos"}
    elif {"pixel_values", "spatial_shapes"} <= names:
        given |= _flat_images(config)
        names -= {"pixel_values"}
    if "pixel_values" in names:
        names -= {"pixel_values_videos"}
    given |= {name: make(config) for name, make in MAKERS.items() if name in names}
    _in_form(config, given, form, names)
    by_hand = ARGUMENTS.get(_folder(type(model)))
    made = by_hand(config) if by_hand is not None else {}
    given |= made
    names -= {name for name, value in made.items() if value is None}
    given = {name: value for name, value in given.items() if value is not None and name in names}
    if "image_sizes" not in made and "image_sizes" in names and "pixel_values" in given:
        given["image_sizes"] = torch.tensor([list(given["pixel_values"].shape[-2:])] * BATCH)
    if "input_ids" in given:
        _place_features(model, given, names)
    if mask and "attention_mask" in names and "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    if {
        "token_type_ids",
        "pixel_values",
    } <= names and "input_ids" in given:  # a prompt, then what is learned
        given["token_type_ids"] = (
            (torch.arange(given["input_ids"].shape[1]) >= 8).long().repeat(BATCH, 1)
        )
    if "mm_token_type_ids" in names and "input_ids" in given:
        given["mm_token_type_ids"] = (given["input_ids"] >= FIRST_SPECIAL).long()
    _add_labels(model, given, names)
    return given


def _in_form(config: Any, given: dict[str, Any], form: Mapping[str, Any], names: set[str]) -> None:
    if form.get("audio") == "bins first" and "input_features" in given:
        given["input_features"] = given["input_features"].transpose(1, 2).contiguous()
        if "input_features_mask" in given:
            given["input_features_mask"] = torch.ones(
                BATCH, given["input_features"].shape[1], dtype=torch.long
            )
    if form.get("audio") == "one channel" and "input_values" in given:
        given["input_values"] = torch.randn(BATCH, 1, 1600)
    if form.get("images") == "a list" and "pixel_values" in given:
        given["pixel_values"] = pixels = given["pixel_values"][:, None].contiguous()
        if "pixel_attention_mask" in names:
            given["pixel_attention_mask"] = torch.ones(
                *pixels.shape[:2], *pixels.shape[-2:], dtype=torch.bool
            )
    if form.get("images") == "frames" and "pixel_values" in given:
        frames = _find(config, "num_frames", default=4)
        given["pixel_values"] = given["pixel_values"][:, None] + 0.1 * torch.rand(
            BATCH, frames, 1, 1, 1
        )
    if form.get("images") == "large" and "pixel_values" in given:
        given["pixel_values"] = torch.rand(*given["pixel_values"].shape[:-2], 64, 64)


def _find(config: Any, *names: str, default: Any = None) -> Any:
    """The first setting of these names in a config or its parts."""
    for name in names:
        for part in _parts(config):
            value = getattr(part, name, None)
            if value is not None and not isinstance(value, transformers.PreTrainedConfig):
                return value
    return default


def _part(config: Any, *names: str) -> Any:
    """The first part of these names that a config has, or the config itself."""
    return next(
        (part for name in names if (part := getattr(config, name, None)) is not None), config
    )


def _image(config: Any) -> Tensor:
    vision = _part(config, "vision_config", "image_config", "encoder")
    channels = _find(vision, "num_channels", "in_channels", "in_chans", default=3)
    size = _find(vision, "image_size", "img_size", default=32)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return torch.rand(BATCH, channels if isinstance(channels, int) else 3, height, width)


def _video(config: Any) -> Tensor:
    frames = _find(config, "num_frames", "frames_per_clip", default=4)
    return _image(config)[:, None] + 0.1 * torch.rand(BATCH, frames, 1, 1, 1)


def _patches(config: Any) -> dict[str, Tensor]:
    """Images of 4 x 4 and 4 x 8 patches, in one row after the other, and their grids."""
    vision = _part(config, "vision_config")
    size, frames = (
        _find(vision, "patch_size", default=8),
        _find(vision, "temporal_patch_size", default=1),
    )
    channels = _find(vision, "in_channels", "num_channels", default=3)
    grids = torch.tensor([[1, 4, 4], [1, 4, 8]] * (BATCH // 2))
    shape = (int(grids.prod(-1).sum()), channels * frames * size * size)
    return {"pixel_values": torch.rand(shape), "image_grid_thw": grids}


def _flat_images(config: Any) -> dict[str, Tensor]:
    """Images of 4 x 4 and 2 x 3 patches in rows of equal length, with masks and shapes."""
    vision = _part(config, "vision_config")
    size, channels = (
        _find(vision, "patch_size", default=8),
        _find(vision, "num_channels", default=3),
    )
    shapes = torch.tensor([[4, 4], [2, 3]] * (BATCH // 2))
    present = torch.arange(16)[None] < shapes.prod(-1, keepdim=True)
    pixels = torch.rand(BATCH, 16, channels * size * size) * present[..., None]
    return {"pixel_values": pixels, "pixel_attention_mask": present.int(), "spatial_shapes": shapes}


def _sound(config: Any) -> Tensor:
    audio_channels = _find(config, "audio_channels", "input_channels")
    return torch.randn(BATCH, *([audio_channels] if audio_channels else []), 1600)


def _spectrogram(config: Any) -> Tensor:
    audio = _part(config, "audio_config", "encoder_config")
    bins = _find(
        audio,
        "num_mel_bins",
        "feature_size",
        "n_mels",
        "input_dim",
        "input_feat_per_channel",
        default=16,
    )
    places = _find(audio, "max_source_positions")
    return torch.randn(BATCH, bins, 2 * places) if places else torch.randn(BATCH, 64, bins)


def _spectrogram_mask(config: Any) -> Tensor:
    features = _spectrogram(config)
    places = _find(_part(config, "audio_config", "encoder_config"), "max_source_positions")
    return torch.ones(BATCH, features.shape[2 if places else 1], dtype=torch.long)


def _series(config: Any) -> Tensor:
    length = _find(config, "context_length", default=16)
    channels = _find(config, "num_input_channels")
    lags = max(_find(config, "lags_sequence", default=[0]) or [0])
    return torch.randn(BATCH, length + lags, *([channels] if channels else []))


MAKERS = {
    "pixel_values": _image,
    "pixel_values_videos": _video,
    "input_values": _sound,
    "input_features": _spectrogram,
    "input_features_mask": _spectrogram_mask,
    "feature_attention_mask": _spectrogram_mask,
    "past_values": _series,
    "bbox": lambda config: torch.tensor([1, 2, 5, 6]).repeat(BATCH, LENGTH, 1),
}
"""Arguments by name, made from the config."""


def _place_features(model: Any, given: dict[str, Any], names: set[str]) -> None:
    """Put as many placeholders into the text as the model makes features of images and sounds."""
    for method, sources, word in (
        (
            "get_image_features",
            (
                "pixel_values",
                "image_grid_thw",
                "image_sizes",
                "spatial_shapes",
                "pixel_attention_mask",
            ),
            "image",
        ),
        (
            "get_audio_features",
            ("input_features", "input_features_mask", "feature_attention_mask"),
            "audio",
        ),
    ):
        token = _find(model.config, f"{word}_token_id", f"{word}_token_index")
        get = getattr(model, method, None) or getattr(getattr(model, "model", None), method, None)
        if token is None or get is None or sources[0] not in given:
            continue
        try:
            with torch.no_grad():
                found = get(**{name: given[name] for name in sources if name in given})
        except TypeError:  # it wants something else, too
            continue
        found = found.pooler_output if hasattr(found, "pooler_output") else found
        rows = (
            sum(part.shape[:-1].numel() for part in found)
            if isinstance(found, list | tuple)
            else found.shape[:-1].numel()
        )
        counts = [rows // BATCH] * BATCH
        if isinstance(found, list | tuple) and len(found) == BATCH:
            counts = [part.shape[:-1].numel() for part in found]
        given |= _placed(counts, token, {})


def _placed(counts: list[int], token: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Texts with so many placeholders each, and what else of ``given`` is as long as a text."""
    text = torch.randint(3, FIRST_SPECIAL - 1, (BATCH, max(counts) + 6))
    for row, count in zip(text, counts, strict=True):
        row[2 : 2 + count] = token
    made: dict[str, Any] = {"input_ids": text}
    if "attention_mask" in given:
        made["attention_mask"] = torch.ones_like(text)
    if "token_type_ids" in given:
        made["token_type_ids"] = (torch.arange(text.shape[1]) >= 8).long().repeat(BATCH, 1)
    if "mm_token_type_ids" in given:
        made["mm_token_type_ids"] = (text >= FIRST_SPECIAL).long()
    if "labels" in given:
        made["labels"] = torch.where(text >= FIRST_SPECIAL, -100, text)
    return made


def _add_labels(model: Any, given: dict[str, Any], names: set[str]) -> None:
    config, name = model.config, type(model).__name__
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = torch.randint(3, FIRST_SPECIAL - 1, (BATCH, LENGTH // 2))
        if "labels" in names:
            given["labels"] = given["decoder_input_ids"].clone()
        return
    if "labels" not in names:
        return
    classes = _find(config, "num_labels", default=2)
    if "input_ids" in given and place(name) <= 3:
        given["labels"] = torch.where(given["input_ids"] >= FIRST_SPECIAL, -100, given["input_ids"])
    elif "TokenClassification" in name and "input_ids" in given:
        given["labels"] = torch.randint(0, classes, given["input_ids"].shape)
    elif "Classification" in name:
        given["labels"] = torch.randint(0, classes, (BATCH,))
    elif "CTC" in name:
        given["labels"] = torch.randint(3, 20, (BATCH, 3))


def working(
    model: type[nn.Module], *, mask: bool = True, labels: bool = True
) -> tuple[nn.Module, dict[str, Any]]:
    """The model small enough to run, and arguments that it runs with. Raises what the smallest one
    met if none runs.
    """
    errors: list[Exception] = []
    for narrow in (True, False):
        try:
            config = tiny_config(model, narrow=narrow)
            if (size := num_parameters(model, config)) > MOST_PARAMETERS:
                raise ValueError(f"{size} parameters are too many for a tiny model")
            made = built(model, config)
            return made, working_inputs(made, mask=mask, labels=labels)
        except Exception as error:
            errors.append(error)
    raise errors[0]


MOST_PARAMETERS = 25_000_000
"""The most parameters that a model may have to be tried."""


def num_parameters(model: type[nn.Module], config: Any) -> int:
    """How many numbers the model would have; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model(copy.deepcopy(config)).parameters())


_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d


def built(model: type[nn.Module], config: Any) -> nn.Module:
    """The model in training mode, with parameters that are not all zeros and ones, and without
    dropout.
    """
    torch.manual_seed(0)
    made = model(copy.deepcopy(config))
    for part in made.modules():
        if isinstance(
            part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout
        ):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and (
                "dropout" in name or name in ("layerdrop", "drop_prob")
            ):
                setattr(part, name, 0.0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(0.03 * noise.to(parameter.dtype))
        # Initial weights of 0.02 make what many convolutions pass on vanish (DEIMv2: 3e-11), and
        # batch norms then turn last bits into the seventh digit. These keep the size (He et al.
        # 2015, equation 10). Without norms between them residual blocks let values grow (DAC: to
        # 1e13), so there the weights stay.
        has_norms = any("BatchNorm" in type(part).__name__ for part in made.modules())
        for part in made.modules() if has_norms else ():
            weight = part._parameters.get("weight") if isinstance(part, _CONVOLUTIONS) else None
            if weight is not None:
                spread = math.sqrt(2 / max(1, weight[0].numel()))
                weight.copy_(spread * torch.randn(weight.shape, generator=generator))
    return made.train()
