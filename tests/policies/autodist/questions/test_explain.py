"""Why an operator does what it does: its runners-up, and what binds."""

from __future__ import annotations

from dataclasses import replace

import plans
from planning import slow_machine

from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import (
    NOTHING_BINDS,
    REST_FOR_SPEED,
    Choice,
    Explanation,
    Request,
    explain_module,
    explain_operator,
    factor_dims,
)
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.runtime.config import ComputeConfig

CONFIG = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)
PIPELINE = {"mesh": {"dp": 2}, "num_stages": 2, "num_microbatches": 2, "schedule": "1f1b"}


def request_of(config: ComputeConfig = CONFIG, **options: object) -> Request:
    graph, machine = plans.zoo_graph("mlp"), slow_machine(4)
    chosen = AutodistOptions(**{"mesh": {"dp": 4}, **options})  # type: ignore[arg-type]
    best = search(graph, config, chosen, machine).best
    assert best is not None and best.cost is not None
    return Request(graph, config, chosen, machine, best)


def pipeline(**options: object) -> Request:
    return request_of(replace(CONFIG, use_end2end=True), **PIPELINE, **options)


def planned(told: Explanation) -> Choice:
    (row,) = [choice for choice in told.choices if choice.chosen]
    return row


def test_nothing_binds() -> None:
    request = request_of()
    assert {explain_operator(request, op.name, most=2).binds for op in request.graph.ops} == {
        NOTHING_BINDS
    }


def test_constraints_bind() -> None:
    assert (
        explain_operator(request_of(pin={"down": {"dp": "G"}}), "down").binds
        == "constraints: only G along dp"
    )
    forbidden = explain_operator(request_of(forbid={"batch": ("dp",)}), "down").binds
    assert forbidden.startswith("constraints: not split:") and forbidden.endswith(" along dp")


def test_a_plan_that_is_not_the_fastest() -> None:
    """What is marked is the plan, with its own step, and why it is not another is said: the memory
    if that has no room.
    """
    slower = request_of(pin={"down": {"dp": "G"}})
    small = replace(slower, options=AutodistOptions(mesh={"dp": 4}, memory_limit_gb=1e-6))
    told = explain_operator(small, "down")
    assert told.binds.startswith("the memory: dp=split:") and told.binds.endswith(
        " on a device, and 1 kB are allowed"
    )
    assert (planned(told).name, planned(told).step_s) == ("dp=G", slower.best.step_s)
    assert not any(choice.fits for choice in told.choices)
    large = replace(slower, options=AutodistOptions(mesh={"dp": 4}))
    told = explain_operator(large, "down")
    assert told.binds.startswith(
        "the search, which has not tried this: dp=split:"
    ) and told.binds.endswith(", and fits")
    assert told.choices[0].step_s < planned(told).step_s and all(
        choice.fits for choice in told.choices
    )


def test_what_binds_a_module() -> None:
    request = request_of()
    told = explain_module(request, "down")
    assert (
        told.binds == NOTHING_BINDS
        and told.choices[0].chosen
        and "dp splits batch" in {c.name for c in told.choices}
    )
    pinned = request_of(pin={"down": {"dp": "G"}})
    assert explain_module(pinned, "down").binds.startswith("constraints: only G along dp")
    small = replace(pinned, options=AutodistOptions(mesh={"dp": 4}, memory_limit_gb=1e-6))
    told = explain_module(small, "down")
    assert told.binds.startswith("the memory: ")
    rows = {choice.name: choice.step_s for choice in told.choices}
    assert (
        rows["the fastest placement"]
        == request.best.step_s
        < rows["as planned"]
        == pinned.best.step_s
    )


def test_figures_of_a_pipeline_are_of_that_pipeline() -> None:
    """The figure of the plan is its own step, those of the others are no more than if this one
    operator did so; not those of the whole model on the ranks of one stage, which are about twice
    as long. Parameters are stored as is best without stages, so that with them the same choice may
    take a little less.
    """
    request = pipeline()
    plan = request.best.plan
    assert plan.stages
    audited = Auditor(request.graph, request.config, request.hardware, 2)
    for op in ("up", "down"):
        told = explain_operator(request, op, most=100)
        assert (
            planned(told).step_s == request.best.step_s == audited(plan).step_s
            and told.left_out == 0
        )
        others = {choice.name: choice.step_s for choice in told.choices if not choice.chosen}
        same = others.pop(f"{planned(told).name}{REST_FOR_SPEED}", request.best.step_s)
        assert len(others) > 2 and same <= request.best.step_s
        for name, seconds in others.items():
            assignment = dict(part.split("=") for part in name.split()) if name != "R" else {}
            stored = {
                fqn: layout for fqn, layout in plan.stored.items() if not fqn.startswith(f"{op}.")
            }
            alone = replace(plan, strategies={**plan.strategies, op: assignment}, stored=stored)
            assert seconds <= audited(alone).step_s * (1 + 1e-9)
        assert planned(told).step_s < min(others.values()) < 1.5 * request.best.step_s
        assert planned(explain_module(request, op)).step_s == request.best.step_s


def test_layers_that_are_computed_again_are_in_the_figures() -> None:
    again, not_again = pipeline(recompute=["middle"]), pipeline()
    assert again.best.plan.recompute == ("middle",) and again.best.step_s > not_again.best.step_s
    told, other = (explain_operator(request, "down") for request in (again, not_again))
    assert planned(told).step_s == again.best.step_s
    (worst, without) = (max(choice.step_s for choice in found.choices) for found in (told, other))
    assert worst > without


def test_what_promises_less_is_counted() -> None:
    request = request_of()
    every, some = (explain_operator(request, "down", most=most) for most in (100, 2))
    assert (
        len(some.choices) + some.left_out in (len(every.choices), len(every.choices) + 1)
        and some.left_out > 0
    )
    assert planned(some) == planned(every)


def test_factors_by_the_dims_of_the_model() -> None:
    graph = plans.zoo_graph("mlp")
    assert graph.dims is not None
    dims = factor_dims(graph, "down")
    assert "batch" in dims.values() and all(graph.dims.named(name) for name in dims.values())
    (factor,) = [factor for factor, dim in dims.items() if dim == "batch"]
    assert f"dp=split:{factor}" in {
        choice.name for choice in explain_operator(request_of(), "down").choices
    }
