"""The record of published plans beside searches."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_record_is_read_as_it_was_written_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kept, search = map(importlib.import_module, ("published_record", "published_search"))

    def line(row: str, published_s: float, fits: bool, found_s: float, left_out: int) -> object:
        searched = kept.Searched(row, "a study, of A100", "GPT", 8, 120.0)
        theirs = search.Theirs('tp=2, "selective"', published_s, 40.0, fits)
        return searched, theirs, search.Found("dp=2", 5.0, found_s, 60.0, 0.125, left_out)

    record = {
        "1": line("1", 2.0, True, 1.5, 3),
        "2": line("2", 2.0, True, 2.0, 0),
        "3": line("3", 2.0, False, 2.5, 0),
        "4": line("4", 2.0, True, 0.0, 0),
        "5": line("5", 2.0, True, 2.01, 0),
    }
    path = tmp_path / "record.csv"
    assert kept.read_record(path) == {}
    kept.write_record(path, record)
    assert kept.read_record(path) == record
    _, _, one, everything = kept.summary(record)
    assert one.replace("a study, of A100", "all") == everything
    found = "1 shorter, 1 equal, 1 longer, 1 none, 1 where the published plan does not fit"
    assert everything == f"| all | 5 | {found} | +0.0% | 12.5% | 12.5% | 1 | 5 | 5 |"
