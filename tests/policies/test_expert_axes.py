"""Experts on other axes than the rest of the model: which axes there are, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import expert_models
import plans
import pytest
from expert_models import BY_HAND

from shardwright.policies.expert_axes import expert_axes
from shardwright.runtime.errors import PlanError


@pytest.mark.parametrize(
    ("dp", "tp", "ep", "etp", "axes"),
    [
        (4, 1, 4, 1, "ep=4 dp/ep"),
        (4, 1, 2, 2, "ep=2 dp/ep, etp=2 dp/etp"),
        (4, 2, 4, 2, "ep=4 dp/ep, tp=2 tp/etp"),
        (4, 2, 2, 2, "dp=2 dp/edp, ep=2 dp/ep, tp=2 tp/etp"),
        (2, 2, 4, 1, "ep=2 dp/ep, tp_ep=2 tp/ep"),
        (2, 4, 2, 2, "dp=2 dp/edp, tp_ep=2 tp/ep, tp=2 tp/etp"),
        (1, 4, 1, 1, "tp_edp=4 tp/edp"),
        (2, 2, 1, 4, "etp=2 dp/etp, tp=2 tp/etp"),
        (3, 1, 3, None, "ep=3 dp/ep"),
        (2, 4, 4, None, "ep=2 dp/ep, tp_ep=2 tp/ep, tp=2 tp/etp"),
        (1, 1, 1, None, ""),
        (8, 1, (2, 4), 1, "ep=2 dp/ep, ep2=4 dp/ep"),
        (8, 2, (2, 2), 2, "dp=2 dp/edp, ep=2 dp/ep, ep2=2 dp/ep, tp=2 tp/etp"),
        (2, 8, (4, 4), 1, "ep=2 dp/ep, tp_ep=2 tp/ep, tp_ep2=4 tp/ep"),
        (4, 1, (4,), 1, "ep=4 dp/ep"),
    ],
)
def test_the_common_refinement_of_both_grids(
    dp: int, tp: int, ep: int | tuple[int, ...], etp: int | None, axes: str
) -> None:
    found = expert_axes(dp, tp, ep, etp, "hybrid")
    shown = (f"{axis.name}={axis.size} {axis.outside}/{axis.inside}" for axis in found)
    assert ", ".join(shown) == axes


def test_every_refinement_has_the_sizes_that_were_asked_for() -> None:
    refused = 0
    for dp, tp, ep, etp in ((a, b, c, d) for a in R for b in R for c in R for d in (None, *R)):
        try:
            axes = expert_axes(dp, tp, ep, etp, "hybrid")
        except PlanError:
            refused += 1
            assert etp is not None or (dp * tp) % ep
            continue
        sizes = {
            role: math.prod(a.size for a in axes if role in (a.outside, a.inside))
            for role in ("dp", "tp", "ep", "etp", "edp")
        }
        assert (sizes["dp"], sizes["tp"], sizes["ep"]) == (dp, tp, ep)
        assert etp in (None, sizes["etp"])
        assert sizes["edp"] * sizes["ep"] * sizes["etp"] == dp * tp
        assert len({axis.name for axis in axes}) == len(axes)
    assert refused


@pytest.mark.parametrize(
    ("dp", "context", "tp", "ep", "etp", "axes"),
    [
        (2, [("cp", 2)], 1, 4, 1, "ep=2 dp/ep, cp=2 cp/ep"),
        (2, [("cp", 2)], 2, 2, 2, "dp=2 dp/edp, cp=2 cp/ep, tp=2 tp/etp"),
        (1, [("cp", 2), ("cp2", 2)], 1, 2, 1, "cp=2 cp/edp, cp2=2 cp2/ep"),
        (1, [("cp", 4)], 1, 1, 4, "cp=4 cp/etp"),
    ],
)
def test_experts_over_the_ranks_of_a_sequence(
    dp: int, context: Any, tp: int, ep: int, etp: int, axes: str
) -> None:
    found = expert_axes(dp, tp, ep, etp, "hybrid", context)
    assert ", ".join(f"{a.name}={a.size} {a.outside}/{a.inside}" for a in found) == axes


def test_a_part_of_a_sequence_is_no_place_for_experts() -> None:
    with pytest.raises(PlanError) as caught:
        expert_axes(1, 1, 2, 1, "hybrid", [("cp", 4)])
    assert (
        str(caught.value)
        == """\
