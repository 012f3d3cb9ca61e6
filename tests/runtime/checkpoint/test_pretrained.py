"""Folders of transformers: written from checkpoints of any plan, read into any plan."""

import json

import checkpoints as c
import pytest
import torch
import transformers
from covers import spread
from torch import Tensor, nn

import shardwright
from shardwright.runtime.errors import CheckpointError

TP = ("tp", 2, 2)


def saved(name, directory):
    def train():
        trainer = c.trainer(name, TP)
        trainer.steps([0])
        shardwright.save_checkpoint(directory, trainer.module)

    c.on(name, TP, train)
    return shardwright.read_checkpoint(directory).module


@pytest.mark.parametrize(
    ("name", "max_file_bytes"),
    spread([("gpt2", 4000), ("llama-tied", None), ("bert", 4000), ("t5", 4000), ("vit", None)], 2),
)
def test_from_pretrained_reads_an_export(tmp_path, name, max_file_bytes):
    expected = saved(name, tmp_path / "run")
    model = c.model_of(name)
    out = shardwright.export_pretrained(
        tmp_path / "run", tmp_path / "out", model.config, max_file_bytes=max_file_bytes
    )
    loaded, info = type(model).from_pretrained(out, output_loading_info=True, dtype=torch.float64)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    c.assert_same(loaded.state_dict(), dict(expected))
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("name", spread(["gpt2", "llama-tied", "t5"], 2))
@pytest.mark.parametrize("size", ["50GB", "4KB"])
def test_a_parallel_module_reads_what_transformers_writes(tmp_path, name, size):
    model = type(c.model_of(name))(c.model_of(name).config).double()
    model.save_pretrained(tmp_path, max_shard_size=size)

    def load():
        trainer = c.trainer(name, TP)
        shardwright.load_pretrained(tmp_path, trainer.module)
        return trainer.module.state_dict()

    merged, _ = shardwright.merge_state_dicts(c.on(name, TP, load))
    c.assert_same(dict(merged), model.state_dict())


def test_other_names_and_configurations(tmp_path):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(c.model_of("gpt2").config)

    wrapped, other = Wrapped(), Wrapped()
    shardwright.save_checkpoint(tmp_path / "run", wrapped)
    config = {**wrapped.model.config.to_dict(), "architectures": ["GPT2LMHeadModel"]}
    out = tmp_path / "out"
    shardwright.export_pretrained(
        tmp_path / "run", out, config, rename=lambda name: name.removeprefix("model.")
    )
    loaded = transformers.GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32)
    expected = {k: v.float() for k, v in wrapped.model.state_dict().items()}
    c.assert_same({k: v for k, v in loaded.state_dict().items() if isinstance(v, Tensor)}, expected)
    shardwright.load_pretrained(out, other, rename=lambda name: name.removeprefix("model."))
    c.assert_same(other.state_dict(), wrapped.state_dict())
    again = shardwright.export_pretrained(tmp_path / "run", tmp_path / "again", out)
    assert json.loads((again / "config.json").read_text()) == json.loads(
        (out / "config.json").read_text()
    )
    with pytest.raises(CheckpointError) as error:
        shardwright.load_pretrained(out, other)
    assert "'model.transformer.wte.weight' is missing" in str(
        error.value
    ) and "pass rename=" in str(error.value)


def test_what_does_not_fit_is_named(tmp_path):
    model = c.model_of("gpt2")
    model.save_pretrained(tmp_path / "gpt2")

    def load():
        shardwright.load_pretrained(tmp_path / "gpt2", c.trainer("gpt2-uneven", TP).module)

    with pytest.raises(
        CheckpointError, match=r"'transformer.wte.weight' is \[32, 16\] there and \[37, 12\] here"
    ):
        c.on("gpt2-uneven", TP, load)
    with pytest.raises(CheckpointError, match="'transformer.wte.weight' is not in the module"):
        net = nn.Module()
        net.transformer = model.transformer.h
        shardwright.load_pretrained(
            tmp_path / "gpt2",
            net,
            rename=lambda name: name.replace("transformer.", "transformer.h."),
        )
    with pytest.raises(
        CheckpointError,
        match=r"holds no weights\n.*neither model.safetensors nor model.safetensors.index.json",
    ):
        shardwright.load_pretrained(tmp_path, model)
    with pytest.raises(CheckpointError, match="a int is no configuration"):
        shardwright.save_checkpoint(tmp_path / "run", model)
        shardwright.export_pretrained(tmp_path / "run", tmp_path / "out", 3)
    with pytest.raises(CheckpointError, match="rename gives several tensors the name 'x'"):
        shardwright.export_pretrained(
            tmp_path / "run", tmp_path / "out", {}, rename=lambda name: "x"
        )
