"""The index: exact round trips, digests of itself, and what parts of several ranks make
together.
"""

import json

import pytest
import torch

from shardwright.runtime.checkpoint.checkpoint_index import (
    Index,
    OptimizerRecord,
    PieceRecord,
    TensorRecord,
)
from shardwright.runtime.checkpoint.folders import find_folder
from shardwright.runtime.checkpoint.tensor_files import FileRecord
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.regions import Region


def part(rank, start, stop):
    """The part of one rank of two: a vector of four in two halves."""
    file = f"rank-{rank}.safetensors"
    pieces = lambda key: (PieceRecord(file, key, Region((((start, stop),),))),)  # noqa: E731
    optimizer = OptimizerRecord(
        "AdamW",
        ((("w",), {"lr": 0.1, "betas": {"tuple": [0.9, 0.99]}}),),
        {"w": {"exp_avg": TensorRecord((4,), torch.float32, pieces("w/exp_avg"))}},
        {"w": {"step": 3}},
    )
    tensors = {"w": TensorRecord((4,), torch.float32, pieces("w"), ("tied",))}
    random = {"": {"seed": 1, "step": 2, "microbatch": 3}}
    return Index(
        "Net",
        tensors,
        {file: FileRecord(10, "ab")},
        random,
        {},
        optimizer,
        step=rank + 5,
        num_ranks=2,
    )


def test_parts_make_a_whole(tmp_path):
    first, second = part(0, 0, 2), part(1, 2, 4)
    assert all(record.problem == "2 of 4 elements are in no piece" for _, record in first.records())
    whole = first.merged(second)
    assert [name for name, _ in whole.records()] == ["w", "w/exp_avg"]
    assert all(record.problem is None for _, record in whole.records())
    assert whole.step == 5 and len(whole.files) == 2
    assert first.merged(first).tensors["w"].pieces == first.tensors["w"].pieces
    path = tmp_path / "index.json"
    whole.write(path)
    assert Index.read(path).to_json() == whole.to_json()
    assert Index.read(path).tensors == whole.tensors


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "was altered or truncated"),
        (lambda text: text.replace('"lr": 0.1', '"lr": 0.2'), "was altered or truncated"),
        (lambda text: "[]", "was altered or truncated"),
        (lambda text: "", "was altered or truncated"),
    ],
)
def test_damage(tmp_path, damage, message):
    path = tmp_path / "index.json"
    part(0, 0, 2).write(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(CheckpointError, match=message):
        Index.read(path)


def test_a_folder_in_the_place_of_a_file(tmp_path):
    """What the system says of a file that cannot be read comes in words, too."""
    (tmp_path / "index.json").mkdir()
    (tmp_path / "other" / "LATEST").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="it cannot be read: Is a directory"):
        Index.read(tmp_path / "index.json")
    with pytest.raises(CheckpointError, match="LATEST cannot be read\n  why:   Is a directory"):
        find_folder(tmp_path / "other")


EMPTY = {"shape": [0], "dtype": "float32", "pieces": []}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"files": {"../a.safetensors": {"bytes": 1, "sha256": ""}}},
            "'../a.safetensors' is no file of this checkpoint",
        ),
        (
            {"files": {"/a.safetensors": {"bytes": 1, "sha256": ""}}},
            "'/a.safetensors' is no file of this checkpoint",
        ),
        ({"files": {}}, "'rank-0.safetensors' is no file of this checkpoint"),
        ({"tensors": {"w": {"shape": [0], "dtype": "load", "pieces": []}}}, "'load' is no dtype"),
        (
            {"tensors": {name: EMPTY | {"aliases": ["tied"]} for name in "wv"}},
            "two tensors have one name",
        ),
        ({"tensors": {"v": EMPTY}}, "the optimizer has state of 'w', which is no parameter"),
        ({"tensors": {"w": EMPTY}}, "the optimizer state 'exp_avg' of 'w' is not of its shape"),
    ],
)
def test_what_no_save_writes(tmp_path, change, why):
    class Altered(Index):
        def to_json(self):
            return {**super().to_json(), **change}

    path, index = tmp_path / "index.json", part(0, 0, 2)
    Altered(index.module_class, index.tensors, index.files, optimizer=index.optimizer).write(path)
    with pytest.raises(
        CheckpointError, match=rf"was altered or truncated\n  why:   ValueError: {why}"
    ):
        Index.read(path)


def test_another_version(tmp_path, monkeypatch):
    path = tmp_path / "index.json"
    monkeypatch.setattr("shardwright.runtime.checkpoint.checkpoint_index.FORMAT_VERSION", 99)
    part(0, 0, 2).write(path)
    monkeypatch.undo()
    assert json.loads(path.read_text())["format_version"] == 99
    with pytest.raises(CheckpointError, match="its format version is 99, here it is 1"):
        Index.read(path)


def test_no_index(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint\n.*there is no index.json"):
        Index.read(tmp_path / "index.json")
