"""What is said of plans that are bound by launches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import planning
import plans
import pytest

from shardwright import ComputeConfig
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.launches import bound_by_launches
from shardwright.policies.autodist.questions.saved_plans import request_of_plan
from shardwright.policies.known_policies import find_policy


@pytest.mark.parametrize(
    ("ranks", "words"), [(2, "use fewer ranks, or larger"), (1, "larger microbatches cost little")]
)
def test_it_is_said_of_a_plan_that_launches_bind(ranks: int, words: str) -> None:
    graph, machine = plans.zoo_graph("mlp"), planning.slow_machine(2)
    config = ComputeConfig(plan_ngpus=ranks, runtime_ngpus=ranks)
    plan = find_policy("tp").apply(graph, config).plan
    said = []
    for launch_s in (0.0, 1e3):
        slow = replace(machine, device=replace(machine.device, launch_s=launch_s))
        request = request_of_plan(graph, config, AutodistOptions(), slow, plan)
        auditor = partial(lambda r, on: replace(r, hardware=on).auditor(plan).step_s, request)
        said.append(bound_by_launches(request.best.step_s, slow, auditor, ranks))
    nothing, told = said
    assert nothing is None and told is not None
    assert told.startswith("bound by launches: of ") and words in told
