"""autodist against Megatron's published plan at the size it was published for, both by the audit of what is emitted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from shardwright.compiler.cost.hardware import load_hardware
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.policy import search

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_never_worse_than_the_published_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """22B on the published mesh; every placement and recomputation is free."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("megatron_plans", BENCHMARKS / "megatron_plans.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "megatron_plans", script)  # dataclasses look their module up
    spec.loader.exec_module(script)
    case = next(case for case in script.CASES if case.name == "22B")
    hardware = load_hardware("a100-80gb", case.gpus)
    graph = script.graph_of(case)
    _, known = script.best_known(case, graph, hardware)
    options = AutodistOptions(
        mesh={"tp": case.tensor_ranks},
        num_stages=case.pipeline_ranks,
        num_microbatches=case.num_microbatches,
        time_limit_s=3600.0,
    )
    found = search(graph, case.config, options, hardware)
    assert found.best is not None and found.best.cost is not None
    assert found.best.cost.peak_bytes <= hardware.device.memory_bytes
    assert found.bound_s <= found.best.step_s <= known.step_s
