"""Questions about a plan that nobody searched for."""

from __future__ import annotations

import planning
import plans
import pytest

from shardwright import ComputeConfig
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import explain_operator
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
