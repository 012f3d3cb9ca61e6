"""autodist against Megatron's published plan at the size it was published for, both by the audit of what is emitted."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.compiler.cost.hardware import load_hardware
from shardwright.policies.autodist.policy import AutodistOptions, search

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("22B", 48), ("39B", 16)])
def test_never_worse_than_the_published_plan(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the published mesh and number of stages; every placement, split, schedule and recomputation is free. With fewer layers
    there is as much less memory.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("megatron_plans", BENCHMARKS / "megatron_plans.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "megatron_plans", script)  # dataclasses look their module up
    spec.loader.exec_module(script)
    published = next(case for case in script.CASES if case.name == name)
    case = replace(published, layers=layers)
    hardware = load_hardware("a100-80gb", case.gpus)
    memory_bytes = hardware.device.memory_bytes * layers / published.layers
    tight = replace(hardware, device=replace(hardware.device, memory_bytes=memory_bytes))
    graph = script.graph_of(case)
    _, known = script.best_known(case, graph, tight)
    options = AutodistOptions(
        mesh={"tp": case.tensor_ranks}, num_stages=case.pipeline_ranks, num_microbatches=case.num_microbatches
    )
    found = search(graph, case.config, options, tight)
    assert found.best is not None and found.best.cost is not None
    assert found.best.cost.peak_bytes <= memory_bytes
    assert found.bound_s <= found.best.step_s <= known.step_s