policy 'hybrid' cannot place ep=2 x etp=1 on a part of cp=4
  why:   its ranks would be edp=2 x ep=2 for the experts
  try:   sizes of ep and etp for which cp is all of one kind, or two axes: cp=[2, 2]"""
    )


R = (1, 2, 3, 4, 6, 8)


def refusal(model: str, policy: str, num_ranks: int, **options: Any) -> str:
    entry = expert_models.get(model) if model == BY_HAND else None
    graph = plans.traced(entry.build(), entry.inputs()) if entry else plans.zoo_traced(model)
    end2end = policy == "hybrid"
    with pytest.raises(PlanError) as caught:
        plans.compile_with(graph, policy, num_ranks, pas_config=options, use_end2end=end2end)
    return str(caught.value)


@pytest.mark.parametrize(
    ("policy", "num_ranks", "options", "message"),
    [
        (
            "ep",
            4,
            {"ep": 3},
            """\
policy 'ep' cannot place ep=3 on 4 ranks
  why:   experts lie on the ranks that are dp=4 x tp=1 outside of them
  try:   ep is one of 1, 2, 4""",
        ),
        (
            "ep",
            4,
            {"ep": [2, 3]},
            """\
policy 'ep' cannot place ep=[2, 3] on 4 ranks
  why:   experts lie on the ranks that are dp=4 x tp=1 outside of them
  try:   the product of ep is one of 1, 2, 4""",
        ),
        (
            "ep",
            8,
            {"ep": (2, 2, 2)},
            """\
policy 'ep' cannot place ep=[2, 2, 2] on ranks
  try:   pass a number of ranks, or those of nodes and of ranks within each""",
        ),
        (
            "tp",
            2,
            {"ep": 4},
            """\
policy 'tp' cannot place ep=4 on 2 ranks
  why:   experts lie on the ranks that are dp=1 x tp=2 outside of them
  try:   ep is one of 1, 2""",
        ),
        (
            "ep",
            2,
            {"ep": 1, "etp": 4},
            """\
policy 'ep' cannot place ep=1 x etp=4 on 2 ranks
  why:   these are 4 ranks, which do not divide 2
  try:   with ep=1, etp is one of 1, 2""",
        ),
        (
            "ep",
            4,
            {"ep": 0},
            """\
policy 'ep' cannot place ep=0 on 4 ranks
  why:   experts lie on the ranks that are dp=4 x tp=1 outside of them
  try:   ep is one of 1, 2, 4""",
        ),
        (
            "tp",
            4,
            {"ep": 0},
            """\
policy 'tp' cannot place ep=0 on 4 ranks
  why:   experts lie on the ranks that are dp=1 x tp=4 outside of them
  try:   ep is one of 1, 2, 4""",
        ),
        (
            "hybrid",
            4,
            {"dp": 4, "ep": 0},
            """\
policy 'hybrid' cannot place ep=0 on 4 ranks
  why:   experts lie on the ranks that are dp=4 x tp=1 outside of them
  try:   ep is one of 1, 2, 4""",
        ),
        (
            "hybrid",
            6,
            {"num_stages": 1, "dp": 2, "tp": 3, "ep": 2, "etp": 2},
            """\
policy 'hybrid' cannot place ep=2 x etp=2 on 6 ranks
  why:   these are 4 ranks, which do not divide 6
  try:   with ep=2, etp is one of 1, 3""",
        ),
    ],
)
def test_sizes_that_ranks_do_not_have(
    policy: str, num_ranks: int, options: dict[str, int], message: str
) -> None:
    assert refusal(BY_HAND, policy, num_ranks, **options) == message


@pytest.mark.parametrize(("policy", "options"), [("ep", {}), ("tp", {"ep": 2}), ("tp", {"etp": 1})])
def test_a_model_without_experts(policy: str, options: dict[str, int]) -> None:
    message = refusal("mlp", policy, 2, **options)
    assert message.startswith(f"policy {policy!r} finds no experts to split\n")
    assert "no tokens are dispatched to several experts in this model" in message


def test_an_option_that_does_not_exist_is_refused() -> None:
    entry = expert_models.get(BY_HAND)
    graph = plans.traced(entry.build(), entry.inputs())
    with pytest.raises(Exception, match="edp"):
        plans.compile_with(graph, "ep", 2, pas_config={"edp": 2})
