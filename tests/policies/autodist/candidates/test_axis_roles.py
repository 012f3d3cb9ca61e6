"""Degrees that are fixed while the rest is searched."""

from __future__ import annotations

import itertools

import plans
import pytest
from planning import slow_machine

from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.candidates.axis_roles import check_degrees, meshes_with, role_of
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import Request
from shardwright.policies.autodist.questions.what_if import levers
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError

CONFIG = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)


def found_with(**options: object) -> tuple[Plan, float]:
    best = search(plans.zoo_graph("mlp"), CONFIG, AutodistOptions(**options), slow_machine(4)).best  # type: ignore[arg-type]
    assert best is not None and best.cost is not None
    return best.plan, best.cost.step_s


def roles(plan: Plan) -> dict[str, set[str]]:
    """The roles of the dims that each axis splits."""
    found: dict[str, set[str]] = {axis: set() for axis in plan.mesh.names}
    for by_axis in split_dim_names(plans.zoo_graph("mlp"), plan).values():
        for axis, dim in by_axis.items():
            found[axis].add(role_of(dim))
    return found


def test_a_degree_is_an_axis_of_its_own() -> None:
    """Whatever the best plan has otherwise."""
    free, least_s = found_with()
    plan, step_s = found_with(degrees={"tp": 2})
    split = roles(plan)
    assert (
        plan.mesh.axis_size("tp") == 2
        and plan.mesh.size == 4
        and all(own != {"tp"} for own in roles(free).values())
    )
    assert split["tp"] == {"tp"} and all(
        "tp" not in own for axis, own in split.items() if axis != "tp"
    )
    assert step_s >= least_s


def test_a_degree_of_one_leaves_the_dims_whole() -> None:
    plan, _ = found_with(degrees={"dp": 1, "sp": 1})
    assert set().union(*roles(plan).values()) == {"tp"}


def test_what_would_help_keeps_the_degrees() -> None:
    options = AutodistOptions(degrees={"tp": 2})
    graph, machine = plans.zoo_graph("mlp"), slow_machine(4)
    best = search(graph, CONFIG, options, machine).best
    assert best is not None
    listed = levers(Request(graph, CONFIG, options, machine, best))
    assert next(choice.step_s for choice in listed if choice.chosen) == pytest.approx(
        best.step_s, rel=1e-12
    )


def test_meshes() -> None:
    def listed(degrees: dict[str, int], size: int) -> set[str]:
        return {str(mesh) for mesh in meshes_with(degrees, size, 2)}

    assert listed({"tp": 2}, 8) == {"tp=2 x x=4", "x=4 x tp=2"}
    assert listed({"dp": 2, "tp": 2}, 8) == {
        " x ".join(order) for order in itertools.permutations(("dp=2", "tp=2", "x=2"))
    }
    assert listed({"tp": 4}, 4) == {"tp=4"} and listed({"tp": 4}, 6) == set()
    assert listed({"sp": 1}, 4) == {"x=4", "x=2 x y=2"}


def test_refusals() -> None:
    def refusal(degrees: dict[str, int], num_positions: int | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            check_degrees(degrees, 8, num_positions)
        return str(caught.value)

    assert (
        refusal({"pp": 2})
        == "option 'degrees' of policy 'autodist' has no 'pp'\n  try:   num_stages=2"
    )
    assert refusal({"mp": 2}).endswith("has no 'mp'\n  try:   one of 'dp', 'ep', 'sp', 'tp'")
    assert refusal({"tp": 0}).endswith("has tp=0\n  why:   a degree is at least 1")
    assert refusal({"tp": 4, "dp": 4}) == (
        "the degrees of policy 'autodist' do not divide the ranks: tp=4, dp=4\n"
        "  why:   their product is 16, and the plan has 8 ranks"
    )
    assert refusal({"tp": 4}, 4).endswith("their product is 4, and a pipeline position has 2 ranks")
