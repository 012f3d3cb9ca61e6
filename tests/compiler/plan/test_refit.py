"""A plan used again: other numbers of ranks, other input sizes, other models; and what is said when
it does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import pytest
import zoo
from covers import spread

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.refit import refit
from shardwright.frontend.verification.verify import verify
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh


def plan_of(graph: PlannableGraph, policy: str, num_ranks: int, **options: Any) -> Plan:
    """The plan as it comes back from its file."""
    config = ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_ranks,
        pas_config=options,
        use_end2end=policy in ("pp", "hybrid"),
    )
    made = find_policy(policy).apply(graph, config)
    plan = made.plan if isinstance(made, PlannableGraph) else made
    return Plan.from_json(json.loads(plan.dumps()))


def refusal(
    plan: Plan, graph: PlannableGraph, num_ranks: int, sizes: Mapping[str, int] | None = None
) -> str:
    with pytest.raises(PlanError) as caught:
        refit(plan, graph, num_ranks, sizes)
    return str(caught.value)


@pytest.fixture(scope="module")
def gpt() -> PlannableGraph:
    return plans.zoo_graph("gpt2")


def test_a_plan_fits_what_it_was_made_for(gpt: PlannableGraph) -> None:
    for policy in ("tp", "data", "hybrid"):
        plan = plan_of(gpt, policy, 4)
        assert refit(plan, gpt, 4) == plan


def test_one_axis_takes_all_ranks(gpt: PlannableGraph) -> None:
    assert refit(plan_of(gpt, "tp", 2), gpt, 4) == plan_of(gpt, "tp", 4)


def test_the_data_axis_takes_the_difference(gpt: PlannableGraph) -> None:
    plan = plan_of(gpt, "hybrid", 8, num_stages=2, dp=2)
    moved = refit(plan, gpt, 4)
    assert moved.mesh == Mesh((("pp", 2), ("dp", 1), ("tp", 2)))
    assert [stage.ranks for stage in moved.stages] == [(0, 1), (2, 3)]
    assert {stage.mesh for stage in moved.stages} == {Mesh((("dp", 1), ("tp", 2)))}
    assert refit(plan, gpt, 16, {"tp": 4}).mesh == Mesh((("pp", 2), ("dp", 2), ("tp", 4)))


def test_inputs_get_the_sizes_of_now(gpt: PlannableGraph) -> None:
    plan = plan_of(gpt, "data", 2)
    name, value = gpt.inputs[0].name, gpt.inputs[0]
    old = Layout.parse(f"[{value.shape[0] * 3}/dp, {value.shape[1]}]")
    assert refit(replace(plan, inputs={name: old}), gpt, 2).inputs == {
        name: Layout.parse(f"[{value.shape[0]}/dp, {value.shape[1]}]")
    }


@pytest.mark.parametrize(("made_for", "used_on"), spread([(2, 3), (4, 2)], 2))
def test_a_saved_plan_trains_on_other_ranks(made_for: int, used_on: int, tmp_path: Path) -> None:
    entry = zoo.get("gpt2")
    (tmp_path / "plan.json").write_text(plan_of(plans.zoo_graph("gpt2"), "tp", made_for).dumps())
    config = {
        "plan_ngpus": used_on,
        "runtime_ngpus": used_on,
        "pas_config": {"load_plan_path": str(tmp_path / "plan.json")},
    }
    report = verify(entry.build(), entry.inputs(), "saved", config, steps=2)
    assert report.ok, str(report)


def test_everything_that_does_not_fit_is_listed(gpt: PlannableGraph) -> None:
    plan = plan_of(gpt, "tp", 2)
    edited = replace(
        plan,
        strategies={
            **plan.strategies,
            "no_such_op": {"tp": "split:n"},
            gpt.ops[-1].name: {"tp": "split:nothing"},
        },
        stored={**plan.stored, "transformer.wte.weight": Layout.parse("[7/tp, 5]")},
    )
    text = refusal(edited, gpt, 2)
    assert text.startswith(
        "the plan does not fit this model on 2 ranks\n  why:   the model has no operator "
        "'no_such_op'\n"
    )
    assert (
        f"operator {gpt.ops[-1].name} ({gpt.ops[-1].target}) cannot follow 'split:nothing' "
        "over tp=2" in text
    )
    assert "layout [7/tp, 5] does not fit transformer.wte.weight: its shape is [" in text
    assert text.endswith("  try:   edit the plan where it says, or plan anew")


def test_refusals_of_meshes(gpt: PlannableGraph) -> None:
    plan = plan_of(gpt, "hybrid", 8, num_stages=2, dp=2)
    assert refusal(plan, gpt, 8, {"tpp": 4}) == (
        "the plan has no mesh axis 'tpp'\n  why:   its mesh is pp=2 x dp=2 x tp=2\n  try:   "
        "did you mean 'tp'?"
    )
    assert refusal(plan, gpt, 6) == (
        "the plan's mesh pp=2 x dp=2 x tp=2 is for 8 ranks, not 6\n"
        "  why:   the axes but 'dp' have 4 ranks\n"
        "  try:   say the sizes of the axes, for example mesh={'pp': 2, 'dp': 2, 'tp': 2}"
    )
    assert refusal(plan, gpt, 16, {"pp": 4}) == (
        "the stages of the plan cannot be dealt out on mesh pp=4 x dp=2 x tp=2\n"
        "  why:   a stage keeps its operators only if it keeps its place along 'pp', and all "
        "stages have equal meshes\n"
        "  try:   keep the sizes of mesh pp=2 x dp=2 x tp=2, or plan anew"
    )


def test_another_model_is_refused() -> None:
    text = refusal(plan_of(plans.zoo_graph("gpt2"), "tp", 2), plans.zoo_graph("llama"), 2)
    assert text.startswith(
        "the plan does not fit this model on 2 ranks\n  why:   the model has no operator '"
    )
    assert "more\n  try:" in text


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "Expecting property name"), ("[]", "the file holds"), ("{}", "key 'mesh'")],
)
def test_a_file_that_is_no_plan(text: str, why: str, tmp_path: Path, gpt: PlannableGraph) -> None:
    path = tmp_path / "plan.json"
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, pas_config={"load_plan": str(path)})
    with pytest.raises(PlanError, match="no plan can be read from"):
        find_policy("saved").apply(gpt, config)
    path.write_text(text)
    with pytest.raises(PlanError, match=f"holds no plan\n  why:   {why}"):
        find_policy("saved").apply(gpt, config)


def test_batch_and_ranks_change_at_once(gpt: PlannableGraph) -> None:
    """Where the plan does not fit, the dims and sizes say why."""
    plan = plan_of(gpt, "data", 4)
    assert refit(plan, plans.zoo_graph("gpt2", batch=8), 8) == plan_of(
        plans.zoo_graph("gpt2", batch=8), "data", 8
    )
    attention = [op.name for op in gpt.ops if op.target == "scaled_dot_product_attention"]
    rule = next(op.rule.annotation for op in gpt.ops if op.rule and op.name == attention[0])
    refused = "\n         ".join(
        f"operator {name} (scaled_dot_product_attention) cannot follow 'split:b0' over dp=8: "
        "'b0' (batch) has 6 elements "
        f"for 8 ranks, and it cannot run on a rank without any; its rule is {rule!r}"
        for name in attention
    )
    assert refusal(plan, plans.zoo_graph("gpt2", batch=6), 8) == (
        f"the plan does not fit this model on 8 ranks\n  why:   {refused}\n  try:   edit the "
        "plan where it says, or plan anew"
    )


@pytest.mark.slow
def test_a_searched_plan_trains_with_another_batch_on_other_ranks(tmp_path: Path) -> None:
    entry, graph, path = zoo.get("gpt2"), plans.zoo_graph("gpt2", batch=4), tmp_path / "plan.json"
    path.write_text(
        plan_of(graph, "autodist", 4, mesh={"dp": 2, "tp": 2}, time_limit_s=3600.0).dumps()
    )
    config = {
        "plan_ngpus": 8,
        "runtime_ngpus": 8,
        "pas_config": {"load_plan": str(path), "mesh": {"tp": 4}},
    }
    report = verify(entry.build(), entry.inputs(batch=6), "saved", config, steps=2)
    assert report.ok and report.mesh == Mesh((("dp", 2), ("tp", 4))), str(report)
