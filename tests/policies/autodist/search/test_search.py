"""The outer search on small models, with placements by rule of thumb: what it tries, chooses,
refuses and says.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import plans
import pytest
import torch
import zoo
from fake_attention import rows_are_float32
from planning import slow_machine
from torch import Tensor, nn

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.policies.autodist.autodist_policy import search as autodist_search
from shardwright.policies.autodist.autodist_policy import settled
from shardwright.policies.autodist.candidates.alarm import Alarm
from shardwright.policies.autodist.candidates.axis_roles import named, renamed
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.mesh_requests import (
    MeshRequest,
    PlacedMesh,
    PlacedModel,
)
from shardwright.policies.autodist.candidates.meshes import divisors, meshes
from shardwright.policies.autodist.candidates.results import Candidate, CutRequest, SearchResult
from shardwright.policies.autodist.candidates.scheduled_plans import (
    NamedSchedule,
    named_schedules,
)
from shardwright.policies.autodist.candidates.search_space import WORTH, SearchSpace
from shardwright.policies.autodist.cutting import cut_stages
from shardwright.policies.autodist.cutting.cut_bounds import CutBounds
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.search import search as outer_search
from shardwright.policies.autodist.search.auditing import Auditor, Audits, is_same
from shardwright.policies.autodist.search.certificate import certificate, raise_bounds
from shardwright.policies.autodist.search.loss_pieces import LossPieces
from shardwright.policies.autodist.search.mesh_search import MeshSearch
from shardwright.policies.autodist.search.mesh_trials import MeshTrials
from shardwright.policies.autodist.search.search import Search
from shardwright.policies.autodist.search.search_state import SearchState
from shardwright.policies.autodist.stages.split_chain import Split, split_stages
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import choose_dims
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh


def graph() -> PlannableGraph:
    return plans.zoo_graph("gpt2")


def by_thumb(mesh_request: MeshRequest) -> PlacedModel:
    """The last axis splits the layers, those before it the batch."""
    builder = graph().builder(mesh=dict(mesh_request.mesh.axes))
    for axis, size in mesh_request.mesh.axes:
        inner = axis == mesh_request.mesh.names[-1]
        split_dims(builder, axis, choose_dims(graph(), size) if inner else batch_classes(graph()))
    return PlacedModel(builder.plan("by thumb"), 0.0, "none", "by thumb")


def whole_weights(mesh_request: MeshRequest) -> PlacedModel:
    """The only axis splits the batch; every rank has all weights."""
    builder = graph().builder(mesh=dict(mesh_request.mesh.axes))
    split_dims(builder, "x", batch_classes(graph()))
    return PlacedModel(builder.plan("by thumb"), 1e-6, "none", "for speed")


def search(place: Any = by_thumb, num_ranks: int = 4, **space: Any) -> SearchResult:
    config = ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_end2end=True)
    every = {n: meshes(n) for n in divisors(num_ranks)}
    fields = {
        "meshes": every,
        "num_microbatches": 4,
        "schedules": ("1f1b", "zb_h1"),
        "audits": 3,
        "near": math.inf,
    }
    fields["mixed"] = False
    clock, least, alarm = (
        space.pop("clock", None) or Clock(space.pop("time_limit_s", math.inf)),
        space.pop("least", None),
        space.pop("alarm", None),
    )
    return Search(
        graph(),
        config,
        load_hardware("a100-80gb", num_ranks),
        SearchSpace(**fields | space),
        place,
        clock=clock,
        alarm=alarm,
        least=least,
    ).run()


@functools.cache
def everything() -> SearchResult:
    """All candidates, audited. Tests share it and do not change it."""
    return search(audits=100)


def test_every_number_of_positions_and_every_mesh_is_tried() -> None:
    found = search()
    titles = {candidate.title for candidate in found.tried}
    tried = {title.split(",")[0] for title in titles}
    assert tried == {"x=4", "x=2 x y=2", "pp=2 x x=2", "pp=4"}
    assert {title.split(", ")[1] for title in titles if ", " in title} == {"1f1b", "zb_h1"}
    assert len(found.audited) == 3 and found.best is found.audited[0] and not found.refused
    steps = [candidate.step_s for candidate in found.audited]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_a_search_tells_that_it_puts_meshes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates for a million ranks take minutes, before anything is placed."""
    said: list[str] = []
    monkeypatch.setattr(SearchState, "tell", lambda state, title: said.append(title))
    search()
    count = int(said[0].split()[-2])
    assert said[:count] == [f"estimate {i} of {count} meshes" for i in range(1, count + 1)]
    assert count > 2 and "estimate" not in said[count]


def test_what_is_predicted_to_take_too_long_is_not_audited() -> None:
    full = everything()
    times = sorted(candidate.predicted_s for candidate in full.audited)
    some = search(audits=100, others_s=times[2] / WORTH)
    assert sorted(candidate.predicted_s for candidate in some.audited) == times[:3]
    assert sorted(candidate.predicted_s for candidate in some.others) == times[3:]
    assert search(others_s=0.0).best is None


def test_the_prediction_is_near_the_audit() -> None:
    found = everything()
    assert len(found.audited) == 6
    for candidate in found.audited:
        assert candidate.predicted_s == pytest.approx(candidate.step_s, rel=1e-9), candidate.title


def test_tight_memory_has_layers_computed_again_or_is_refused() -> None:
    free = search(num_positions=2, schedules=("1f1b",))
    assert free.best is not None and free.best.cost is not None
    peak = free.best.cost.peak_bytes
    refused = search(num_positions=2, schedules=("1f1b",), memory_bytes=peak / 20)
    assert refused.best is None
    assert all("B on a device, and" in why for why in refused.refused.values())


