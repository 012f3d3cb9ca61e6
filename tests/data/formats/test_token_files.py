"""Megatron's token files."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import data
from shardwright.runtime.errors import ConfigError, DataError

DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


def test_the_bytes_are_megatrons(tmp_path):
    """Written by hand, after the layout of its IndexedDataset."""
    data.write_token_file(tmp_path / "a", DOCUMENTS, dtype="uint16")
    assert (tmp_path / "a.bin").read_bytes() == np.arange(1, 11, dtype="<u2").tobytes()
    assert (tmp_path / "a.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 4, 5)
        + struct.pack("<4i", 3, 2, 4, 1)
        + struct.pack("<4q", 0, 6, 10, 18)
        + struct.pack("<5q", 0, 1, 2, 3, 4)
    )


def test_documents_of_several_sequences(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(6, dtype="<i4").tobytes())
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 3, 3)
        + struct.pack("<3i", 1, 2, 3)
        + struct.pack("<3q", 0, 4, 12)
        + struct.pack("<3q", 0, 2, 3)
    )
    file = data.TokenFile(tmp_path / "a.bin")
    assert [file[i]["input_ids"].tolist() for i in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert file.lengths.tolist() == [3, 3]


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 200), max_size=5), max_size=8),
    st.sampled_from(["uint8", "int64"]),
)
def test_what_is_written_is_read(tmp_path_factory, documents, dtype):
    file = data.write_token_file(tmp_path_factory.mktemp("t") / "a", documents, dtype=dtype)
    assert [file[i]["input_ids"].tolist() for i in range(len(file))] == documents


def test_windows_predict_each_token_once_and_know_documents(tmp_path):
    windows = data.TokenWindows(data.write_token_file(tmp_path / "a", DOCUMENTS), 3)
    assert len(windows) == 3
    rows = [{name: x.tolist() for name, x in windows[i].items()} for i in range(3)]
    assert rows == [
        {
            "input_ids": [1, 2, 3],
            "labels": [2, 3, -100],
            "position_ids": [0, 1, 2],
            "document_ids": [1, 1, 1],
        },
        {
            "input_ids": [4, 5, 6],
            "labels": [5, -100, 7],
            "position_ids": [0, 1, 0],
            "document_ids": [1, 1, 2],
        },
        {
            "input_ids": [7, 8, 9],
            "labels": [8, 9, -100],
            "position_ids": [0, 1, 2],
            "document_ids": [1, 1, 1],
        },
    ]
    plain = data.TokenWindows(str(tmp_path / "a"), 3, mask_bounds=False)
    labels = [token for i in range(3) for token in plain[i]["labels"].tolist()]
    assert labels == list(range(2, 11))
    assert windows.key(2).endswith("a.bin, tokens from 6")


def test_they_train_and_pack(tmp_path):
    file = data.write_token_file(tmp_path / "a", [[d] * (d % 5 + 1) for d in range(40)])
    loader = data.loader(data.TokenWindows(file, 8), global_batch=4, shuffle=True, num_workers=1)
    batch = next(iter(loader))
    assert batch["input_ids"].shape == (4, 8) and batch["input_ids"].dtype == torch.int64
    loader.close()
    packed = data.loader(file, global_batch=4, packing=data.Packing(8))
    row = next(iter(packed))
    assert row["input_ids"][0].tolist() == [0, 1, 1, 2, 2, 2, 0, 0]
    assert row["document_ids"][0].tolist() == [1, 2, 2, 3, 3, 3, 0, 0]


def test_bad_files_are_refused_in_words(tmp_path):
    data.write_token_file(tmp_path / "a", DOCUMENTS)
    content, index = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()
    cases = [
        ("bin", content[:-4], "is truncated, or belongs to another index\n.*36 bytes"),
        ("idx", index[:-1], "a.idx is no index of a token file\n.*its header says"),
        ("idx", index[:10], "is no index of a token file\n.*it has 10 bytes"),
        ("idx", b"X" + index[1:], "it begins with b'XMIDIDX"),
        ("idx", index[:-8] + struct.pack("<q", 3), "do not lie end to end"),
        ("idx", index[:50] + struct.pack("<q", 4) + index[58:], "do not lie end to end"),
    ]
    for suffix, broken, message in cases:
        (tmp_path / "a.bin").write_bytes(content)
        (tmp_path / "a.idx").write_bytes(index)
        (tmp_path / f"a.{suffix}").write_bytes(broken)
        with pytest.raises(DataError, match=message):
            data.TokenFile(tmp_path / "a")
    with pytest.raises(DataError, match="b.bin is not there"):
        data.TokenFile(tmp_path / "b")
    with pytest.raises(
        DataError, match="document 1 is no list of token ids that fit into uint8\n.*256"
    ):
        data.write_token_file(tmp_path / "c", [[1], [256, 3]], dtype="uint8")
    assert not list(tmp_path.glob("*c.*"))
    with pytest.raises(ConfigError, match="have no dtype complex64"):
        data.write_token_file(tmp_path / "c", [], dtype="complex64")
    short = data.write_token_file(tmp_path / "c", [[1, 2]])
    with pytest.raises(DataError, match="too short for a window\n.*2 tokens, and a window takes 3"):
        data.TokenWindows(short, 2)
    with pytest.raises(ConfigError, match="a window of 0 tokens"):
        data.TokenWindows(short, 0)
