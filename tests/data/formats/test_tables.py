"""Parquet and arrow, through Hugging Face datasets. Where these are not installed, only what is
said then can be tested.
"""

import importlib.util

import pytest

from shardwright import data
from shardwright.runtime.errors import ConfigError, DataError

HAS_DATASETS = importlib.util.find_spec("datasets") is not None


@pytest.mark.skipif(HAS_DATASETS, reason="says what is missing where datasets is not installed")
def test_without_datasets_it_says_what_to_install(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match="read by Hugging Face datasets\n.*\n.*pip install"):
        data.Tables(tmp_path)


def test_files_of_two_kinds_are_refused(tmp_path):
    for name in ("a.parquet", "b.arrow"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match="parquet and arrow files do not make one source"):
        data.Tables(tmp_path)


@pytest.mark.skipif(not HAS_DATASETS, reason="datasets is no dependency, and not installed here")
def test_rows_are_read_and_resumed(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"x": list(range(20)), "t": [str(i) for i in range(20)]})
    rows.to_parquet(tmp_path / "a.parquet")
    loader = data.loader(data.Tables(tmp_path, columns=["x"]), global_batch=4, shuffle=True)
    found = [number for batch in loader for number in batch["x"].tolist()]
    assert sorted(found) == list(range(20))
    direct = data.loader(rows.with_format("torch"), global_batch=4, shuffle=True)
    assert [number for batch in direct for number in batch["x"].tolist()] == found
    with pytest.raises(DataError, match="has no column 'y'"):
        data.Tables(tmp_path, columns=["y"])