def test_parts_of_layers_are_computed_again_until_the_audit_fits() -> None:
    free = search(num_positions=2, schedules=("1f1b",))
    assert free.best is not None and free.best.cost is not None
    limit = 0.93 * free.best.cost.peak_bytes
    tight = search(num_positions=2, schedules=("1f1b",), memory_bytes=limit)
    assert tight.best is not None and tight.best.cost is not None
    assert tight.best.cost.peak_bytes <= limit and tight.best.plan.recompute
    assert tight.best.title.endswith("layers computed again")


def test_what_the_user_fixed_is_kept() -> None:
    start = next(op.name for op in graph().ops if op.module_path.startswith("transformer.h.1"))
    found = search(
        num_positions=2, schedules=("1f1b",), stage_starts=(start,), recompute=("transformer.h.*",)
    )
    assert found.best is not None
    assert [stage.first_op for stage in found.best.plan.stages] == ["", start]
    assert found.best.plan.recompute == ("transformer.h.*",)


def test_begins_of_stages_leave_only_pipelines_that_have_them() -> None:
    """No plan without a pipeline, no schedule with more stages; the floor of simple policies cuts
    there, too.
    """
    start = next(op.name for op in graph().ops if op.module_path.startswith("transformer.h.1"))
    found = search(
        stage_starts=(start,), schedules=("1f1b", "1f1b_interleaved", "zb_h1"), simple=True
    )
    assert {c.title.split(",")[0] for c in found.tried} == {
        "pp=2 x x=2",
        "pp=2 x dp=2",
    } and not found.refused
    assert any(candidate.is_simple for candidate in found.tried)
    assert all(
        [stage.first_op for stage in candidate.plan.stages] == ["", start]
        for candidate in found.tried
    )


def test_a_placement_that_fails_is_a_reason_not_an_end() -> None:
    def refuses(mesh_request: MeshRequest) -> PlacedModel:
        if len(mesh_request.mesh.axes) == 2:
            raise PlanError("no placement", why="two axes")
        return by_thumb(mesh_request)

    found = search(refuses)
    assert found.refused["x=2 x y=2"] == "no placement: two axes" and found.best is not None


def test_meshes_whose_bound_is_no_better_than_the_best_plan_are_not_tried() -> None:
    def bounded(mesh_request: MeshRequest) -> PlacedModel:
        return replace(
            by_thumb(mesh_request), bound_s=10.0 if len(mesh_request.mesh.axes) == 2 else 0.0
        )

    found = search(bounded)
    assert found.refused["x=2 x y=2"] == "every plan on it takes at least 10 s"
    assert not any("y=2" in candidate.title for candidate in found.tried)


@pytest.mark.parametrize("bound_s", [0.99, 1.01])
def test_meshes_whose_bound_is_no_better_than_the_plan_of_another_search_are_not_tried(
    bound_s: float,
) -> None:
    """The other search has a plan of 1 s. Candidates may still be predicted to take 1.05. A simpler
    plan may take longer, and nothing tells whether the other one is simple.
    """

    def bounded(mesh_request: MeshRequest) -> PlacedModel:
        return replace(by_thumb(mesh_request), bound_s=bound_s)

    found = search(bounded, others_s=1.0, num_positions=1)
    assert ("x=4" in found.refused) is (bound_s > 1) and bool(found.tried) is (bound_s < 1)
    assert search(bounded, others_s=1.0, num_positions=1, simpler_within=0.02).tried


@pytest.mark.parametrize("within", [0.0, 0.02])
def test_a_mesh_of_simpler_plans_may_be_a_little_worse(within: float) -> None:
    """The mesh ``x=4`` takes 1 % longer by its bound than ``x=2 x y=2``, and has an axis less."""
    best = search(num_positions=1, meshes={4: [Mesh((("x", 2), ("y", 2)))]}).best
    assert best is not None
    best_s = best.compared_s

    def bounded(mesh_request: MeshRequest) -> PlacedModel:
        is_simpler = len(mesh_request.mesh.axes) == 1
        return replace(by_thumb(mesh_request), bound_s=1.01 * best_s if is_simpler else 0.0)

    found = search(bounded, num_positions=1, simpler_within=within)
    titles = {candidate.title for candidate in found.audited}
    assert titles == {"x=2 x y=2", "x=4"} if within else {"x=2 x y=2"}


