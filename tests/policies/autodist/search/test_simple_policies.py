"""Plans of the simple policies as the floor of a search: where its own placements are poor, it
answers with one of those.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import expert_models
import plans
import pytest
from covers import spread
from planning import slow_machine

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.passes.dim_names import EXPERTS
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.mesh_requests import (
    MeshRequest,
    PipelineMesh,
    PlacedModel,
)
from shardwright.policies.autodist.candidates.meshes import divisors, meshes, position_ranks
from shardwright.policies.autodist.candidates.results import Candidate, CutRequest, SearchResult
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.cutting.cut_bounds import Waits
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.placement.constraints import Constraints
from shardwright.policies.autodist.search import mesh_pace, simple_policies
from shardwright.policies.autodist.search import search as outer_search
from shardwright.policies.autodist.search import simple_plans as simple_plans_file
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.policies.autodist.search.certificate import certificate
from shardwright.policies.autodist.search.search import Search
from shardwright.policies.autodist.search.search_state import SearchState
from shardwright.policies.autodist.search.simple_plans import (
    SimplePlan,
    simple_plans,
)
from shardwright.policies.autodist.search.simple_policies import SimplePolicies
from shardwright.policies.autodist.search.simple_rules import Rules
from shardwright.policies.autodist.stages.walk import Setting
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

NUM_MICROBATCHES = 4
SIMPLE: list[tuple[str, dict[str, Any]]] = [
    ("tp", {}),
    ("data", {}),
    ("pp", {}),
    ("hybrid", {"num_stages": 2, "tp": 2}),
    ("hybrid", {"num_stages": 2, "tp": 1, "dp": 2, "schedule": "zb_h1"}),
    ("hybrid", {"num_stages": 1, "tp": 2, "dp": 2}),
    ("tensor", {"mode": "2d"}),
]
"""Policies and their options, on four ranks."""


def poor(mesh_request: MeshRequest) -> PlacedModel:
    """Every rank computes everything; nothing takes less than nothing."""
    return PlacedModel(
        plans.zoo_graph("mlp").builder(mesh=dict(mesh_request.mesh.axes)).plan("poor"),
        0.0,
        "none",
        "poor",
    )


def searched(simple: bool, **fields: Any) -> tuple[Search, SearchResult]:
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss")
    every = {n: meshes(n) for n in divisors(4)}
    given = {
        "meshes": every,
        "num_microbatches": NUM_MICROBATCHES,
        "schedules": ("1f1b", "zb_h1"),
        "mixed": False,
    }
    clock = fields.pop("clock", None)
    space = SearchSpace(**given | fields, simple=simple)
    search = Search(
        plans.zoo_graph("mlp"), config, slow_machine(4, bytes_per_s=1e9), space, poor, clock=clock
    )
    return search, search.run()


def all_made(*args: Any, **options: Any) -> list[SimplePlan]:
    """The plans of all steps."""
    return [simple for simple in simple_plans(*args, **options) if simple is not None]


class Placings(Clock):
    """Placing the model on a mesh takes a second, and nothing else takes any time."""

    num_placed = 0

    @property
    def seconds(self) -> float:
        return float(self.num_placed)


def in_time(limit_s: float, memory_bytes: float = math.inf) -> tuple[Search, SearchResult]:
    """A search that time ends."""
    clock = Placings(limit_s)

    def slowly(mesh_request: MeshRequest) -> PlacedModel:
        clock.num_placed += 1
        return poor(mesh_request)

    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss")
    every = {n: meshes(n) for n in divisors(4)}
    space = SearchSpace(
        meshes=every, num_microbatches=NUM_MICROBATCHES, schedules=("1f1b", "zb_h1"), mixed=False,
        simple=True, audits=1,
        memory_bytes=memory_bytes,
    )  # fmt: skip
    search = Search(
        plans.zoo_graph("mlp"), config, slow_machine(4, bytes_per_s=1e9), space, slowly, clock=clock
    )
    return search, search.run()


def costs(search: Search) -> list[PlanCost]:
    found = []
    for policy, options in SIMPLE:
        given = options | ({"num_microbatches": NUM_MICROBATCHES} if policy == "hybrid" else {})
        config = replace(search.config, pas_config=given)
        made = find_policy(policy).apply(search.graph, config)
        plan = made if isinstance(made, Plan) else made.plan
        found.append(search.auditor(replace(plan, outputs=output_wishes(search.graph, config))))
    return found


def test_two_axes_are_those_of_a_mode_of_tensor_parallelism_too() -> None:
    """2d holds a quarter of everything, and gathers it for each product: what it takes is what its
    policy takes.
    """
    search = searched(simple=False)[0]
    policy, _ = SIMPLE[-1]
    expected = costs(search)[-1]
    setting = Setting(
        slow_machine(4, bytes_per_s=1e9), search.config, (0, 1, 2, 3),
        num_microbatches=NUM_MICROBATCHES,
    )  # fmt: skip
    mesh, whole = Mesh((("x", 2), ("y", 2))), [NamedSchedule("", 1)]
    found = all_made(search.graph, mesh, whole, 1, 0, search.space, setting)
    (of_mode,) = (simple for simple in found if simple.whose == "mode 2d (again)")
    made = search.auditor(of_mode.plan)
    assert policy == "tensor" and of_mode.plan.mesh.names == ("dp", "tp")
    assert (made.step_s, made.peak_bytes) == (expected.step_s, expected.peak_bytes)


@pytest.mark.parametrize("tight", spread([False, True], 2, first=1))
def test_a_search_of_poor_placements_answers_with_a_simple_plan(tight: bool) -> None:
    known = costs(searched(simple=False)[0])
    memory = sorted(cost.peak_bytes for cost in known)[1] if tight else float("inf")
    fitting = [cost.step_s for cost in known if cost.peak_bytes <= memory]
    without = searched(simple=False, memory_bytes=memory)[1].best
    made, all_found = searched(simple=True, memory_bytes=memory)
    found = all_found.best
    assert found is not None and found.step_s <= min(fitting)
    # A pipeline of single ranks is the same in any placement, and the search cuts it as well as
    # they do
    if not tight:
        assert without is not None and found.step_s <= without.step_s
        return
    assert found.title.endswith(" has it")
    assert without is None or without.step_s > found.step_s
    assert found.cost is not None and found.cost.peak_bytes <= memory
    # Placements here have no bounds.
    told = certificate(replace(all_found, arithmetic_bound_s=0.0), found, made.state.hardware)
    assert told.cost_s == found.step_s >= told.bound_s
    assert (
        "the bound is of other placements: the plan is a simple policy's, which the search "
        "has not bettered" in told.proof
    )


def test_tp_on_two_axes_is_among_them() -> None:
    """The model is one with fewer groups of heads than ranks."""
    graph = plans.zoo_graph("llama")
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, outputs="loss")
    whole_batch = Constraints(forbid={"batch": ("x", "y")})
    space = SearchSpace(
        meshes={4: [Mesh((("x", 2), ("y", 2)))]}, num_microbatches=1, num_positions=1, mixed=False,
        simple=True,
        zigzag=False,
        constraints=lambda mesh: whole_batch,
    )  # fmt: skip

    def whole(mesh_request: MeshRequest) -> PlacedModel:
        return PlacedModel(
            graph.builder(mesh=dict(mesh_request.mesh.axes)).plan("poor"), 0.0, "none", "poor"
        )

    search = Search(graph, config, slow_machine(4, bytes_per_s=1e9), space, whole)
    made = find_policy("tp").apply(graph, config)
    assert (
        not isinstance(made, Plan)
        and made.plan is not None
        and str(made.plan.mesh) == "tp=2 x tp2=2"
    )
    cost = search.auditor(replace(made.plan, outputs=output_wishes(graph, config)))
    best = search.run().best
    assert (
        best is not None and best.is_simple and best.step_s == pytest.approx(cost.step_s, rel=1e-12)
    )


@pytest.mark.parametrize("limit_s", [2.5, 4.5])
def test_a_search_that_time_ends_is_held_to_the_simple_policies_too(limit_s: float) -> None:
    """Also on meshes that it has not come to."""
    search, found = in_time(limit_s)
    assert found.interrupted == f"the time limit of {limit_s} s" and found.best is not None
    assert found.best.step_s <= min(cost.step_s for cost in costs(search))
    # With more time all of their plans take longer by their bounds.
    assert not found.not_compared and len(found.compared) == (1 if limit_s == 2.5 else 0)
    assert "the simple policies may" not in str(
        certificate(found, found.best, search.state.hardware)
    )


def test_where_there_was_no_time_for_the_simple_policies_is_said() -> None:
    search, found = in_time(0.5)
    assert found.best is not None
    assert {each.title for each in found.not_compared} == {"x=4", "x=2 x y=2", "pp=2 x x=2", "pp=4"}
    told = certificate(found, found.best, search.state.hardware).proof
    assert any(
        "there was no time to compare it with those on 4 meshes, the most likely of them: "
        in sentence
        for sentence in told
    )


def test_a_mesh_whose_plans_are_not_all_made_goes_on_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits as long as there is any time, however little is dealt out at once."""
    search, found = searched(simple=True)
    assert found.best is not None
    simple_policies = SimplePolicies(search.state, search.audits)
    found.audited.clear()
    monkeypatch.setattr(Clock, "spent", lambda clock, more_s=0.0: 2.0)
    monkeypatch.setattr(SimplePolicies, "_has_time", lambda simple_policies, *kinds: True)
    left = [PipelineMesh(number, mesh, 0) for number in divisors(4) for mesh in meshes(4 // number)]
    simple_policies.run([], left)
    assert simple_policies._compared == set(left) and search.result.best is not None
    assert search.result.best.step_s <= min(cost.step_s for cost in costs(search))


def test_schedules_that_are_looked_at_in_vain_end_with_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes 10 s, and none of them gives a plan."""
    clock, took_s = Placings(35.0), 10.0
    looked_at: list[CutRequest] = []

    def in_vain(cutter: object, asked: CutRequest, below_s: float) -> bool:
        clock.num_placed += int(took_s)
        looked_at.append(asked)
        return True

    monkeypatch.setattr(simple_plans_file, "_is_beaten", in_vain)
    found = searched(simple=True, clock=clock, schedules=("1f1b", "gpipe", "zb_h1", "zb_v"))[1]
    assert found.best is not None and clock.seconds == len(looked_at) * took_s
    assert 20.0 <= clock.seconds <= 35.0 + took_s
    assert found.not_compared  # which the certificate tells


@pytest.mark.parametrize(("estimates_s", "took_s"), [(0.0, 19), (20.0, 80)])
def test_a_first_plan_is_looked_for_in_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, estimates_s: float, took_s: int
) -> None:
    """Each step takes a second of 100, and the first 80 give no plan. A fifth of what is not kept
    for later goes into them, unless there is time for little else.
    """
    clock = Placings(100.0)

    def in_vain(*args: Any, **options: Any) -> Iterator[SimplePlan | None]:
        for _ in range(80):
            clock.num_placed += 1
            yield None

    search, found = searched(simple=True, clock=clock)
    found.audited.clear()
    found.others.clear()
    monkeypatch.setattr(simple_policies, "simple_plans", in_vain)
    monkeypatch.setattr(SearchState, "estimates_s", estimates_s)
    begun = SimplePolicies(search.state, search.audits)
    begun.begin([PipelineMesh(2, mesh, 0) for mesh in meshes(2)])
    assert clock.num_placed == took_s and not begun._tried


def test_what_an_audit_finds_too_large_leaves_out_what_holds_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first plan holds 60 of 80 GB by its parts, and 95 by its audit. One of 50 GB is passed
    over then, and one of 40 tried.
    """
    search, found = searched(simple=True)
    found.audited.clear()
    made = all_made(
        search.graph, meshes(2)[0], [NamedSchedule("1f1b", 1)], 2, 0, search.space,
        search.state.setting((0, 1)),
    )[0]  # fmt: skip
    listed = [
        replace(made, least_s=least_s, least_bytes=partial(parts_of, held))
        for least_s, held in ((1.0, 60.0), (2.0, 50.0), (3.0, 40.0))
    ]
    search.audits.space = replace(search.space, memory_bytes=80.0)
    begun = SimplePolicies(search.state, search.audits)
    begun.space = search.audits.space
    monkeypatch.setattr(simple_policies, "simple_plans", lambda *args: iter(listed))
    tried: list[float] = []

    def audited(policies: SimplePolicies, simple: SimplePlan, *args: object) -> None:
        tried.append(simple.least_bytes())
        cost = SimpleNamespace(peak_bytes=simple.least_bytes() + 35.0)
        policies.audits.too_large.append(cast(Any, (simple, cost)))

    monkeypatch.setattr(SimplePolicies, "_try", audited)
    begun.begin([PipelineMesh(2, mesh, 0) for mesh in meshes(2)])
    assert tried == [60.0, 40.0]


def parts_of(held: float, *, gradients: bool = False) -> float:
    return held


def test_no_plan_is_begun_that_there_is_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes about as long as the estimates, 10 s. Where there is no time, meshes are not
    put in order, which takes estimates of further ones.
    """
    clock = Placings(100.0)
    search, found = searched(simple=True, clock=clock)
    assert found.best is not None
    asked: list[PipelineMesh] = []
    monkeypatch.setattr(SearchState, "estimates_s", 10.0)
    monkeypatch.setattr(SearchState, "likely_s", lambda state, where: asked.append(where) or 1.0)
    left = [PipelineMesh(number, mesh, 0) for number in divisors(4) for mesh in meshes(4 // number)]
    for now_s, is_begun in ((95, False), (85, True)):
        clock._took_s.clear()
        clock.num_placed = now_s
        SimplePolicies(search.state, search.audits).run([], left)
        assert bool(asked) is is_begun


def test_where_time_is_short_a_simple_plan_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes first as soon as the limit is short for what it takes to find out which is likely
    the best: then before all placements.
    """
    monkeypatch.setattr(mesh_pace, "SHORT", math.inf)
    monkeypatch.setattr(outer_search, "ESTIMATED", math.inf)
    monkeypatch.setattr(Placings, "longest_s", lambda clock, kind: 1.0)
    search, found = in_time(1e9)
    first = [candidate for candidate in search.result.audited if candidate.is_simple][-1]
    assert found.best is not None and first.step_s >= found.best.step_s
    assert first.placed[0].space == "poor"  # its mesh was placed since, and bounds it


def test_the_stages_of_a_simple_plan_are_tried_with_the_fastest_placement() -> None:
    """What is computed again is cut out of the chain of blocks, so the search itself has no such
    stages.
    """
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True)
    pipeline = {
        "mesh": {"dp": 2},
        "num_stages": 2,
        "num_microbatches": 2,
        "schedule": "1f1b",
        "recompute": ["middle"],
    }
    found = search(plans.zoo_graph("mlp"), config, AutodistOptions(**pipeline), slow_machine(4))
    best, simple = found.audited[0], next(each for each in found.audited if each.is_simple)
    assert (
        best is found.best
        and best.title.endswith(", in the stages of a simple policy")
        and not best.is_simple
    )
    assert best.step_s < 0.9 * simple.step_s and [s.first_op for s in best.plan.stages] == [
        s.first_op for s in simple.plan.stages
    ]


@pytest.mark.parametrize(
    ("constraints", "splits"),
    [
        (Constraints(), {"dp", "tp"}),
        (Constraints(forbid={"batch": ("x",)}), {"tp"}),
        (Constraints(pin={"up": {"x": "batch"}}), {"dp"}),
        (Constraints(pin={"up": {"x": "R"}}), set()),
    ],
)
def test_plans_that_break_the_constraints_are_no_floor(
    constraints: Constraints, splits: set[str]
) -> None:
    """What their one axis splits breaks the constraints."""
    flat = {"num_positions": 1, "meshes": {4: meshes(4)[:1]}}
    found = searched(simple=True, **flat, constraints=lambda mesh: constraints)[1]
    assert {c.plan.mesh.names[0] for c in found.audited if c.is_simple} <= splits
    assert (found.best is not None and found.best.is_simple) == bool(splits)


def test_plans_hold_what_is_stored_as_the_constraints_say() -> None:
    constraints = Constraints(stored={"up.weight": "[16, 12/x]"})
    flat = {"num_positions": 1, "meshes": {4: meshes(4)[:1]}}
    found = searched(simple=True, **flat, constraints=lambda mesh: constraints)[1]
    held = [c.plan.stored["up.weight"] for c in found.audited if c.is_simple]
    assert held and all(str(layout) in ("[16, 12/dp]", "[16, 12/tp]") for layout in held)


def test_what_the_options_leave_out_is_no_floor() -> None:
    one = searched(simple=True, meshes={1: meshes(1)}, schedules=("1f1b",), num_positions=4)[1].best
    assert one is not None and len(one.plan.stages) == 4 and one.plan.schedule == "1f1b"
    flat = searched(simple=True, num_positions=1)[1].best
    assert flat is not None and not flat.plan.stages


@pytest.mark.parametrize("stage", spread([None, 3], 2, first=1))
def test_no_simple_plan_takes_less_than_its_parts(stage: int | None) -> None:
    graph, hardware = plans.zoo_graph("mlp"), slow_machine(4, bytes_per_s=1e9)
    config = ComputeConfig(
        plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss", use_zero=stage
    )
    space = SearchSpace(meshes={}, num_microbatches=NUM_MICROBATCHES)
    audited = Auditor(graph, config, hardware, NUM_MICROBATCHES)
    pipelines = [
        NamedSchedule(name, SCHEDULES[name].min_chunks)
        for name in ("1f1b", "gpipe", "zb_h1", "zb_v")
    ]
    num_plans = num_later = 0
    for number in divisors(4):
        for mesh in meshes(4 // number):
            setting = Setting(
                hardware, config, position_ranks(mesh, number)[0], num_microbatches=NUM_MICROBATCHES
            )
            named_schedules = pipelines if number > 1 else [NamedSchedule("", 1)]
            for simple in all_made(graph, mesh, named_schedules, number, 0, space, setting):
                cost, num_plans = audited(simple.plan), num_plans + 1
                assert 0 < simple.least_s <= cost.step_s * (1 + 1e-9), simple
                assert 0 < simple.least_bytes() <= cost.peak_bytes, simple
                assert simple.may_fit(cost.peak_bytes) and not simple.may_fit(
                    simple.least_bytes() / 2
                )
            below = all_made(graph, mesh, named_schedules, number, 0, space, setting, below_s=1e-9)
            assert not below  # nothing is that fast, so nothing is cut
            # Those too large with even stages come later, and none is lost.
            every = all_made(graph, mesh, named_schedules, number, 0, space, setting)
            limit = statistics.median(simple.least_bytes() for simple in every)
            later: list[Iterator[SimplePlan | None]] = []
            tight = replace(space, memory_bytes=limit)
            first = all_made(graph, mesh, named_schedules, number, 0, tight, setting, later=later)
            last = list(filter(None, itertools.chain(*later)))
            num_later += len(last)
            assert {str(s.plan) for s in (*first, *last)} == {str(s.plan) for s in every}
            assert all(simple.least_bytes() >= limit / 2 for simple in last)
            # A way whose plans all come later is a step of its own.
            none, later = replace(space, memory_bytes=0.0), []
            steps = [
                *simple_plans(graph, mesh, named_schedules, number, 0, none, setting, later=later)
            ]
            assert steps and set(steps) == {None} and len(steps) >= len(later)
    assert num_plans > 12 and num_later > 0


def test_where_time_is_short_no_time_goes_to_a_plan_that_likely_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given room for all that a plan holds but its gradients, it is not audited to begin with."""
    monkeypatch.setattr(outer_search, "ESTIMATED", math.inf)
    monkeypatch.setattr(Placings, "longest_s", lambda clock, kind: 1.0)
    audits: list[int] = []
    listed: list[SimplePlan] = []
    begin = SimplePolicies.begin

    def begun(simple_policies: SimplePolicies, left: Sequence[PipelineMesh]) -> None:
        begin(simple_policies, left)
        audits.append(len(simple_policies._tried))
        listed.extend(
            simple for listing in simple_policies._listings.values() for simple in listing.found
        )

    monkeypatch.setattr(SimplePolicies, "begin", begun)
    in_time(1e9)
    least = min(listed, key=lambda simple: simple.least_bytes(gradients=True))
    between = (least.least_bytes() + least.least_bytes(gradients=True)) / 2
    in_time(1e9, memory_bytes=between)
    assert audits == [1, 0]


def test_the_rules_give_on_two_axes_what_policies_give() -> None:
    graph = plans.zoo_graph("mlp")
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True)
    rules = Rules(graph, config)
    mesh = Mesh((("dp", 2), ("tp", 2)))
    options = {"num_stages": 1, "tp": 2, "dp": 2, "num_microbatches": NUM_MICROBATCHES}
    made = find_policy("hybrid").apply(graph, replace(config, pas_config=options))
    plan = made if isinstance(made, Plan) else made.plan
    for _ in range(2):  # what was worked out along one axis is used again
        found = rules.plan(mesh, ("batch", "inner"))
        assert (
            found.strategies
            and found.strategies == plan.strategies
            and found.mesh.axes == plan.mesh.axes[-2:]
        )
    wider = rules.plan(Mesh((("dp", 2), ("tp", 4))), ("batch", "inner"))
    assert wider.strategies.keys() == found.strategies.keys()
    rules = Rules(plans.zoo_graph("gpt2"), config)
    notes = rules.plan(
        Mesh((("tp", 64),)), ("inner",)
    ).notes  # why something is not split among so many
    assert notes and {note.axis for note in notes} == {"tp"}


@pytest.mark.parametrize(
    ("axes", "splits", "options"),
    [
        ({"ep": 4}, (EXPERTS,), {}),
        ({"ep": 2, "ep2": 2}, (EXPERTS, EXPERTS), {"ep": (2, 2)}),
        ({"dp": 2, "ep": 2}, ("batch", EXPERTS), {"ep": 2}),
        ({"ep": 2, "tp": 2}, (EXPERTS, "inner"), {"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
    ],
)
def test_the_rules_split_experts_as_policies_do(
    axes: dict[str, int], splits: tuple[str, ...], options: dict[str, Any]
) -> None:
    entry = expert_models.get(expert_models.BY_HAND)
    graph = plans.annotated(plans.traced(entry.build(), entry.inputs()))
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True)
    rules, mesh = Rules(graph, config), Mesh.of(axes)
    policy = "hybrid" if "tp" in options else "ep"
    stages = {"num_stages": 1, "num_microbatches": 1} if "tp" in options else {}
    made = find_policy(policy).apply(graph, replace(config, pas_config=options | stages))
    plan = made if isinstance(made, Plan) else made.plan
    assert rules.plan(mesh, splits).strategies == plan.strategies
    ways = [
        way.plan().strategies
        for way in rules.ways(Mesh.of({"x": 4} if len(axes) == 1 else {"x": 2, "y": 2}))
    ]
    asked = {op: list(along.values()) for op, along in plan.strategies.items()}
    assert asked in [{op: list(along.values()) for op, along in way.items()} for way in ways]


@pytest.mark.parametrize("memory_bytes", [float("inf"), 1e9])
def test_zigzag_goes_with_sequence_parallelism_and_layers_computed_again(
    memory_bytes: float,
) -> None:
    """Where memory is limited, all layers of such a plan may be computed again, as a published one
    has them, or all but their attention: a search places no mesh in zigzag itself, so it chooses
    layers for the best of these plans only. Titles tell them apart.
    """
    graph, hardware = plans.zoo_graph("llama"), slow_machine(4)
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)
    space = SearchSpace(meshes={}, num_microbatches=1, memory_bytes=memory_bytes)
    setting = Setting(hardware, config, (0, 1, 2, 3))
    mesh = Mesh((("cp", 2), ("tp", 2)), (("cp", 1),))
    whole = [NamedSchedule("", 1)]
    found = all_made(graph, mesh, whole, 1, 0, space, setting)
    assert (
        len({(simple.again, simple.whose) for simple in found})
        == len(found)
        == 6 * (1 if memory_bytes == float("inf") else 3)
    )
    options = {"cp": 2, "tp": 2, "cp_mode": "ring", "sequence_parallel": True, "num_stages": 1}
    made = find_policy("hybrid").apply(graph, replace(config, use_end2end=True, pas_config=options))
    expected = made if isinstance(made, Plan) else made.plan
    assert expected is not None
    own = [simple.plan for simple in found]
    again = [plan.recompute for plan in own if plan.strategies == expected.strategies]
    around = ("input_layernorm", "post_attention_layernorm", "mlp")
    modules = tuple(f"model.layers.*.{name}" for name in around)
    assert again == [(), modules, ("model.layers.*",)][: 1 if memory_bytes == float("inf") else 3]


@pytest.mark.parametrize("num_positions", [1, 2])
def test_of_meshes_in_zigzag_that_differ_in_the_order_of_axes_one_is_compared(
    num_positions: int,
) -> None:
    """Inside a node, where all plans of the one are plans of the other, and take as long. With a
    third of the ranks in another node, both are compared.
    """
    graph, hardware = plans.zoo_graph("llama"), slow_machine(4 * num_positions)
    config = ComputeConfig(
        plan_ngpus=4 * num_positions, runtime_ngpus=4 * num_positions, use_end2end=True,
        outputs="loss",
    )  # fmt: skip
    space = SearchSpace(
        meshes={4: meshes(4)}, num_microbatches=4, num_positions=num_positions, simple=True
    )
    wheres = [PipelineMesh(num_positions, mesh, 0) for mesh in meshes(4)]

    def in_zigzag(machine: Hardware) -> list[Mesh]:
        search = Search(graph, config, machine, space, poor)
        return [where.mesh for where in search.simple_policies._in_zigzag(wheres)]

    first, second = (Mesh((("x", 2), ("y", 2)), ((axis, 1),)) for axis in "xy")
    alone = Mesh((("x", 4),), (("x", 1),))
    assert in_zigzag(hardware) == [alone, first]
    pairs = replace(hardware.tiers[0], sizes=(2,) * (2 * num_positions))
    apart = replace(hardware, tiers=(pairs, *hardware.tiers))
    assert in_zigzag(apart) == [alone, first, second]
    # On the second all take as long as one of the first.
    audited = Auditor(graph, config, hardware, 4)
    ranks = position_ranks(first, num_positions)[0]
    setting = Setting(hardware, config, ranks, num_microbatches=4)
    named = [NamedSchedule("1f1b" if num_positions > 1 else "", 1)]
    of_first, of_second = (
        {
            round(audited(simple.plan).step_s, 9)
            for simple in all_made(graph, mesh, named, num_positions, 0, space, setting)
        }
        for mesh in (first, second)
    )
    assert of_second and of_first >= of_second


@pytest.mark.parametrize("much", [False, True])
def test_plans_in_zigzag_come_first_where_attention_is_much(
    much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are known before the model is placed on any mesh."""
    monkeypatch.setattr(simple_policies, "MUCH_ATTENTION", 0.0 if much else 1.0)
    graph, hardware = plans.zoo_graph("llama"), slow_machine(4)
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)
    space = SearchSpace(
        meshes={4: [Mesh((("x", 4),))]}, num_microbatches=1, num_positions=1, simple=True
    )
    best: list[Candidate | None] = []

    def place(mesh_request: MeshRequest) -> PlacedModel:
        best.append(search.result.best)
        mesh = dict(mesh_request.mesh.axes)
        return PlacedModel(graph.builder(mesh=mesh).plan("poor"), 0.0, "none", "poor")

    search = Search(graph, config, hardware, space, place)
    search.run()
    assert [found is not None and bool(found.plan.mesh.turns) for found in best[:1]] == [much]


@pytest.mark.parametrize(
    "name", spread(["mlp", "llama", "gpt2-uneven", expert_models.BY_HAND], 2, first=1)
)
def test_operators_alone_take_as_long_as_in_the_plan(name: str) -> None:
    """Before a plan is made, it is known what its operators take."""
    if name == expert_models.BY_HAND:
        entry = expert_models.get(name)
        graph = plans.annotated(plans.traced(entry.build(), entry.inputs()))
    else:
        graph = plans.zoo_graph(name)
    config, hardware = ComputeConfig(plan_ngpus=8, runtime_ngpus=8), slow_machine(8)
    rules = Rules(graph, config)
    num_ways = 0
    for mesh in (*meshes(4), *meshes(8)):
        setting = Setting(hardware, config, tuple(range(mesh.size)))
        for way in rules.ways(mesh):
            with contextlib.suppress(PlanError):
                plan, num_ways = way.plan(), num_ways + 1
                known = dict(
                    zip(
                        (op.name for op in rules.needed.ops),
                        rules.alone_s(mesh, way, setting),
                        strict=True,
                    )
                )
                free = from_nothing(rules.needed)
                for op in rules.needed.ops:
                    seconds = op_time(op, plan.assignment(op.name), mesh, hardware).total_s
                    assert known[op.name] == (0.0 if op.name in free else seconds), (mesh, op)
    assert num_ways > 2


@pytest.mark.parametrize(
    ("name", "zigzag"),
    [
        ("mlp", False),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("llama", True, marks=pytest.mark.slow),
    ],
)
def test_only_plans_that_cannot_be_better_are_not_made(name: str, zigzag: bool) -> None:
    """Whatever takes less than is asked for, and fits, is among those that are: by audits. Neither
    placements nor schedules whose stages take too long are cut, nor those that no cut makes fit.
    """
    graph, hardware = plans.zoo_graph(name), slow_machine(4, bytes_per_s=1e9)
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss")
    # Some plans in zigzag compute layers again.
    space = SearchSpace(meshes={}, num_microbatches=NUM_MICROBATCHES, memory_bytes=1e15)
    rules, audited = Rules(graph, config), Auditor(graph, config, hardware, NUM_MICROBATCHES)
    names = ("1f1b", "gpipe", "zb_h1", "zb_v", "1f1b_interleaved")
    named_schedules = [NamedSchedule(name, SCHEDULES[name].min_chunks) for name in names]
    waits: Waits = {}
    left_out = {"time": 0, "memory": 0}
    for number in divisors(4):
        for mesh in meshes(4 // number):
            setting = Setting(
                hardware, config, position_ranks(mesh, number)[0], num_microbatches=NUM_MICROBATCHES
            )
            own = named_schedules if number > 1 else [NamedSchedule("", 1)]
            for each in rules.zigzag_meshes(mesh) if zigzag else (mesh,):
                find = partial(all_made, graph, each, own, number, 0, space, setting)
                costs = {str(simple.plan): audited(simple.plan) for simple in find()}
                steps_s = sorted(cost.step_s for cost in costs.values())
                # What is just enough for one of them: of time, and of memory.
                for step_s in (steps_s[0], steps_s[len(steps_s) // 2], steps_s[-1]):
                    fast = {plan: cost for plan, cost in costs.items() if cost.step_s <= step_s}
                    peak_bytes = min(cost.peak_bytes for cost in fast.values())
                    below = partial(find, below_s=step_s * (1 + 1e-6), rules=rules, waits=waits)
                    in_time = {str(simple.plan) for simple in below()}
                    found = {str(simple.plan) for simple in below(most_bytes=peak_bytes)}
                    assert in_time >= fast.keys()
                    assert found >= {p for p in fast if fast[p].peak_bytes <= peak_bytes}
                    left_out["time"] += len(costs) - len(in_time)
                    left_out["memory"] += len(in_time) - len(found)
    assert all(left_out.values())
