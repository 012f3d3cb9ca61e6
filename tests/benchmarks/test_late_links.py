"""What ``benchmarks/late_links.py`` says on a machine on which too much else runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.runtime.activity import activity
from shardwright.runtime.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("late_links")


def test_without_a_pair_that_counts_it_says_why_and_what_to_try(script: ModuleType) -> None:
    assert script.none_counts([0.93, 0.624, 0.8], 0.5) == (
        "error: no pair of steps counts\n"
        "  why:   in each of 3 pairs other processes took 62% of the cores or more, and "
        "--elsewhere allows 50%\n"
        "  try:   again when less runs here, or --elsewhere 0.63, which says less of what is hidden"
    )


def test_each_pair_is_told(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.tell_pair(-1, 9, 0.7, False, "0 of 3")
    script.tell_pair(4, 9, 0.02, True, "2 of 3")
    assert capsys.readouterr().err.splitlines() == [
        "a pair to warm up: other processes took 70% of the cores, does not count (0 of 3)",
        "pair 5 of at most 9: other processes took 2% of the cores, counts (2 of 3)",
    ]


def test_what_comes_before_the_pairs_is_told(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration takes a minute or two; then it is known how long a pair takes."""

    def calibrate(*_: object) -> None:
        with activity("calibrating for about 75 s"):
            raise ConfigError("the machine is busy", why="of other work")

    monkeypatch.setattr(script, "calibrate", calibrate)
    monkeypatch.setattr("sys.argv", ["late_links.py"])
    with pytest.raises(SystemExit, match="the machine is busy"):
        script.main()
    script.say(script.expectation(20, 1.52))
    assert capsys.readouterr().err.splitlines() == [
        "calibrating for about 75 s",
        "about 30 s for pairs 1 to 20 if all of them count, at most 91 s",
    ]