def test_further_placements_wait_until_all_meshes_were_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both pipelines fit with layers computed again, as far as stages tell."""
    pipelines = [candidate for candidate in everything().audited if ", 1f1b" in candidate.title]
    memory_bytes = 0.95 * min(candidate.used_bytes for candidate in pipelines)
    done: list[str] = []

    def noted(mesh_request: MeshRequest) -> PlacedModel:
        if mesh_request.memory_bytes is not None:
            done.append("placed further")
        return by_thumb(mesh_request)

    def tried(trials: MeshTrials, cut_request: CutRequest, *schedules: Any) -> Any:
        done.append(cut_request.title)
        return try_schedules(trials, cut_request, *schedules)

    try_schedules = MeshTrials.try_schedules
    monkeypatch.setattr(MeshTrials, "try_schedules", tried)
    sizes = {1: meshes(1), 2: meshes(2), 4: []}
    search(noted, meshes=sizes, schedules=("1f1b",), memory_bytes=memory_bytes)
    assert sorted(done[:2]) == ["pp=2 x x=2", "pp=4"] and done[2] == "placed further"


def test_stages_are_cut_for_as_much_less_memory_as_audits_of_plans_like_them_were_over() -> None:
    """The audit nearest to the memory tells: 179 GB for 161 predicted, and not 209 for 186."""

    def asked(chunks: int) -> CutRequest:
        return CutRequest("", (), 4, NamedSchedule("1f1b_interleaved", chunks))

    plan, limits = Plan(Mesh((("x", 4),))), list[float]()
    too_large = [
        (
            Candidate("", plan, 1.0, (), used_bytes=used, cut_request=asked(2)),
            SimpleNamespace(peak_bytes=peak),
        )
        for used, peak in ((186.0, 209.0), (161.0, 179.0))
    ]
    state = SimpleNamespace(
        result=SearchResult(),
        space=SimpleNamespace(memory_bytes=186.0),
        cut=lambda cut_request, memory_bytes: limits.append(memory_bytes),
    )
    trials = MeshTrials(
        cast(Any, state), cast(Any, SimpleNamespace(too_large=too_large)), *[MagicMock()] * 2
    )
    for chunks in (2, 3):
        trials._cut(asked(chunks))
    assert limits == [168.0, 186.0, 186.0]  # and with all of it, where that leaves nothing


@pytest.mark.parametrize(("num_audits", "near"), [(3, 1.2), (4, 1.05)])
def test_plans_are_audited_as_far_above_the_best_as_predictions_were_above_audits(
    num_audits: int, near: float
) -> None:
    """A few audits tell nothing."""
    plan, asked = Plan(Mesh((("x", 4),))), CutRequest("", (), 4, NamedSchedule("1f1b", 1))
    audited = [
        Candidate("", plan, predicted_s, (), cost=PlanCost("", 1.0, (), ()), cut_request=asked)
        for predicted_s in (0.9, 1.05, 1.0, 1.0)[:num_audits]
    ]
    meshes = SimpleNamespace(
        result=SearchResult(audited=audited),
        audits=SimpleNamespace(too_large=[]),
        space=SimpleNamespace(near=1.2, simpler_within=0.02),
    )
    assert MeshSearch._near(cast(Any, meshes)) == near


@pytest.mark.parametrize("cost_s", [0.99, 1.01])
def test_a_placement_for_less_memory_is_bounded_by_the_one_for_speed(cost_s: float) -> None:
    """Another search has a plan of 1 s. A placement that takes longer by itself is not cut."""

    def bounded(mesh_request: MeshRequest) -> PlacedModel:
        if mesh_request.memory_bytes is not None:
            return replace(by_thumb(mesh_request), bound_s=10.0, cost_s=cost_s)
        return whole_weights(mesh_request)

    space: dict[str, Any] = {"num_positions": 1, "meshes": {4: meshes(4)[:1]}, "recompute": ()}
    small = search(**space)
    assert small.best is not None and small.best.cost is not None
    memory_bytes = 1.05 * small.best.cost.peak_bytes
    tight = search(bounded, **space, memory_bytes=memory_bytes, others_s=1.0)
    tried = [placed for candidate in (*tight.audited, *tight.others) for placed in candidate.placed]
    assert any(placed.space == "by thumb" for placed in tried) is (cost_s < 1)
    assert all(placed.bound_s == 1e-6 for placed in tried)


def test_what_is_predicted_to_take_much_longer_is_not_audited() -> None:
    found = search(audits=100, near=1.0)
    assert found.audited and found.others and found.best is not None
    shuffled = replace(found, others=sorted(found.others, key=lambda candidate: candidate.title))
    assert [c.step_s for c in shuffled.tried[len(found.audited) :]] == sorted(
        c.step_s for c in found.others
    )
    assert all(candidate.predicted_s > found.best.step_s for candidate in found.others)


def test_the_time_limit_ends_openings_trials_and_audits() -> None:
    found = search(time_limit_s=0.0)
    assert found.interrupted == "the time limit of 0 s" and len(found.audited) == 1
    assert found.refused == {
        "x=4": "there was no time to try it further; every plan on it takes at least 0 s"
    }


def test_what_is_likely_to_fit_is_tried_where_time_is_short_and_speed_does_not_fit() -> None:
    """One plan, placed for the memory with all layers computed again, and audited as it is."""
    asked: list[MeshRequest] = []

    def noted(mesh_request: MeshRequest) -> PlacedModel:
        asked.append(mesh_request)
        placed = (
            by_thumb(mesh_request) if mesh_request.memory_bytes else whole_weights(mesh_request)
        )
        return replace(placed, plan=replace(placed.plan, recompute=mesh_request.recompute))

    flat = {"num_positions": 1, "meshes": {4: meshes(4)[:1]}}
    free, least = search(**flat).best, search(**flat, recompute=("transformer.h.*",)).best
    assert free is not None and least is not None and least.cost is not None
    limit = 1.01 * least.cost.peak_bytes
    found = search(noted, time_limit_s=0.0, memory_bytes=limit, **flat)
    assert (
        [mesh_request.hurried for mesh_request in asked] == [False, True]
        and asked[-1].recompute
        and asked[-1].memory_bytes == limit
    )
    assert found.best is not None and found.best.title == "x=4, all layers computed again"
    assert (
        found.best.plan.recompute == asked[-1].recompute
        and not found.others
        and not found.best.is_simple
    )


class Placings(Clock):
    """Placing the model on a mesh takes a second, and nothing else takes any time."""

    def __init__(self, limit_s: float) -> None:
        self.num_placed = 0
        super().__init__(limit_s)

    @property
    def seconds(self) -> float:
        return float(self.num_placed)


class Passing(Clock):
    """A clock that a test sets."""

    passed_s = 0.0

    @property
    def seconds(self) -> float:
        return self.passed_s


@pytest.mark.parametrize(("limit_s", "begun"), [(12.0, 2), (4.0, 1), (100.0, 4)])
def test_a_short_limit_begins_with_a_plan_of_likely_meshes(limit_s: float, begun: int) -> None:
    """It begins as soon as a fifth of it has gone into meshes; with more time all are placed before
    one is tried.
    """
    clock, asked = Placings(limit_s), []

    def noted(mesh_request: MeshRequest) -> PlacedModel:
        clock.num_placed += 1
        asked.append((str(mesh_request.mesh), bool(search.result.audited)))
        return by_thumb(mesh_request)

    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True)
    space = SearchSpace(meshes={n: meshes(n) for n in divisors(4)}, num_microbatches=8, mixed=False)
    search = Search(graph(), config, load_hardware("a100-80gb", 4), space, noted, clock=clock)
    found = search.run()
    assert [mesh for mesh, _ in asked][:begun] == ["x=4", "x=2", "x=2 x y=2", "one rank"][:begun]
    assert [audited for _, audited in asked] == [False] * begun + [True] * (len(asked) - begun)
    assert found.best is not None and found.seconds <= limit_s


@pytest.mark.parametrize(("took_s", "has_some"), [(4.0, False), (6.0, True)])
def test_where_trying_takes_long_a_plan_is_audited_before_the_second_mesh_is_tried(
    took_s: float, has_some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twentieth of 100 s is long for one mesh."""
    clock, audited, try_all = Passing(100.0), list[bool](), MeshTrials.try_all

    def slowly(trials: MeshTrials, placed_mesh: PlacedMesh) -> None:
        audited.append(bool(trials._result.audited))
        clock.passed_s += took_s
        try_all(trials, placed_mesh)

    monkeypatch.setattr(MeshTrials, "try_all", slowly)
    search(clock=clock)
    assert audited[:2] == [False, has_some] and audited[-1] == has_some


