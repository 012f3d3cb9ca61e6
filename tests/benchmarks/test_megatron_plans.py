"""autodist against Megatron's published plan at the size it was published for, both by the audit of
what is emitted.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.options import AutodistOptions

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(
        "megatron_plans", BENCHMARKS / "megatron_plans.py"
    )
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "megatron_plans", found)  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


def test_published_pipelines_are_cut_as_they_say(script: ModuleType) -> None:
    case = next(case for case in script.CASES if case.name == "175B")
    case = replace(
        case, layers=12, hidden=64, heads=8, tensor_ranks=2, pipeline_ranks=2, gpus=4, batch=4
    )
    plans = dict(script.megatron_plans(case, script.graph_of(case)))
    assert len(plans) == 6
    assert {len(plan.stages) for plan in plans.values()} == {6} and {
        plan.schedule for plan in plans.values()
    } == {"1f1b_interleaved"}


@pytest.mark.slow
def test_never_worse_than_the_published_plan(script: ModuleType) -> None:
    """22B on the published mesh; every placement and recomputation is free."""
    case = next(case for case in script.CASES if case.name == "22B")
    hardware = load_hardware("a100-80gb", case.gpus)
    graph = script.graph_of(case)
    search_script = importlib.import_module("published_search")
    known = search_script.best_known(script.published(case)).cost
    options = AutodistOptions(
        mesh={"tp": case.tensor_ranks},
        num_stages=case.pipeline_ranks,
        num_microbatches=case.num_microbatches,
        time_limit_s=3600.0,
    )
    found = search(graph, case.config, options, hardware)
    assert found.best is not None and found.best.cost is not None
    assert found.best.cost.peak_bytes <= hardware.device.memory_bytes
    # Sums in two orders are rounded otherwise.
    assert found.bound_s <= found.best.step_s * (1 + 1e-12)
    assert found.best.step_s <= known.step_s
