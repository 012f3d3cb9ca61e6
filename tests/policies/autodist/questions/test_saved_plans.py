"""Questions about a plan that nobody searched for."""

from __future__ import annotations

from dataclasses import replace

import planning
import plans
import pytest

from shardwright import ComputeConfig
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.policies.autodist.options import SIMPLER_WITHIN, AutodistOptions
from shardwright.policies.autodist.questions.explain import Choice, Request, explain_operator
from shardwright.policies.autodist.questions.saved_plans import audited_levers, request_of_plan
from shardwright.policies.known_policies import find_policy


@pytest.mark.slow
def test_a_pipeline_by_hand() -> None:
    """More microbatches have less of a bubble, and recomputation needs less memory: each figure is
    that of the changed plan.
    """
    graph, machine = plans.zoo_graph("gpt2-untied"), planning.slow_machine(4, bytes_per_s=1e9)
    given = {"num_stages": 2, "tp": 2, "num_microbatches": 4}
    config = ComputeConfig(
        plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss", pas_config=given
    )
    plan = find_policy("hybrid").apply(graph, config)
    request = request_of_plan(graph, config, AutodistOptions(), machine, plan)
    assert request.best.cost is not None and request.auditor.num_microbatches == 4
    first, *others = audited_levers(request)
    assert first.chosen and first.step_s == request.best.cost.step_s
    found = {choice.name: choice for choice in others}
    twice = found["twice as many microbatches (8), time for as many samples as now"]
    eight = find_policy("hybrid").apply(
        graph,
        ComputeConfig(
            plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss",
            pas_config={**given, "num_microbatches": 8},
        ),
    )  # fmt: skip
    assert twice.step_s == pytest.approx(request.auditor(eight).step_s / 2)
    again = found["all 2 layers computed again"]
    assert again.peak_bytes < first.peak_bytes and again.step_s > first.step_s
    told = explain_operator(request, graph.ops[-1].name)
    assert any(choice.chosen for choice in told.choices)


def test_lower_stages_of_zero_are_told_of_where_they_fit() -> None:
    """Each figure is that of the plan that is made for the stage."""
    graph, machine = plans.zoo_graph("gpt2-untied"), planning.slow_machine(4, bytes_per_s=1e6)

    def request_for(stage: int, limit_gb: float | None = None) -> Request:
        config = ComputeConfig(plan_ngpus=1, runtime_ngpus=4, use_zero=stage, outputs="loss")
        plan = find_policy("dp").apply(graph, config).plan
        assert plan is not None
        plan = replace(plan, zero=units_of_storage(config), zero_stage=stage)
        options = AutodistOptions(memory_limit_gb=limit_gb)
        return request_of_plan(graph, config, options, machine, plan)

    _, *others = audited_levers(request_for(3))
    costs = {f"use_zero={stage}": request_for(stage).best.cost for stage in (0, 1, 2, 3)}
    at_three = costs.pop("use_zero=3")
    assert at_three is not None
    wanted = {
        name: (cost.step_s, cost.peak_bytes)
        for name, cost in costs.items()
        if cost is not None and cost.step_s <= (1 + SIMPLER_WITHIN) * at_three.step_s
    }
    assert wanted and wanted == {
        choice.name: (choice.step_s, choice.peak_bytes)
        for choice in others
        if choice.name.startswith("use_zero")
    }
    within = audited_levers(request_for(3, at_three.peak_bytes / 1e9))
    assert not any(choice.name.startswith("use_zero") for choice in within)


@pytest.mark.parametrize("in_table", [False, True])
def test_small_buckets_are_told_of(in_table: bool) -> None:
    """Each message waits for all hops of its ring, and larger buckets are fewer messages."""
    graph, machine = plans.zoo_graph("gpt2-untied"), load_hardware("h100", 4)

    def levers(size: float) -> list[Choice]:
        table = {"bucket_cap_mb": size, "overlap_grad_sync": False}
        config = ComputeConfig(
            plan_ngpus=1,
            runtime_ngpus=4,
            use_zero=1,
            reducer_bucket_cap_mb=None if in_table else size,
            distributed_optimizer=table if in_table else None,
        )
        plan = find_policy("dp").apply(graph, config).plan
        assert plan is not None
        return audited_levers(request_of_plan(graph, config, AutodistOptions(), machine, plan))

    name = "distributed_optimizer.bucket_cap_mb" if in_table else "reducer_bucket_cap_mb"
    first, *others = levers(0.001)
    found = {choice.name: choice.step_s for choice in others}
    assert found[f"{name}=0.016"] < found[f"{name}=0.004"] < first.step_s
    assert not any(name in choice.name for choice in levers(1000.0))  # one bucket as it is