def test_where_time_is_short_the_first_plan_that_is_too_large_is_tried_with_the_loss_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before other meshes are placed, of which each takes a second of ten."""
    cost, clock, num_placed = everything().audited[0].cost, Placings(10.0), list[int]()
    assert cost is not None

    def slowly(mesh_request: MeshRequest) -> PlacedModel:
        clock.num_placed += 1
        return by_thumb(mesh_request)

    def too_large(audits: Audits, candidate: Candidate) -> None:
        audits.too_large.append((candidate, cost))

    def in_pieces(loss_pieces: LossPieces) -> None:
        if loss_pieces.audits.too_large:
            num_placed.append(clock.num_placed)

    monkeypatch.setattr(Audits, "audit", too_large)
    monkeypatch.setattr(LossPieces, "run", in_pieces)
    found = search(slowly, clock=clock, pieces=True, mixed=False)
    assert found.best is None and num_placed[0] == 1 and clock.num_placed > 3


@pytest.mark.parametrize(
    ("limit_s", "first_s", "num_rounds"), [(60.0, 6.0, 4), (120.0, 12.0, 4), (600.0, 12.0, 18)]
)
def test_rounds_of_placing_are_no_longer_in_a_search_of_more_than_two_minutes(
    limit_s: float, first_s: float, num_rounds: int
) -> None:
    ends_s = [share * limit_s for share in outer_search.rounds(Clock(limit_s))]
    assert ends_s[0] == pytest.approx(first_s) and ends_s[-1] == pytest.approx(0.7 * limit_s)
    assert len(ends_s) == num_rounds
    for earlier, later in itertools.pairwise(ends_s):
        assert 0.0 < later - earlier < 2.001 * first_s


def test_rounds_of_placing_are_as_long_after_a_long_time_of_trying() -> None:
    clock, ends_s = Passing(120.0), []
    for share in outer_search.rounds(clock):
        ends_s.append(share * 120.0)
        clock.passed_s = ends_s[-1] + 30.0
    assert ends_s == pytest.approx([12.0, 66.0, 84.0])


@pytest.mark.parametrize(("steady", "num_left"), [(0.2, 0), (1.0, 3)])
def test_what_a_long_search_did_not_reach_is_bounded_before_simple_plans(
    steady: float, num_left: int
) -> None:
    """Ten of 100 s are left. A long search keeps two of them for plans of simple policies."""
    clock = Passing(100.0, steady=steady)

    def slowly(mesh_request: MeshRequest) -> PlacedModel:
        clock.passed_s += 1.0
        return replace(by_thumb(mesh_request), bound_s=1e-7)

    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True)
    space = SearchSpace(meshes={n: meshes(n) for n in divisors(4)}, num_microbatches=8)
    machine = load_hardware("a100-80gb", 4)
    outer = Search(graph(), config, machine, space, slowly, clock=clock)
    outer.meshes.list_all()
    outer.meshes.place_until(0.0)
    clock.passed_s = 90.0
    outer.meshes.bound_left()
    assert len(outer.meshes.left) == num_left and len(outer.meshes.placed) == 4 - num_left
    assert len(outer.result.unanswered) == 3 - num_left
    assert all(0.0 < bound_s <= 1e-7 for bound_s in outer.result.unanswered.values())


def test_what_there_was_no_time_for_is_said_and_bounds_the_plan() -> None:
    clock = Clock(60.0)

    def last(mesh_request: MeshRequest) -> PlacedModel:
        if len(mesh_request.mesh.axes) == 2:
            clock.end()
        return replace(by_thumb(mesh_request), bound_s=len(mesh_request.mesh.axes) * 1e-7)

    found = search(last, clock=clock, num_positions=1)
    assert found.best is not None and found.interrupted == "the time limit of 60 s"
    assert found.unanswered == {"x=4": 1e-7, "x=2 x y=2": 2e-7} and found.bound_s == 1e-7
    assert (
        found.refused["x=2 x y=2"]
        == "there was no time to try it further; every plan on it takes at least 0.2 µs"
    )


def test_some_position_of_a_pipeline_has_the_longest_operator() -> None:
    """However small the share of each position is, and however its stages are cut."""

    def placed(mesh_request: MeshRequest) -> PlacedModel:
        return replace(
            by_thumb(mesh_request),
            bound_s=1e-7,
            longest_s=(5.0 if mesh_request.num_positions == 2 else 10.0),
        )

    found = search(placed, mixed=False)
    assert found.refused["pp=4"] == "every plan on it takes at least 10 s"
    assert found.tried and {candidate.bound_s for candidate in found.tried} == {5.0}


def test_a_mesh_on_which_nothing_was_found_that_fits_bounds_the_plan_unless_nothing_can() -> None:
    """Splitting the batch alone needs too much memory; another placement on that mesh might not."""

    def poor(mesh_request: MeshRequest) -> PlacedModel:
        placed = by_thumb(mesh_request)
        if len(mesh_request.mesh.axes) == 1:
            placed = replace(
                placed,
                plan=graph().builder(mesh=dict(mesh_request.mesh.axes)).plan("all on every rank"),
            )
        return replace(placed, bound_s=len(mesh_request.mesh.axes) * 1e-7)

    every = search(num_positions=1)
    fits = {
        candidate.title: candidate.cost.peak_bytes
        for candidate in every.audited
        if candidate.cost is not None
    }
    limit = 1.01 * fits["x=2 x y=2"]
    found = search(
        poor, num_positions=1, memory_bytes=limit, recompute=(), least=lambda mesh_request: 0.0
    )
    assert [candidate.title for candidate in found.tried] == [
        "x=2 x y=2"
    ] and "x=4" in found.refused
    assert found.unanswered == {"x=4": 1e-7} and found.bound_s == 1e-7
    proved = search(
        poor, num_positions=1, memory_bytes=limit, recompute=(), least=lambda mesh_request: math.inf
    )
    assert not proved.unanswered and proved.bound_s == 2e-7


@pytest.mark.slow
def test_a_pipeline_that_cannot_be_split_to_fit_is_said_to_be_in_no_bound() -> None:
    machine, every = (
        load_hardware("a100-80gb", 4),
        search(recompute=(), schedules=("1f1b",), audits=100),
    )
    fits = {
        candidate.title: candidate.cost.peak_bytes
        for candidate in every.audited
        if candidate.cost is not None
    }
    limit = 1.01 * min(fits["x=4"], fits["x=2 x y=2"])
    # Placements here have no bounds.
    found = replace(
        search(recompute=(), schedules=("1f1b",), memory_bytes=limit), arithmetic_bound_s=0.0
    )
    assert (
        found.best is not None
        and not found.best.plan.stages
        and found.unbounded == ["pp=2 x x=2", "pp=4"]
    )
    proof = certificate(found, found.best, machine).proof
    assert (
        proof[-1]
        == "not in the bound: pp=2 x 2 ranks, pp=4, as no split of the placements chosen there fits"
    )
    more = certificate(replace(found, unbounded=["a", "b", "c"]), found.best, machine).proof
    assert more[-1].startswith("not in the bound: a, b and 1 more, as no split")


def test_a_search_without_an_answer_says_that_time_was_over() -> None:
    found = search(time_limit_s=0.0, num_positions=1, memory_bytes=1.0)
    assert found.best is None and found.interrupted == "the time limit of 0 s"
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)
    with pytest.raises(PlanError) as caught:
        settled(replace(found, seconds=3.0), config, load_hardware("a100-80gb", 4))
    what, *why, hint = str(caught.value).splitlines()
    assert what == (
        "no plan for 4 ranks was found in 3 s, until the search was ended by the time limit of 0 s"
    )
    needs = "228" if rows_are_float32() else "228.2"
    assert (
        "of what was audited is" in why[0]
        and f"         4 ranks: it needs {needs} kB on a device, and 1 B are allowed" in why
    )
    assert hint == (
        "  try:   a longer time_limit_s, or less to search: mesh, num_stages or schedule given; "
        "for less memory more ranks (plan_ngpus), outputs='loss', smaller microbatches"
    )


@pytest.mark.slow
def test_a_candidate_without_a_program_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on with the others, and says why."""
    audited = Auditor.__call__

    def no_pipelines(auditor: Auditor, plan: Plan) -> PlanCost:
        if plan.stages:
            raise PlanError(
                "buffer mean is updated in stage 0 and used in stages 0, 1", why="microbatches"
            )
        return audited(auditor, plan)

    monkeypatch.setattr(Auditor, "__call__", no_pipelines)
    found = search(simple=True)
    assert found.best is not None and not found.best.plan.stages
    words = "buffer mean is updated in stage 0 and used in stages 0, 1: microbatches"
    titles = [title for title, why in found.refused.items() if why == words]
    assert any(title.endswith("as a simple policy has it") for title in titles) and len(titles) > 1


