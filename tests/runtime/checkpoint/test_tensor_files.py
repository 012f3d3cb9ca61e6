"""Files written one tensor at a time are what safetensors reads."""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shardwright.runtime.checkpoint.tensor_bytes import bytes_of
from shardwright.runtime.checkpoint.tensor_files import (
    CODES,
    MappedFiles,
    TensorSource,
    digest_file,
    digest_tensors,
    write_tensors,
)
from shardwright.runtime.errors import CheckpointError


def source(value):
    return TensorSource(tuple(value.shape), value.dtype, lambda: value)


def test_every_dtype(tmp_path):
    tensors = {str(dtype): (torch.arange(6).view(2, 3) % 3).to(dtype) for dtype in CODES}
    tensors |= {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "scalar": torch.tensor([2.5]),
        "empty": torch.zeros(0, 3),
    }
    tensors |= {"expanded": torch.arange(3.0).view(3, 1).expand(3, 4), "no dim": torch.tensor(2.5)}
    path = tmp_path / "a.safetensors"
    record = write_tensors(
        path, {name: source(value) for name, value in tensors.items()}, {"tied": "scalar"}
    )
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape, name
        assert torch.equal(
            loaded[name].view(-1).view(torch.uint8), value.contiguous().view(-1).view(torch.uint8)
        ), name
    data = path.read_bytes()
    assert (record.num_bytes, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert record.sha256 == digest_file(path) and record.problem(path) is None
    with safe_open(path, framework="pt") as handle:
        assert handle.metadata() == {"format": "pt", "tied": "scalar"}


def test_views_of_the_file_are_mapped(tmp_path):
    value = torch.arange(12.0).view(3, 4)
    write_tensors(tmp_path / "a.safetensors", {"x": source(value)})
    with MappedFiles(tmp_path) as files:
        view = files.view("a.safetensors", "x")
        assert (
            torch.equal(view, value)
            and view.data_ptr() == files.view("a.safetensors", "x").data_ptr()
        )
        with pytest.raises(CheckpointError, match="does not hold 'y'"):
            files.view("a.safetensors", "y")
        with pytest.raises(CheckpointError, match=r"b\.safetensors cannot be read"):
            files.view("b.safetensors", "x")


def test_data_is_aligned_and_sliced_without_reading_the_rest(tmp_path):
    tensors = {
        "b": torch.ones(3, dtype=torch.bool),
        "a": torch.randn(4, 2, dtype=torch.float64),
        "c": torch.randn(5).half(),
    }
    write_tensors(
        tmp_path / "w.safetensors", {name: source(value) for name, value in tensors.items()}
    )
    data = (tmp_path / "w.safetensors").read_bytes()
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_size])
    for name, value in tensors.items():
        assert (8 + header_size + header[name]["data_offsets"][0]) % value.element_size() == 0
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert torch.equal(file.get_slice("a")[1:3], tensors["a"][1:3])


def test_the_digest_tells_values_names_and_dtypes_apart(tmp_path):
    def digest(**tensors):
        return digest_tensors({name: source(value) for name, value in tensors.items()})

    x = torch.arange(4.0)
    base = digest(x=x)
    assert (
        base
        == digest(x=x.clone())
        == write_tensors(tmp_path / "w", {"x": source(x)}, flushes=False).sha256
    )
    assert base not in {
        digest(y=x),
        digest(x=x + 1),
        digest(x=x.reshape(2, 2)),
        digest(x=x.double()),
        digest(),
    }
    assert digest(a=x, b=x + 1) == digest(b=x + 1, a=x)


def test_a_dtype_that_safetensors_lacks(tmp_path):
    with pytest.raises(
        CheckpointError, match="x has dtype torch.complex128, which cannot be saved"
    ):
        write_tensors(
            tmp_path / "a.safetensors", {"x": source(torch.zeros(2, dtype=torch.complex128))}
        )


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "a.safetensors has 103 bytes, 104 were written",
        ),
        (
            lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]),
            "a.safetensors was altered: its sha256 is not that of",
        ),
        (lambda path: path.unlink(), "a.safetensors is missing"),
    ],
)
def test_problems_are_told_in_words(tmp_path, damage, problem):
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, {"x": source(torch.zeros(2))})
    damage(path)
    assert problem.replace("103", str(record.num_bytes - 1)).replace(
        "104", str(record.num_bytes)
    ) in record.problem(path)


def test_bytes_keep_their_memory():
    view = bytes_of(torch.arange(4, dtype=torch.int32) + 1)
    assert view.tolist() == [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]
    assert len(bytes_of(torch.zeros(0, 3))) == 0
