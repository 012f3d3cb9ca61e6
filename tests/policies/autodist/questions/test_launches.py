"""What is said of plans that launches bind, whose ranks repeat work, or that may wait for hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import planning
import plans
import pytest

from shardwright import ComputeConfig, load_hardware
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import Request
from shardwright.policies.autodist.questions.launches import (
    bound_by_launches,
    host_unknown,
    repeated_work,
)
from shardwright.policies.autodist.questions.saved_plans import request_of_plan
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.layout import Layout, Mesh

LAUNCH, LATENCY = "launch_s", "latency_s"


@pytest.mark.parametrize(
    ("policy", "ranks", "config", "wait", "words"),
    [
        ("tp", 2, {}, (LAUNCH, 1e3), "; use fewer ranks, or larger microbatches"),
        ("tp", 1, {}, (LAUNCH, 1e3), "; larger microbatches cost little more"),
        # Each rank of a pipeline would launch the operators of another one, too.
        ("pp", 2, {"use_end2end": True}, (LAUNCH, 1e3), "; use larger microbatches"),
        # Half of the ranks would have almost twice the work, as they wait little more than half of
        # the time.
        ("dp", 64, {}, (LATENCY, 1.5), "; use larger microbatches"),
        ("dp", 64, {}, (LATENCY, 10.0), "; use fewer ranks, or larger microbatches"),
        # Several messages, where one would do: 12 latencies, along a tree of 64 ranks and back.
        (
            "dp",
            64,
            {"reducer_bucket_cap_mb": 0.001},
            (LATENCY, 1.0),
            "; use larger buckets of gradients (reducer_bucket_cap_mb=512: 26.8 s)",
        ),
        (
            "dp",
            64,
            {"distributed_optimizer": {"bucket_cap_mb": 0.001}, "use_zero": 0},
            (LATENCY, 10.0),
            "; use larger buckets of gradients (distributed_optimizer.bucket_cap_mb=512: 135 s), "
            "or fewer ranks, or larger microbatches",
        ),
    ],
)
def test_it_is_said_of_a_plan_that_launches_bind(
    policy: str, ranks: int, config: dict[str, Any], wait: tuple[str, float], words: str
) -> None:
    """And what would help: fewer ranks only where they lose little."""
    graph, machine = plans.zoo_graph("mlp"), planning.slow_machine(ranks)
    unit = 1 if policy == "dp" else ranks
    asked = ComputeConfig(plan_ngpus=unit, runtime_ngpus=ranks, **config)
    applied = find_policy(policy).apply(graph, asked)
    plan = applied if isinstance(applied, Plan) else applied.plan
    assert plan is not None
    name, seconds = wait
    long = {name: seconds}
    if name == LATENCY:
        slow = replace(machine, tiers=tuple(replace(tier, **long) for tier in machine.tiers))
    else:
        slow = replace(machine, device=replace(machine.device, **long))
    said = []
    for on in (machine, slow):
        request = request_of_plan(graph, asked, AutodistOptions(), on, plan)

        def step_on(on: Hardware, config: ComputeConfig, request: Request = request) -> float:
            elsewhere = replace(request, hardware=on, config=config)
            step_s = request.step_on(on, config)
            assert step_s == elsewhere.auditor(plan).step_s
            return step_s

        said.append(bound_by_launches(plan, request.best.step_s, on, asked, step_on))
    nothing, told = said
    assert nothing is None and told is not None
    assert told.startswith("bound by launches: of ") and told.endswith(f"messages{words}")


def test_ranks_that_do_what_others_do_are_counted() -> None:
    """And the plan without them takes as long, as is said."""
    graph, machine = plans.zoo_graph("mlp"), planning.slow_machine(16)

    def step_s(plan: Plan) -> float:
        ranks = plan.mesh.size
        config = ComputeConfig(plan_ngpus=ranks, runtime_ngpus=2 * ranks, use_zero=1)
        return request_of_plan(graph, config, AutodistOptions(), machine, plan).best.step_s

    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=4)
    plan = find_policy("tp").apply(graph, config).plan
    copied = replace(plan, mesh=Mesh((("copies", 2), *plan.mesh.axes, ("x", 2))))
    assert [repeated_work(plan, 2), step_s(copied)] == [None, pytest.approx(step_s(plan))]
    assert repeated_work(copied, 2) == (
        "repeated work: 12 of 16 ranks do what others do already, as copies=2 and x=2 split "
        "nothing; the plan on 4 ranks is as fast: use fewer ranks, or more units (plan_ngpus=2)"
    )
    # Stored pieces are no copies, though no operator splits anything along the axis.
    stored = {"down.weight": Layout.parse("[8/x, 16]")}
    assert "as copies=2 splits" in str(repeated_work(replace(copied, stored=stored), 2))


def test_copies_are_counted_in_every_stage() -> None:
    """Two stages of two ranks, of which those of the second do the same."""
    halves = (
        StagePlan("up", Mesh.of({"tp": 2}), (0, 1)),
        StagePlan("down", Mesh.of({"x": 2}), (2, 3)),
    )
    plan = Plan(Mesh.of({"pp": 4}), {"up": {"tp": "split:n"}}, stages=halves)
    told = repeated_work(plan, 1)
    assert told is not None and told.startswith("repeated work: 1 of 4 ranks do what")
    assert "as x=2 splits nothing; the plan on 3 ranks is as fast" in told
    # A position that runs two stages has its ranks once.
    again = replace(halves[1], first_op="loss")
    assert repeated_work(replace(plan, stages=(*halves, again)), 1) == told


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