def test_of_plans_with_one_title_the_refusal_names_what_needs_least() -> None:
    """What is computed again, and how the model is placed, is not all in a title: two plans may
    share one.
    """
    cost = search(num_positions=1).audited[0].cost
    assert cost is not None
    found = SearchResult()
    state: Any = SimpleNamespace(
        result=found, clock=Clock(), alarm=Alarm(), space=SimpleNamespace(memory_bytes=1e6),
        cutter=None, tell=print,
    )  # fmt: skip
    found.refused["tp=4"], found.needed_bytes["tp=4"] = "it is predicted to need 2 MB", 2e6
    auditor = MagicMock()
    audits = Audits(state, auditor)

    def audit(title: str, peak_bytes: float) -> None:
        memory = tuple(
            replace(memory, by_category={"activation": peak_bytes}) for memory in cost.memory
        )
        auditor.return_value = replace(cost, memory=memory)
        audits.audit(Candidate(title, Plan(Mesh((("tp", 4),))), 1.0, ()))

    for peak_bytes in (5e6, 3e6, 4e6):
        audit("tp=4", peak_bytes)
    assert found.refused == {"tp=4": "it needs 3 MB on a device, and 1 MB are allowed"}
    assert found.needed_bytes == {"tp=4": 3e6} and found.least[:2] == (3e6, "tp=4")
    for peak_bytes in (1.5e6, 0.5e6, 2e6):
        audit("dp=4", peak_bytes)
    assert list(found.refused) == ["tp=4"], "one of the other title fits"


