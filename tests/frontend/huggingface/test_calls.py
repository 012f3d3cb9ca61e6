"""Which calls share a program, and which dims vary."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from initialized import make
from transformers.modeling_outputs import BaseModelOutput

from shardwright.frontend.huggingface.calls import Call, default_arguments, given_arguments
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, InputError

CONFIG = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)


def call(model: Any, **arguments: Any) -> Call:
    return Call.of(model, arguments, torch.device("cpu"), CONFIG, names_dims=False)


def ids(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


def test_sizes_of_batch_and_sequence_make_no_difference() -> None:
    model = make("gpt2")
    one = call(model, input_ids=ids(3, 7), attention_mask=ids(3, 7), labels=ids(3, 7))
    other = call(model, input_ids=ids(1, 1), attention_mask=ids(1, 1), labels=ids(1, 1))
    assert one.key == other.key
    assert set(map(str, one.dims.values())) == {"{0: 'batch', 1: 'seq'}"}
    shapes = [tuple(example.shape) for example in one.examples().values()]
    assert shapes == [tuple(example.shape) for example in other.examples().values()]


def test_other_names_dtypes_values_and_settings_are_other_calls() -> None:
    model = make("gpt2")
    calls = [
        call(model, input_ids=ids(3, 7)),
        call(model, input_ids=ids(3, 7), attention_mask=ids(3, 7)),
        call(model, input_ids=ids(3, 7), attention_mask=ids(3, 7).bool()),
        call(model, input_ids=ids(3, 7), use_cache=False),
        # One row of positions for all samples: its dim 0 is no batch.
        call(model, input_ids=ids(3, 7), position_ids=ids(1, 7)),
        call(model, input_ids=ids(3, 7), position_ids=ids(3, 7)),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        calls.append(call(model, input_ids=ids(3, 7)))
    model.config.use_cache = False
    calls.append(call(model, input_ids=ids(3, 7)))
    assert len({one.key for one in calls}) == len(calls)


def test_an_encoder_decoder_has_two_lengths() -> None:
    model = make("t5")
    train = call(model, input_ids=ids(3, 7), attention_mask=ids(3, 7), labels=ids(3, 7))
    assert train.dims["labels"] == {0: "batch", 1: "target_seq"}
    assert train.dims["attention_mask"] == {0: "batch", 1: "seq"}
    outputs = BaseModelOutput(last_hidden_state=torch.zeros(3, 7, 16))
    decode = call(
        model, encoder_outputs=outputs, attention_mask=ids(3, 7), decoder_input_ids=ids(3, 1)
    )
    assert decode.dims == {
        "encoder_outputs.last_hidden_state": {0: "batch", 1: "seq"},
        "attention_mask": {0: "batch", 1: "seq"},
        "decoder_input_ids": {0: "batch", 1: "target_seq"},
    }
    assert decode.examples()["encoder_outputs"].last_hidden_state.shape == (2, 6, 16)


def test_what_is_compiled_when_nobody_says_it() -> None:
    shapes = {
        name: {key: tuple(x.shape) for key, x in found.items()}
        for name in ("bert", "t5")
        if (found := default_arguments(make(name), with_labels=True))
    }
    assert shapes["bert"] == dict.fromkeys(("input_ids", "attention_mask", "labels"), (2, 6))
    assert shapes["t5"]["labels"] == (2, 10)
    assert "decoder_input_ids" in default_arguments(make("t5"), with_labels=False)
    vit = transformers.ViTModel(
        transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ConfigError, match="ViTModel takes no input_ids, so its call is not known"):
        default_arguments(vit, with_labels=True)


def test_arguments_by_name() -> None:
    signature = inspect.signature(make("gpt2").forward)
    tokens = ids(1, 2)
    given = given_arguments(signature, (tokens, None), {"use_cache": False, "more": 1})
    assert given == {"input_ids": tokens, "use_cache": False, "more": 1}
    with pytest.raises(InputError, match="forward cannot be called so: multiple values"):
        given_arguments(signature, (tokens,), {"input_ids": tokens})
