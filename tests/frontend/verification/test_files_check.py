"""The arguments that are made for files of a folder."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwright.frontend.verification.files_check import check_files, made_args
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError


class Tokens(nn.Module):
    """Every kind of argument: indices, a mask, floats, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, ids: Tensor, mask: Tensor, x: Tensor, scale: float) -> Tensor:
        hidden = self.table(ids) * scale + x
        return hidden.masked_fill(~mask.unsqueeze(-1), 0.0).square().sum()


ARGS = {
    "ids": torch.zeros(4, 3, dtype=torch.long),
    "mask": torch.ones(4, 3, dtype=torch.bool),
    "x": torch.zeros(4, 3, 4),
    "scale": 2.0,
}


def compiled(folder: Path, **fields: object) -> Path:
    config = ComputeConfig(**{"plan_ngpus": 2, "runtime_ngpus": 4, **fields})  # type: ignore[arg-type]
    return compile_into(folder, Tokens(), ARGS, "data", config)


def test_arguments_are_made_as_the_files_state_them(tmp_path: Path) -> None:
    directory = compiled(tmp_path)
    made = made_args(directory)
    for name in ("ids", "mask"):
        assert torch.equal(made[name], ARGS[name])
    assert made["x"].shape == (4, 3, 4) and made["x"].dtype == torch.float32
    assert made["x"].unique().numel() > 1 and made["scale"] == 2.0
    assert check_files(directory).ok


def test_files_with_sizes_that_vary_are_given_arguments(tmp_path: Path) -> None:
    sizes = {name: {0: "batch"} for name in ("ids", "mask", "x")}
    directory = compiled(tmp_path, dynamic_dims=sizes)
    with pytest.raises(ConfigError, match=r"(?s)give as ids.*may vary: int64\[batch, 3\].*--args"):
        check_files(directory)
    assert check_files(directory, ARGS).ok


def test_files_of_no_compile_are_refused(tmp_path: Path) -> None:
    directory = compiled(tmp_path)
    manifest = directory / "manifest.json"
    data = json.loads(manifest.read_text())
    del data["sha256"], data["request"]["config"]
    manifest.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"(?s)was made by no compile.*how many ranks"):
        check_files(directory)