def test_one_plan_with_its_axes_in_another_order_is_audited_once() -> None:
    def alike(mesh_request: MeshRequest) -> PlacedModel:
        placed = by_thumb(mesh_request)
        roles = {
            axis: "tp" if axis == mesh_request.mesh.names[-1] else "dp"
            for axis in mesh_request.mesh.names
        }
        return replace(placed, plan=renamed(placed.plan, roles))

    orders = [Mesh((("x", 2), ("y", 2))), Mesh((("y", 2), ("x", 2)))]
    found = search(alike, meshes={4: orders}, num_positions=1, audits=100)
    assert len(found.audited) == 1 and len(found.others) == 1
    assert is_same(found.audited[0], found.others[0]) and found.audited[0].plan.mesh.names == (
        "dp",
        "tp",
    )


def test_an_interrupt_keeps_the_best_so_far() -> None:
    calls: list[MeshRequest] = []

    def interrupted(mesh_request: MeshRequest) -> PlacedModel:
        calls.append(mesh_request)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return by_thumb(mesh_request)

    found = search(interrupted)
    assert found.interrupted == "Ctrl-C" and len(found.audited) == 1
    # Of x=4, x=2 x y=2, pp=2 x x=2 and pp=4 it had placed two.
    assert (found.num_left, everything().num_left) == (2, 0)


