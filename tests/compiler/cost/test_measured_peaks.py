"""Peaks that are predicted against those measured in real processes with gloo, for one plan of each
kind. All plans: tests/product/peaks.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from peak_cases import GROUPS, deviations

COVER = {
    "plain": (2, 5),
    "overlap": (1,),
    "zero": (4, 6),
    "random": (0,),
    "tables": (2, 5, 10),
    "pipelines": (2, 7),
    "four ranks": (3, 5),
    "wholes": (0, 2, 5),
    "wholes on four ranks": (2,),
    "packed": (0,),
}
"""The plans of each group that are measured: each kind of plan, and what holds memory, once."""


@pytest.mark.slow
@pytest.mark.parametrize("name", COVER)
def test_peaks_are_those_measured(name: str, tmp_path: Path) -> None:
    group = GROUPS[name]
    lines, wrong = deviations(
        str(tmp_path), replace(group, cases=[group.cases[number] for number in COVER[name]])
    )
    print("\n".join(lines))
    assert lines and not wrong, "\n".join(wrong)
