"""Why an operator does what it does: its runners-up, and what binds."""

from __future__ import annotations

from dataclasses import replace

import plans
import pytest
from planning import slow_machine

from shardwright.policies.autodist import explain
from shardwright.policies.autodist.explain import (
    Request,
    binding,
    explain_module,
    explain_operator,
    factor_dims,
    module_binding,
)
from shardwright.policies.autodist.found import Found
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.policy import search
from shardwright.runtime.config import ComputeConfig

CONFIG = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)


def request_of(config: ComputeConfig = CONFIG, **options: object) -> Request:
    graph, machine = plans.zoo_graph("mlp"), slow_machine(4)
    chosen = AutodistOptions(**{"mesh": {"dp": 4}, **options})  # type: ignore[arg-type]
    best = search(graph, config, chosen, machine).best
    assert best is not None and best.cost is not None
    return Request(graph, config, chosen, machine, best)


def told(request: Request, op: str) -> str:
    return binding(request, op, explain_operator(request, op))


def test_nothing_binds() -> None:
    request = request_of()
    assert {told(request, op.name) for op in request.graph.ops} == {"nothing: no other choice is faster on this mesh"}


def test_constraints_bind() -> None:
    assert told(request_of(pin={"down": {"dp": "G"}}), "down") == "constraints: only G along dp"
    forbidden = told(request_of(forbid={"batch": ("dp",)}), "down")
    assert forbidden.startswith("constraints: not split:") and forbidden.endswith(" along dp")


def test_a_plan_that_is_not_the_fastest_placement() -> None:
    """What is marked is what the plan does, and why it does is said: the memory if the fastest placement has no room."""
    slower = request_of(pin={"down": {"dp": "G"}})
    small = replace(slower, options=AutodistOptions(mesh={"dp": 4}, memory_limit_gb=1e-6))
    text = told(small, "down")
    assert text.startswith("the memory: the fastest placement takes ") and "it has dp=G, and the fastest dp=split:" in text
    assert [choice.name for choice in explain_operator(small, "down") if choice.chosen] == ["dp=G"]
    large = replace(slower, options=AutodistOptions(mesh={"dp": 4}))
    assert told(large, "down").startswith("the plan as a whole, which is not the fastest placement")


def test_what_binds_a_module() -> None:
    request = request_of()
    (path, *_) = {op.module_path for op in request.graph.ops if op.name == "down"}
    assert module_binding(request, path) == "nothing: no other choice is faster on this mesh"
    pinned = request_of(pin={"down": {"dp": "G"}})
    assert module_binding(pinned, path) == "constraints: only G along dp"
    small = replace(pinned, options=AutodistOptions(mesh={"dp": 4}, memory_limit_gb=1e-6))
    text = module_binding(small, path)
    assert text.startswith("the memory: the fastest placement takes ") and text.endswith(
        " and 1 kB are allowed; 1 of its 1 operators do otherwise in the fastest placement"
    )
    rows = {choice.name: choice.step_s for choice in explain_module(small, path)}
    assert rows["fastest"] == explain_module(request, path)[0].step_s < rows["as planned"]


def test_memory_and_schedule_are_told_apart_in_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another search for such a pipeline, with all the memory it could want."""
    config = replace(CONFIG, use_end2end=True)
    shape = {"mesh": {"dp": 2}, "num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}
    pinned = request_of(config, **shape, pin={"down": {"dp": "G"}})
    assert pinned.best.plan.stages
    small = replace(pinned, options=AutodistOptions(**shape, memory_limit_gb=0.001))  # type: ignore[arg-type]
    text = told(small, "down")
    assert text.startswith("the memory: if there were no limit (1 MB), such a pipeline would do otherwise here, take ")
    assert " in the place of " in text and "; it has dp=G, and the fastest dp=split:" in text
    assert module_binding(small, "down").startswith("the memory: if there were no limit (1 MB)")
    monkeypatch.setattr(explain, "search", lambda *request: Found(audited=[pinned.best]))
    pipeline = "the pipeline, of which each stage runs beside the others: with more memory than there is it is no faster"
    assert told(small, "down").startswith(f"{pipeline}; it has dp=G")
    faster = replace(pinned.best, cost=replace(pinned.best.cost, step_s=pinned.best.step_s / 2))  # type: ignore[type-var]
    monkeypatch.setattr(explain, "search", lambda *request: Found(audited=[faster]))
    assert "with more memory than there is it does the same here; " in told(small, "down")


def test_factors_by_the_dims_of_the_model() -> None:
    graph = plans.zoo_graph("mlp")
    assert graph.dims is not None
    dims = factor_dims(graph, "down")
    assert "batch" in dims.values() and all(graph.dims.named(name) for name in dims.values())
    (factor,) = [factor for factor, dim in dims.items() if dim == "batch"]
    assert f"dp=split:{factor}" in {choice.name for choice in explain_operator(request_of(), "down")}