def test_the_limit_breaks_off_the_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit, once a plan is known, here or in another search; before that the search goes on to
    its first one.
    """
    audit = Auditor.__call__
    audited: list[Plan] = []

    def rings(auditor: Auditor, plan: Plan) -> PlanCost:
        audited.append(plan)
        if len(audited) == 2:
            alarm.ring()
        return audit(auditor, plan)

    monkeypatch.setattr(Auditor, "__call__", rings)
    alarm = Alarm()
    found = search(alarm=alarm)
    assert (len(audited), len(found.audited), found.num_left) == (2, 1, 0)
    late = search(alarm=Alarm(0.0))
    assert len(late.audited) == 1 and late.audited[0].plan == found.audited[0].plan
    alarm = Alarm(0.0)
    alarm.note_answer()
    other = search(alarm=alarm)
    assert not other.audited and not other.refused and len(audited) == 3
    ended = {each.interrupted for each in (found, late, other)}
    assert ended == {"the time limit of inf s"} and alarm.has_rung


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_an_interrupt_leaves_untried_is_in_the_bound(by_hand: bool) -> None:
    """Two meshes are placed when the third one is interrupted. One is tried after Ctrl-C, as there
    is no plan; none after the alarm, as another search has a plan.
    """
    alarm, calls = Alarm(), list[MeshRequest]()
    alarm.note_answer()

    def interrupted(mesh_request: MeshRequest) -> PlacedModel:
        calls.append(mesh_request)
        if len(calls) == 3:
            if by_hand:
                raise KeyboardInterrupt
            alarm.ring()
        return replace(by_thumb(mesh_request), bound_s=1e-6 * len(calls))

    found = search(interrupted, alarm=alarm)
    assert found.num_left == 2 and len(found.audited) == by_hand
    assert found.unanswered == {"x=4": 1e-6, "pp=2 x x=2": 1e-6}


def test_an_interrupt_that_the_solver_took_ends_the_search() -> None:
    calls: list[MeshRequest] = []

    def interrupted(mesh_request: MeshRequest) -> PlacedModel:
        calls.append(mesh_request)
        return replace(by_thumb(mesh_request), interrupted=len(calls) == 2)

    found = search(interrupted)
    assert found.interrupted == "Ctrl-C" and len(calls) == 2 and len(found.audited) == 1


def test_a_second_interrupt_ends_what_follows_the_first() -> None:
    def interrupted(mesh_request: MeshRequest) -> PlacedModel:
        if mesh_request.memory_bytes is not None or len(mesh_request.mesh.axes) == 2:
            raise KeyboardInterrupt
        return by_thumb(mesh_request)

    found = search(interrupted)
    assert found.best is not None and found.interrupted == "Ctrl-C"
    nothing = search(interrupted, memory_bytes=1.0, num_positions=1)
    assert (
        nothing.best is None
        and nothing.interrupted == "Ctrl-C"
        and "1 B are allowed" in nothing.refused["x=4"]
    )


def test_an_interrupt_before_anything_is_placed_goes_on() -> None:
    def interrupted(mesh_request: MeshRequest) -> PlacedModel:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(interrupted)


def test_what_is_found_trains_like_one_device(tmp_path: Path) -> None:
    found = search(num_positions=2, schedules=("zb_h1",))
    assert found.best is not None
    (tmp_path / "plan.json").write_text(found.best.plan.dumps())
    entry = zoo.get("gpt2")
    config = {"plan_ngpus": 4, "runtime_ngpus": 4, "use_end2end": True}
    config["pas_config"] = {"load_plan": str(tmp_path / "plan.json")}
    report = verify(entry.build(), entry.inputs(), "saved", config, steps=2)
    assert report.ok, str(report)


def test_axes_are_named_after_what_they_split() -> None:
    plan = by_thumb(MeshRequest(Mesh((("x", 2), ("y", 2))), (0, 1, 2, 3), 1)).plan
    dims = {"a": {"x": "batch", "y": "heads"}, "b": {"x": "batch", "y": "ffn"}}
    found = named(
        replace(plan, stored={"w": Layout.parse("[8/y, 4] G(x)")} | dict(plan.stored)), dims
    )
    assert found.mesh == Mesh((("dp", 2), ("tp", 2)))
    assert str(found.stored["w"]) == "[8/tp, 4] G(dp)"
    assert {axis for assignment in found.strategies.values() for axis in assignment} <= {"dp", "tp"}
    assert renamed(found, {"dp": "x", "tp": "y"}).strategies == plan.strategies
    assert Plan.from_json(json.loads(found.dumps())) == found


def test_two_axes_that_split_alike_have_two_names() -> None:
    plan = Plan(Mesh((("x", 2), ("y", 2), ("z", 2))))
    assert named(plan, {"a": {"x": "ffn", "y": "heads", "z": "vocab"}}).mesh.names == (
        "tp",
        "tp2",
        "tp3",
    )


def test_an_axis_that_splits_nothing_is_not_said_to() -> None:
    """Nor one that cuts only what is stored to be copies."""
    plan = Plan(Mesh((("x", 6), ("y", 2))), stored={"w": Layout.parse("[8/y, 4]")})
    assert str(named(plan, {}).mesh) == "copies=6 x tp=2"


def test_meshes_and_paces() -> None:
    assert [mesh.axes for mesh in meshes(8)] == [
        (("x", 8),),
        (("x", 2), ("y", 4)),
        (("x", 4), ("y", 2)),
    ]
    assert [mesh.size for mesh in meshes(8, 3)] == [8] * 4 and meshes(1) == [Mesh(())]
    found = named_schedules(4, 6, ("1f1b", "1f1b_interleaved", "zb_v"), None, most=100)
    assert [(named_schedule.name, named_schedule.chunks) for named_schedule in found] == [
        ("1f1b", 1),
        ("zb_v", 2),
    ], "6 is no multiple of 4"
    found = named_schedules(4, 8, ("1f1b", "1f1b_interleaved", "zb_h1", "zb_v"), None, most=100)
    assert [(named_schedule.name, named_schedule.chunks) for named_schedule in found] == [
        ("1f1b", 1),
        ("zb_h1", 1),
        ("1f1b_interleaved", 2),
        ("zb_v", 2),
        ("1f1b_interleaved", 3),
        ("1f1b_interleaved", 4),
    ], "those that are soon cut come first: time may end behind any of them"
    assert named_schedules(4, 8, ("1f1b_interleaved",), None, most=9) == named_schedules(
        4, 8, ("1f1b_interleaved",), 2, most=100
    )


def test_schedules_raise_the_bounds_of_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds rise as much as the least of the others, or the best plan, asks for; with nothing else
    changed.
    """
    schedules = ("1f1b", "zb_v")
    raised = search(schedules=schedules, num_positions=2, mixed=False)
    monkeypatch.setattr(outer_search, "raise_bounds", lambda state: None)
    first = search(schedules=schedules, num_positions=2, mixed=False)
    assert (
        raised.best is not None and first.best is not None and raised.best.plan == first.best.plan
    )
    assert first.bound_s < raised.bound_s <= raised.best.step_s
    for candidate in raised.tried:
        assert candidate.bound_s <= candidate.step_s * (1 + 1e-9)
    assert [c.plan for c in raised.tried] == [c.plan for c in first.tried]


def test_a_simple_plan_is_bounded_by_what_the_search_cut_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mesh and schedule are the same. A plan that takes less than that is left as it is, as
    another placement is better there.
    """
    states: list[SearchState] = []
    monkeypatch.setattr(outer_search, "raise_bounds", states.append)
    found = search(schedules=("1f1b", "zb_v"), num_positions=2)
    own = found.best
    assert own is not None and own.cost is not None and found.bound_s == own.split_bound_s
    simple = replace(own, cut_request=None, is_simple=True, split_bound_s=0.0, title="simple")
    faster = replace(simple, cost=None, predicted_s=own.split_bound_s / 2, title="faster")
    found.audited, found.others = [simple, own], [*found.others, faster]
    raise_bounds(states[0])
    split_bounds_s = {candidate.title: candidate.split_bound_s for candidate in found.tried}
    assert own.split_bound_s < split_bounds_s["simple"] <= own.step_s
    assert split_bounds_s["faster"] == 0.0


def test_the_last_placement_on_other_ranks_than_the_first_is_walked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages that differ choose among those on the first ranks, so no other one is among these."""
    states: list[SearchState] = []
    monkeypatch.setattr(outer_search, "raise_bounds", states.append)
    found = search(schedules=("1f1b",), num_positions=2)
    assert found.best is not None
    state, placed = states[0], found.best.placed[0]
    known = list(state.placements)
    inner, first = (state.lowered(placed, ranks) for ranks in ((0, 2), (0, 1)))
    assert state.lowered(placed, (0, 2)).walk is inner.walk is not first.walk
    assert inner.walk.program is first.walk.program and state.placements == known


