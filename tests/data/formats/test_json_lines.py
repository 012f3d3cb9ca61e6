"""JSON lines."""

import json

import pytest

from shardwright import data
from shardwright.data.formats import json_lines
from shardwright.runtime.errors import DataError


def test_values_are_read_by_index(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", 7)  # lines go over the bounds of chunks
    values = [{"text": "ü" * n, "n": n} for n in range(9)]
    text = "\n \n".join(json.dumps(value) for value in values)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl").write_text("1\n\n2\n")
    lines = data.JsonLines(tmp_path)
    assert lines.counts == [9, 2] and [lines[i] for i in range(11)] == [*values, 1, 2]
    assert lines.key(3) == f"{tmp_path}/a.jsonl:7" and lines.key(-1) == f"{tmp_path}/b.jsonl:3"
    assert [data.JsonLines(tmp_path)[i] for i in (0, 9)] == [values[0], 1]
    with pytest.raises(IndexError):
        lines[11]


def test_bad_lines_and_files_are_refused_in_words(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    loader = data.loader(data.JsonLines(path), global_batch=3)
    with pytest.raises(DataError) as error:
        next(iter(loader))
    assert str(error.value).startswith(f"a line is no JSON\n  where: {path}:2\n  why:   Expecting")
    skipping = data.loader(data.JsonLines(path), global_batch=3, on_error="skip")
    assert next(iter(skipping))["a"].tolist()[::2] == [1, 3]
    ((name, reason),) = set(skipping.skipped)
    assert name == f"sample 1 of JsonLines ({path}:2)" and "a line is no JSON" in reason
    path.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="has changed\n.*24|25 bytes"):
        data.JsonLines(path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match="JsonLines is empty"):
        data.loader(data.JsonLines(empty), global_batch=1)
