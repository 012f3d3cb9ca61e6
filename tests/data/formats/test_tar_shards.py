"""Webdataset shards."""

import io
import pickle
import tarfile

import numpy as np
import pytest
import torch
from sample_files import numbered_shards, write_tar

from shardwright import data
from shardwright.data.formats.source_files import MOST_OPEN_FILES, index_path
from shardwright.data.formats.tar_shards import split_name
from shardwright.runtime.errors import DataError


def test_samples_are_read_by_index_from_several_shards(tmp_path):
    array = io.BytesIO()
    np.save(array, np.arange(3))
    members = {
        "txt": "höhe".encode(),
        "json": b'{"a": 1}',
        "npy": array.getvalue(),
        "seg.png": b"P",
    }
    first = write_tar(tmp_path / "a.tar", {"x/1": members, "x/2": {"txt": b"two"}})
    second = write_tar(tmp_path / "b.tar", {"y" * 150: {"bin": bytes(700)}})
    shards = data.TarShards([first, second])
    assert len(shards) == 3 and shards.counts == [2, 1]
    sample = shards[0]
    assert sample.pop("npy").tolist() == [0, 1, 2]
    assert sample == {"__key__": "x/1", "txt": "höhe", "json": {"a": 1}, "seg.png": b"P"}
    assert shards[2] == shards[-1] == {"__key__": "y" * 150, "bin": bytes(700)}
    with pytest.raises(IndexError):
        shards[3]
    only = data.TarShards(tmp_path, keys=["txt"], decode={"txt": len})
    assert only[0] == {"__key__": "x/1", "txt": 5}
    assert pickle.loads(pickle.dumps(shards))[1] == shards[1]


def test_names_are_cut_as_webdataset_does():
    assert split_name("a.b/7.seg.png") == ("a.b/7", "seg.png")
    assert split_name("7.txt") == ("7", "txt") and split_name("7") == ("7", "")


def test_the_index_is_written_once_and_read(tmp_path, monkeypatch):
    folder = numbered_shards(tmp_path / "s", 2, 3)
    first = data.TarShards(folder)
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".index") == [
        "shard-000.tar.index",
        "shard-001.tar.index",
    ]
    monkeypatch.setattr("tarfile.open", None)
    again = data.TarShards(folder)
    assert [s["cls"] for s in map(again.__getitem__, range(6))] == list(range(6))
    assert again.fingerprint == first.fingerprint
    assert data.TarShards(folder / "shard-000.tar").fingerprint != first.fingerprint


def test_where_no_index_can_be_written_there_is_one_in_memory(tmp_path, monkeypatch):
    folder = numbered_shards(tmp_path / "s", 1, 3)

    def refuse(path, content):
        raise PermissionError(path)

    monkeypatch.setattr("shardwright.data.formats.source_files.write_file", refuse)
    assert len(data.TarShards(folder)) == 3 and len(list(folder.iterdir())) == 1


def test_many_shards_need_few_open_files(tmp_path):
    shards = data.TarShards(numbered_shards(tmp_path / "s", MOST_OPEN_FILES + 6, 1))
    assert [shards[i]["cls"] for i in range(len(shards))] == list(range(MOST_OPEN_FILES + 6))
    assert len(shards._files._open) == MOST_OPEN_FILES


def test_a_loader_goes_on_with_them(tmp_path):
    shards = data.TarShards(numbered_shards(tmp_path / "s", 3, 8))
    loader = data.loader(shards, global_batch=6, shuffle=True, num_workers=1)
    first = next(iter(loader))
    assert first["cls"].dtype == torch.int64 and len(first["__key__"]) == 6
    again = data.loader(data.TarShards(tmp_path / "s"), global_batch=6, shuffle=True)
    again.load_state_dict(loader.state_dict())
    rest = [number for batch in again for number in batch["cls"].tolist()]
    assert sorted([*first["cls"].tolist(), *rest]) == list(range(24))
    loader.close()
    write_tar(tmp_path / "s" / "shard-003.tar", {"s": {"cls": b"1", "txt": b"t"}})
    other = data.loader(data.TarShards(tmp_path / "s"), global_batch=6, shuffle=True)
    with pytest.raises(DataError, match="num_samples was 24 and is 25; fingerprint was"):
        other.load_state_dict(loader.state_dict())


def test_a_shard_that_changed_is_refused(tmp_path):
    folder = numbered_shards(tmp_path / "s", 2, 3)
    shards = data.TarShards(folder)
    shards[0], shards[3]
    path = folder / "shard-001.tar"
    content = path.read_bytes()
    path.write_bytes(content + bytes(1024))
    with pytest.raises(DataError) as error:
        data.TarShards(folder)
    assert str(error.value).startswith(
        f"{path} has changed\n  why:   its index was made when it had {len(content)} bytes; "
        f"it has {len(content) + 1024} now\n  try:   restore the file"
    )
    path.write_bytes(content.replace(b"text 4", b"text 9"))
    with pytest.raises(DataError, match="with other contents"):
        data.TarShards(folder)
    # While it is open: other members at other places, and an end that comes too early.
    other = {"k": {"txt": b"x" * 5000}}
    write_tar(path, other)
    with pytest.raises(DataError, match="has changed\n.*member s00004.cls"):
        shards[4]
    path.write_bytes(content[:1000])
    with pytest.raises(DataError, match="ends early\n.*bytes at .* were there"):
        shards[5]


@pytest.mark.parametrize("kept", [700, 1300, -1024, 0])
def test_truncated_shards_are_refused(tmp_path, kept):
    path = numbered_shards(tmp_path / "s", 1, 3) / "shard-000.tar"
    with open(path, "rb") as file:
        content = file.read().rstrip(b"\0")
    end = len(content) + -len(content) % 512
    path.write_bytes(path.read_bytes()[: end if kept == -1024 else kept])
    with pytest.raises(DataError, match="is truncated, or no tar file"):
        data.TarShards(path)
    assert not index_path(path).exists()


def test_other_bad_shards_are_refused_in_words(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"1": {"json": b"{", "cls": b"x"}})
    loader = data.loader(data.TarShards(path), global_batch=1)
    with pytest.raises(DataError) as error:
        next(iter(loader))
    assert str(error.value).startswith(
        f"a member of a shard cannot be decoded\n  where: {path}, member 1.json\n"
    )
    write_tar(tmp_path / "b.tar", {"1": {"a": b""}, "2": {"a": b""}, "1 ": {"a": b""}})
    twice = tmp_path / "c.tar"
    with tarfile.open(twice, "w") as tar:
        for name in ("1.a", "2.a", "1.b"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match="two samples of .* are called '1'"):
        data.TarShards(twice)
    with pytest.raises(DataError, match="is not there"):
        data.TarShards(tmp_path / "nothing.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no tar shard in"):
        data.TarShards(tmp_path / "empty")
    with pytest.raises(DataError, match="no tar shard was named"):
        data.TarShards([])
    index_path(path).write_bytes(b"rubbish")
    with pytest.raises(DataError, match="a.tar.index is damaged"):
        data.TarShards(path)
