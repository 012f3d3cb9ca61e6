"""What is said of plans that are bound by launches, or by a host of which nothing is known."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import planning
import plans
import pytest

from shardwright import ComputeConfig, load_hardware
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.plan.amounts import amount
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.launches import bound_by_launches, host_unknown
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


def test_a_machine_that_says_nothing_of_its_host_is_told_of() -> None:
    graph, config = plans.zoo_graph("mlp"), ComputeConfig(plan_ngpus=1, runtime_ngpus=1)
    plan = find_policy("dp").apply(graph, config).plan
    silent = load_hardware("h100", 1)
    request = request_of_plan(graph, config, AutodistOptions(), silent, plan)

    def step_on(machine: Hardware) -> float:
        return replace(request, hardware=machine).auditor(plan).step_s

    def told(machine: Hardware) -> str | None:
        return host_unknown(step_on(machine), machine, step_on)

    # Three linears, two GELUs and a mean have 20 us each to be launched, and 5 us to run.
    text = told(silent)
    assert text is not None and text.startswith("host not counted: h100 does not say how long")
    with_host = replace(silent, device=replace(silent.device, queue_s=(20e-6, 20e-6)))
    assert f"a step takes {amount(step_on(with_host), 's')} and not " in text
    assert "shardwright calibrate" in text and "queue_s" in text
    # Whose host is known, or has little to launch for the work, is told nothing.
    measured = replace(silent, measurements={"device.launch_s": [5e-6]})
    slow = replace(silent, device=replace(silent.device, launch_s=1e-3))
    assert [told(machine) for machine in (with_host, measured, slow)] == [None, None, None]