@pytest.mark.parametrize(
    ("limit_s", "passed_s", "took_s"),
    [
        (10.0, 0.0, 2.0),
        (10.0, 0.0, 0.0),
        (120.0, 0.0, 24.0),
        (600.0, 0.0, 24.0),
        (300.0, 100.0, 50.0),
        (1000.0, 0.0, 40.0),
    ],
)
def test_bounds_are_raised_no_further_than_what_cannot_be_raised(
    limit_s: float, passed_s: float, took_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least bound is raised first, in a share of the limit, or of the first two minutes of a
    longer one, or half of what the search took. Where it takes no time, it ends with the game.
    """
    asked: list[tuple[str, bool, bool]] = []
    clock = Passing(limit_s)
    clock.passed_s = passed_s

    class NoBetter:
        bound_s, is_over = 0.0, False

        def __init__(self, title: str) -> None:
            self.title = title

        def play(self, enough_s: float, rounds: int, is_late: Any) -> None:
            begins = is_late()
            clock.passed_s += took_s
            self.is_over = took_s == 0.0
            asked.append((self.title, begins, is_late()))

    monkeypatch.setattr(
        CutBounds,
        "scheduled_bound",
        lambda self, cut_request: NoBetter(cut_request.title),
    )
    found = search(schedules=("1f1b", "zb_h1", "zb_v"), num_positions=2, mixed=False, clock=clock)
    staged = [candidate for candidate in found.tried if candidate.plan.stages]
    assert len({candidate.bound_s for candidate in staged}) > 1
    title = min(staged, key=lambda candidate: candidate.bound_s).title
    assert asked == [(title, False, took_s > 0.0)]


def test_a_bound_that_rounding_keeps_below_what_is_enough_is_not_raised_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nearly:
        bound_s, is_over, turns = 0.0, False, 0

        def play(self, enough_s: float, rounds: int, is_late: Any) -> None:
            self.bound_s, self.turns = math.nextafter(enough_s, 0.0), self.turns + 1
            assert self.turns == 1

    monkeypatch.setattr(CutBounds, "scheduled_bound", lambda self, cut_request: Nearly())
    found = search(schedules=("1f1b", "zb_h1"), num_positions=2, mixed=False)
    assert found.best is not None
    assert found.bound_s == pytest.approx(found.best.step_s, rel=1e-12)


def test_pipelines_that_there_was_no_time_to_try_are_bounded_by_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first mesh takes nearly all of the limit."""
    clock, tried = Passing(10.0), MeshTrials.try_all

    def slowly(trials: MeshTrials, placed_mesh: PlacedMesh) -> None:
        tried(trials, placed_mesh)
        clock.passed_s = 8.5

    monkeypatch.setattr(MeshTrials, "try_all", slowly)
    pipelines = {1: meshes(1), 2: meshes(2), 4: []}
    found = search(schedules=("1f1b", "zb_h1"), meshes=pipelines, clock=clock)
    steps_s = {candidate.title: candidate.step_s for candidate in everything().tried}
    tried_first = [f"pp=2 x x=2, {each}" for each in ("1f1b", "zb_h1")]
    assert {candidate.title for candidate in found.tried} == set(tried_first)
    assert found.best is not None and found.best.title == min(tried_first, key=steps_s.__getitem__)
    assert found.interrupted is not None and not found.unanswered
    # A schedule with a smaller bubble has a lower bound, which its plan is not below.
    bounds_s = {each: found.bounds[f"pp=4, {each}"] for each in ("1f1b", "zb_h1")}
    assert bounds_s["zb_h1"] < bounds_s["1f1b"]
    for each, bound_s in bounds_s.items():
        assert 0.5 * steps_s[f"pp=4, {each}"] < bound_s <= steps_s[f"pp=4, {each}"]


def test_an_interrupt_while_bounds_are_raised_leaves_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(state: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(outer_search, "raise_bounds", interrupted)
    found = search(num_positions=2, schedules=("1f1b",), mixed=False)
    assert found.best is not None and found.interrupted == "Ctrl-C"


def test_the_bound_of_stages_is_of_every_chain_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here that by layers, which takes longer, is said to have the lower one."""
    known: list[Split] = []

    def noted(*args: Any, **options: Any) -> Any:
        split = split_stages(*args, **options)
        assert isinstance(split, Split)
        known.append(split if known else replace(split, bound_s=1e-6))
        return known[-1]

    monkeypatch.setattr(cut_stages, "split_stages", noted)
    # It would raise what is said.
    monkeypatch.setattr(outer_search, "raise_bounds", lambda state: None)
    found = search(num_positions=4, schedules=("1f1b",))
    by_layer, fine = known
    assert found.best is not None and found.best.modelled_s == fine.cost_s < by_layer.cost_s
    assert found.best.split_bound_s == 1e-6 < fine.bound_s


def test_layers_are_dealt_out_in_more_stages_where_that_is_faster() -> None:
    """Ten layers on two positions: five stages on each wait for less than four, as schedules are
    tried with.
    """
    with torch.device("meta"):
        model = nn.Sequential(
            OrderedDict(layers=nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))))
        )
    whole = annotate(trace(WithLoss(model), {"x": torch.zeros(4, 64)}), pass_manager())
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True)
    hardware = slow_machine(2, bytes_per_s=1e12)
    options = AutodistOptions(
        num_microbatches=2,
        num_stages=2,
        simpler_within=0.0,
        memory_limit_gb=1.0,
        schedule="1f1b_interleaved",
    )
    found = autodist_search(whole, config, options, hardware)
    assert found.best is not None and "x5" in found.best.title
    fewer = autodist_search(whole, config, replace(options, chunks=4), hardware)
    assert fewer.best is not None and found.best.step_s < 0.998 * fewer.best.step_s


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model(x)).sum()
