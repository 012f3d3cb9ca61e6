"""Folders that have experts one by one, read into modules that have all of them in one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import expert_models
import pytest
from parity import assert_close_tree
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from traces import shared_traces

import shardwright
from shardwright.frontend.huggingface.model_folders import load_whole
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.checkpoint.stacked_experts import parts_of
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks

slow = pytest.mark.slow
CONFIG = ComputeConfig(
    plan_ngpus=4, runtime_ngpus=4, pas_config={"ep": 2, "etp": 2}, outputs="loss"
)


def read(name: str, model: nn.Module, source: Path, files: Path) -> dict[str, Tensor]:
    """What four ranks read from a folder, merged; the model that is compiled has other values."""
    entry = expert_models.get(name)
    with shared_traces(f"experts {name} {{}}"):
        compiled = compile_into(files, entry.build(), entry.inputs(), "ep", CONFIG)

    def rank(_: int) -> Any:
        program = load_class(compiled)(init_params=False)
        load_whole(model, program, source)
        return program.state_dict()

    merged, _ = shardwright.merge_state_dicts(run_ranks(4, rank))
    return dict(merged)


def folder_of(name: str, folder: Path) -> nn.Module:
    """A model of other values than the entry's, as save_pretrained writes it."""
    model: Any = expert_models.get(name).build()
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.mul_(1.25).add_(0.125)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        *(
            pytest.param(name, marks=slow)
            for name in ("qwen3_moe", "deepseek_v3", "glm4_moe", "jamba", "nemotron_h", "lfm2_moe",
                         "ernie4_5_moe", "phimoe", "minimax", "olmoe", "dots1", "gpt_oss",
                         "longcat_flash")
        ),
    ],
)  # fmt: skip
def test_ranks_read_experts_that_were_written_one_by_one(name: str, tmp_path: Path) -> None:
    model = folder_of(name, tmp_path / "base")
    found = read(name, model, tmp_path / "base", tmp_path / "files")
    assert_close_tree(found, dict(model.state_dict()), "values")


def test_experts_that_are_missing_or_too_many_are_refused(tmp_path: Path) -> None:
    model = folder_of("mixtral", tmp_path / "base")
    (file,) = (tmp_path / "base").glob("*.safetensors")
    tensors = load_file(file)
    last = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
    more = {last.replace("experts.5", "experts.6"): tensors[last].clone()}
    for changed, text in (
        ({key: x for key, x in tensors.items() if key != last}, "gate_up_proj' is missing"),
        (tensors | more, "experts.6.w3.weight' is not in the module"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=text):
            read("mixtral", model, tmp_path / "base", tmp_path / "files")


def test_parts_fill_the_stacked_tensor() -> None:
    shapes = {f"experts.{index}.{part}.weight": (3, 4) for index in range(2) for part in "ab"}
    named = {
        f"mlp.experts.{index}.{ours}.weight": f"experts.{index}.{theirs}.weight"
        for index in range(2)
        for ours, theirs in (("gate_proj", "a"), ("up_proj", "b"))
    }
    name = "mlp.experts.gate_up_proj"
    parts = parts_of(name, (2, 6, 4), named.get, shapes.get)
    assert parts is not None
    assert [(part.name, part.region.runs) for part in parts[1:3]] == [
        ("experts.0.b.weight", (((0, 1),), ((3, 6),), ((0, 4),))),
        ("experts.1.a.weight", (((1, 2),), ((0, 3),), ((0, 4),))),
    ]
    # Three experts, other widths, a matrix that is laid out the other way, other experts.
    for shape in ((3, 6, 4), (2, 8, 4), (2, 4, 6)):
        assert parts_of(name, shape, named.get, shapes.get) is None
    assert parts_of("mlp.gate_up_proj", (2, 6, 4), named.get, shapes.get) is None
