"""Peaks that are predicted against those measured in real processes with gloo, for one plan of each
kind; of what sums gradients also with a stand-in for NCCL. All plans: tests/product/peaks.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fake_cuda
import pytest
import torch
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
    "weights": (0, 1, 2, 3),
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


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA itself")
@pytest.mark.skipif(fake_cuda.compiler() is None, reason="the fake device needs a C++ compiler")
def test_peaks_over_nccl_are_those_measured(tmp_path: Path) -> None:
    """What the runtime makes beside the calls of NCCL, on fake devices."""
    fake_cuda.build()
    lines, wrong = deviations(str(tmp_path), GROUPS["weights"], "nccl")
    print("\n".join(lines))
    assert lines and not wrong, "\n".join(wrong)
