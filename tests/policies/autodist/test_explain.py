"""Why an operator does what it does: its runners-up, and what binds."""

from __future__ import annotations

from dataclasses import replace

import plans
from planning import slow_machine

from shardwright.policies.autodist.explain import Request, binding, explain_operator, factor_dims
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.policy import search
from shardwright.runtime.config import ComputeConfig

CONFIG = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)


def request_of(**options: object) -> Request:
    graph, machine = plans.zoo_graph("mlp"), slow_machine(4)
    chosen = AutodistOptions(mesh={"dp": 4}, **options)  # type: ignore[arg-type]
    best = search(graph, CONFIG, chosen, machine).best
    assert best is not None and best.cost is not None
    return Request(graph, CONFIG, chosen, machine, best)


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


def test_factors_by_the_dims_of_the_model() -> None:
    graph = plans.zoo_graph("mlp")
    assert graph.dims is not None
    dims = factor_dims(graph, "down")
    assert "batch" in dims.values() and all(graph.dims.named(name) for name in dims.values())
    (factor,) = [factor for factor, dim in dims.items() if dim == "batch"]
    assert f"dp=split:{factor}" in {choice.name for choice in explain_operator(request_of(), "down")}
