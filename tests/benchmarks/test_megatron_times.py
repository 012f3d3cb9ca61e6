"""The cost model against iteration times published for Megatron-LM: constants from two models, two
others predicted.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "megatron_times.py"


@pytest.mark.slow
def test_the_large_models_are_predicted_within_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("megatron_times", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "megatron_times", script)  # dataclasses look their module up
    spec.loader.exec_module(script)
    cases = {case.name: case for case in script.CASES}
    efficiencies = script.fitted([cases[name] for name in script.FITTED_ON])
    assert ((np.exp(efficiencies) > 0.5) & (np.exp(efficiencies) < 1)).all()
    fitted = np.expm1(script.log_errors(efficiencies, [cases["22B"], cases["175B"]]))
    predicted = np.expm1(script.log_errors(efficiencies, [cases["530B"], cases["1T"]]))
    assert np.abs(fitted).max() < 0.05 and np.abs(predicted).max() < 0.1
