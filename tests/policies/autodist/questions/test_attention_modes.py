"""What is said of other ways of attention over a split sequence."""

from __future__ import annotations

import math

import planning
import plans
import pytest

from shardwright import ComputeConfig
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.attention_modes import attention_modes
from shardwright.policies.autodist.questions.explain import Request
from shardwright.policies.autodist.questions.saved_plans import request_of_plan
from shardwright.policies.known_policies import find_policy

RING, GATHER, ULYSSES = (
    "ring: keys go round",
    "gather: keys are gathered",
    "ulysses: heads are cut",
)
ZIGZAG = ", positions in zigzag"


def asked(policy: str, num_ranks: int, model: str = "llama", **options: object) -> Request:
    graph, machine = plans.zoo_graph(model), planning.slow_machine(num_ranks, bytes_per_s=1e9)
    end2end = policy == "hybrid"
    config = ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_ranks,
        use_end2end=end2end,
        outputs="loss",
        pas_config=options,
    )
    found = find_policy(policy).apply
    plan = plans.compile_graph(graph, found, config, policy_name=policy).plan
    return request_of_plan(graph, config, AutodistOptions(), machine, plan)


@pytest.mark.slow
def test_every_way_is_what_the_policy_would_take() -> None:
    """Each row is the step of the plan that ``cp`` makes with this mode."""
    first, *others = attention_modes(asked("cp", 2, cp_mode="ring"))
    assert first.chosen and first.name == f"cp: {RING}{ZIGZAG}"
    found = {choice.name.split(", 0")[0].rsplit(", ", 1)[0]: choice for choice in others}
    assert set(found) == {f"cp: {way}" for way in (RING, GATHER, f"{GATHER}{ZIGZAG}", ULYSSES)}
    for name, options in (
        (RING, {"cp_mode": "ring", "cp_turns": 0}),
        (GATHER, {"cp_mode": "gather", "cp_turns": 0}),
        (f"{GATHER}{ZIGZAG}", {"cp_mode": "gather"}),
    ):
        cost = asked("cp", 2, **options).best.cost
        assert cost is not None
        assert found[f"cp: {name}"].step_s == pytest.approx(cost.step_s)


def test_too_few_heads_are_said_in_words() -> None:
    rows = attention_modes(asked("cp", 4, cp_mode="ring"))
    (row,) = [row for row in rows if ULYSSES in row.name]
    assert row.step_s == math.inf
    assert "has no head for each of 4 ranks" in row.name


def test_stages_have_their_own_meshes_and_other_plans_have_no_such_question() -> None:
    options = {"num_stages": 2, "tp": 1, "cp": 2, "cp_mode": "gather", "num_microbatches": 2}
    first, *others = attention_modes(asked("hybrid", 4, **options))
    assert first.name == f"cp: {GATHER}{ZIGZAG}" and len(others) == 4
    assert all(choice.step_s < math.inf for choice in others)
    assert attention_modes(asked("tp", 2)) == []
