"""Searches over stages of ZeRO and sizes of a microbatch: against searches of one each, audited,
trained, refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import planning
import plans
import pytest
import torch
import zoo
from traces import shared_trace, shared_traces

from shardwright import parallelize
from shardwright.compiler.compile import Compiled, compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.plan.plan import Batch, Plan
from shardwright.compiler.trace import trace
from shardwright.frontend.files.cache import read_plan
from shardwright.frontend.search_plan import PlanSearch, SearchedPlan, search_plan
from shardwright.frontend.sized_inputs import resized
from shardwright.frontend.verification.sample_inputs import in_float64
from shardwright.frontend.verification.verify import verify
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.candidates.alarm import Alarm, TimeIsOver
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.mesh_requests import PlacedModel
from shardwright.policies.autodist.candidates.results import (
    INTERRUPT,
    Candidate,
    CutRequest,
    LoweredPlacement,
    NotCompared,
    SearchResult,
)
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.search.batch_sizes import sizes_for
from shardwright.policies.autodist.search.certificate import HIDDEN, certificate
from shardwright.policies.autodist.search.subsearches import (
    Subsearch,
    Subsearches,
    _once_more,
)
from shardwright.policies.autodist.stages.walk import Walk
from shardwright.policies.known_policies import find_policy
from shardwright.policies.saved_plan import SavedOptions, load_plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, PlanError
from shardwright.runtime.manifest import Manifest

MLP_DIMS = {"x": 0, "target": 0}


def config_of(plan_ngpus: int, units: int, use_zero: Any = "auto", **options: Any) -> ComputeConfig:
    end2end = options.pop("use_end2end", False)
    ranks = plan_ngpus * units
    return ComputeConfig(
        plan_ngpus=plan_ngpus,
        runtime_ngpus=ranks,
        use_zero=use_zero,
        use_end2end=end2end,
        pas_config=options,
    )


def searched(name: str, config: ComputeConfig) -> SearchedPlan:
    entry = zoo.get(name)
    with shared_traces(name):
        return search_plan(entry.build(), entry.inputs(), config)


def compiled(name: str, found: SearchedPlan, config: ComputeConfig) -> Compiled:
    graph = shared_trace(name, zoo.get(name).build(), found.dummy_forward_args)
    return compile_graph(graph, lambda g, c: found.plan, config, policy_name="autodist")


@functools.cache
def alone(size: int, num_microbatches: int, stage: int, limit_bytes: float) -> float:
    """Seconds per step of the best plan of a search with the stage and the size given, infinite if
    nothing fits.
    """
    entry = zoo.get("mlp")
    graph = plans.annotated(
        shared_trace("mlp", entry.build(), resized(entry.inputs(), MLP_DIMS, size))
    )
    options = AutodistOptions(update_freq=num_microbatches, memory_limit_gb=limit_bytes * 1e-9)
    found = search(graph, config_of(1, 4, stage), options, load_hardware("a100-80gb", 4))
    return found.best.step_s if found.best else float("inf")


@pytest.mark.parametrize(
    "limit_bytes", [pytest.param(x, marks=pytest.mark.slow) for x in (15000, 1e9, 18000, 12400)]
)
def test_stages_and_sizes_are_searched_exactly(limit_bytes: float) -> None:
    """The best of all, with memory to spare, and where it takes smaller microbatches, or pieces of
    parameters.
    """
    options = {"global_batch": 32, "memory_limit_gb": limit_bytes * 1e-9}
    found = searched("mlp", config_of(1, 4, **options | {"simpler_within": 0.0}))
    every = {
        (size, stage): alone(size, 8 // size, stage, limit_bytes)
        for size, stage in itertools.product((1, 2, 4, 8), range(4))
    }
    plan = found.plan
    assert plan.batch is not None and plan.zero_stage is not None and plan.certificate is not None
    chosen = (plan.batch.samples, plan.zero_stage)
    assert plan.batch == Batch(chosen[0], 8 // chosen[0], MLP_DIMS)
    assert every[chosen] == plan.certificate.cost_s == min(every.values())
    expected = {1e9: (8, 0), 18000: (8, 3), 15000: (4, 3), 12400: (1, 3)}
    assert chosen == expected[limit_bytes]
    assert (
        "searched one by one: microbatches of 1, 2, 4 and 8 samples, units of 1 rank alone, "
        "stages 0, 1, 2 and 3 of ZeRO" in plan.certificate.proof
    )


def test_a_lower_stage_of_zero_is_taken_that_takes_about_as_long() -> None:
    """Where memory is short, it does not fit. Buckets are small, so that a rank of ZeRO-1 has more
    than one at a time.
    """
    options = {"zero": [1, 2], "microbatch": [8], "global_batch": 32, "memory_limit_gb": 1.0}
    options["simpler_within"] = 0.05
    stages = {}
    for asked in ({}, {"simpler_within": 0.0}, {"memory_limit_gb": 20e-6}):
        config = replace(config_of(1, 4, **options | asked), reducer_bucket_cap_mb=0.002)
        plan = searched("mlp", config).plan
        stages[str(asked)] = plan.zero_stage
        assert plan.certificate is not None
        is_said = any("so the simpler one is taken" in line for line in plan.certificate.proof)
        assert is_said == (not asked)
    assert list(stages.values()) == [1, 2, 2]


@pytest.mark.slow
def test_sizes_of_units_are_searched() -> None:
    """The best of all sizes is the best of searches of one each, unless a simpler one takes about
    as long; the plan found compiles as it is certified, and what is about one size is refused.
    """
    options = {"zero": [1], "global_batch": 8, "simpler_within": 0.0}
    alone_s = {
        size: searched("mlp", config_of(size, 4 // size, **options)).plan.certificate.cost_s
        for size in (1, 2, 4)
    }
    assert len(set(alone_s.values())) == 3, "sizes of which one is the best"
    found = searched("mlp", config_of(4, 1, **options, unit_sizes=[1, 2, 4]))
    plan, best = found.plan, min(alone_s, key=alone_s.__getitem__)
    assert found.plan_ngpus == best == plan.mesh.size
    assert plan.certificate is not None and plan.certificate.cost_s == alone_s[best]
    assert any("units of 1, 2 and 4 ranks, " in line for line in plan.certificate.proof)
    made = compiled("mlp", found, found.variant.config)
    assert made.config.num_units == 4 // best and made.plan.certificate is not None
    assert best > 1 and alone_s[1] < 1.2 * alone_s[best], "units of one rank take about as long"
    simple = searched(
        "mlp", config_of(4, 1, **options | {"simpler_within": 0.2, "unit_sizes": [1, 2, 4]})
    )
    assert simple.plan_ngpus == 1 and simple.plan.certificate is not None
    assert simple.plan.certificate.cost_s == alone_s[1]
    assert any("so the simpler one is taken" in line for line in simple.plan.certificate.proof)
    for refused, why in (
        ({"unit_sizes": [3]}, "it lists numbers of ranks, each once, that divide runtime_ngpus=4"),
        ({"unit_sizes": [2], "mesh": {"x": 2}}, "these are about units of one size"),
    ):
        with pytest.raises(ConfigError, match=why):
            searched("mlp", config_of(4, 1, **options, **refused))
    with pytest.raises(ConfigError, match="'unit_sizes' of policy 'autodist' is for a search"):
        find_policy("autodist").apply(
            planning.graph_of(zoo.get("mlp").build(), zoo.get("mlp").inputs()),
            config_of(4, 1, **options, unit_sizes=[2]),
        )


@pytest.mark.parametrize(
    ("share", "num_ranks", "expected"),
    [
        (32, 1, [1, 2, 4, 8, 16]),
        (256, 64, [1, 4, 16, 64, 256]),
        (4, 8, [1, 2, 4]),
        (7, 4, [1, 7]),
    ],
)
def test_sizes_follow_the_ranks_of_a_unit(share: int, num_ranks: int, expected: list[int]) -> None:
    assert sizes_for(share, num_ranks) == expected


def test_a_limit_of_no_time_at_all_is_one() -> None:
    """What the first of several searches leave of a limit may be nothing."""
    found = searched("mlp", config_of(1, 4, time_limit_s=0.0))
    assert found.plan.certificate is not None and found.plan.zero_stage is not None
    with pytest.raises(PlanError, match="no plan for 1 ranks"):
        searched("mlp", config_of(1, 4, time_limit_s=0.0, memory_limit_gb=1e-9))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_certificate_states_the_audited_cost_of_every_stage(stage: int) -> None:
    config = config_of(2, 2, zero=[stage], global_batch=12, microbatch=[2])
    found = searched("mlp", config)
    made = compiled("mlp", found, config)
    assert made.config == found.variant.config and made.config.zero_stage == stage
    cost = audit(made.program, made.config, load_hardware("a100-80gb", 4))
    assert found.plan.certificate is not None
    assert found.plan.certificate.cost_s == pytest.approx(cost.step_s, rel=1e-9)
    assert made.plan.zero == (2 if stage == 3 else 0)
    # A step that begins its gathers ahead is shorter, which the certificate says.
    waited = audit(made.program, made.config, load_hardware("a100-80gb", 4), gathers_ahead=False)
    assert cost.step_s < waited.step_s if stage == 3 else waited == cost
    assert (HIDDEN in found.plan.certificate.proof) == (stage == 3)
    assert Plan.from_json(json.loads(found.plan.dumps())) == found.plan


@pytest.mark.parametrize("stage", [1, 3])
def test_the_stage_chosen_trains_like_one_device(stage: int, tmp_path: Path) -> None:
    entry, config = zoo.get("mlp"), config_of(2, 2, zero=[stage])
    report = verify(entry.build(), entry.inputs(), "autodist", config, steps=2, directory=tmp_path)
    assert report.ok, str(report)
    (directory,) = {path.parent for path in tmp_path.rglob("manifest.json")}
    manifest = Manifest.read(directory)
    assert manifest.config is not None and manifest.config.zero_stage == stage
    assert manifest.request["config"]["use_zero"] == "auto"


@pytest.mark.slow
def test_microbatches_chosen_train_like_one_device(tmp_path: Path) -> None:
    """A pipeline with the stage and the size that the search has chosen."""
    entry = zoo.get("gpt2")
    config = config_of(
        2, 2, use_end2end=True, zero=[1], global_batch=8, microbatch=[2], num_stages=2
    )
    found = searched("gpt2", config)
    assert found.plan.stages and found.plan.batch is not None and found.plan.num_microbatches == 2
    report = verify(
        entry.build(), found.dummy_forward_args, lambda graph, config: found.plan, config, steps=2
    )
    assert report.ok, str(report)
    (tmp_path / "plan.json").write_text(found.plan.dumps())
    graph = planning.graph_of(entry.build(), dict(found.dummy_forward_args))
    plan = load_plan(
        SavedOptions(load_plan=str(tmp_path / "plan.json"), num_microbatches=6), graph, config
    )
    assert plan.num_microbatches == 6 and plan.batch == Batch(2, 6, found.plan.batch.dims)


def test_a_plan_in_a_file_keeps_its_stage_and_its_microbatches(tmp_path: Path) -> None:
    entry, path = zoo.get("mlp"), tmp_path / "plan.json"
    found = searched("mlp", config_of(1, 2, zero=[2], global_batch=8, microbatch=[2]))
    path.write_text(found.plan.dumps())

    def compile_saved(use_zero: Any, inputs: Mapping[str, Any]) -> Manifest:
        config = config_of(1, 2, use_zero, load_plan=str(path))
        parallelize(
            entry.build(),
            inputs,
            "saved",
            config,
            gen_savedir=tmp_path,
            load_module=False,
            reuse="override",
        )
        (directory,) = {file.parent for file in tmp_path.rglob("manifest.json")}
        return Manifest.read(directory)

    assert compile_saved("auto", found.dummy_forward_args).zero_stage == 2
    made = compile_saved(2, found.dummy_forward_args)
    assert made.zero_stage is None and made.config is not None and made.config.zero_stage == 2
    with pytest.raises(PlanError) as caught:
        compile_saved(0, found.dummy_forward_args)
    assert str(caught.value) == (
        "the plan was chosen for stage 2 of ZeRO\n"
        "  why:   use_zero is 0, and time and memory of the plan are those of stage 2\n"
        "  try:   use_zero=2, or use_zero='auto' for what the plan says"
    )
    with pytest.raises(PlanError) as caught:
        compile_saved(2, entry.inputs())
    assert str(caught.value) == (
        "the plan is for microbatches of 2 samples, the dummy arguments have 4\n"
        "  why:   input 'x' has shape [4, 12], and its dim 0 counts samples\n"
        "  try:   give dummy arguments of 2 samples (shardwright.search_plan returns them), or "
        "search again"
    )


def test_a_model_traced_for_one_size_is_planned_for_that() -> None:
    entry, config = zoo.get("mlp"), config_of(1, 2, 0, global_batch=72)
    graph = plans.traced(entry.build(), entry.inputs())
    plan = compile_graph(graph, find_policy("autodist").apply, config, policy_name="autodist").plan
    assert (
        plan.batch == Batch(4, 9, MLP_DIMS)
        and plan.zero_stage is None
        and plan.certificate is not None
    )
    assert "searched one by one: microbatches of 4 samples" in str(plan.certificate)
    with pytest.raises(ConfigError) as caught:
        compile_graph(
            graph,
            find_policy("autodist").apply,
            config_of(1, 2, 0, global_batch=72, microbatch=[4, 6]),
        )
    assert str(caught.value) == (
        "microbatch=[4, 6] asks for other sizes than the one the model was traced for\n"
        "  why:   the dummy arguments have 4 samples, by dim 0 of 'x', dim 0 of 'target'\n"
        "  try:   search with `shardwright plan` or shardwright.search_plan, which trace the "
        "model for every size"
    )


@pytest.mark.slow
def test_a_compile_for_any_number_of_samples_searches_their_number(tmp_path: Path) -> None:
    """The program takes any number, the plan says which is best."""
    entry = zoo.get("mlp")
    dynamic = {path: {0: "batch"} for path in MLP_DIMS}
    options = {"global_batch": 16, "save_plan": str(tmp_path / "plan.json")}
    config = replace(config_of(2, 1, **options), dynamic_dims=dynamic)
    report = verify(entry.build(), entry.inputs(), "autodist", config, steps=2, directory=tmp_path)
    assert report.ok, str(report)
    (directory,) = {path.parent for path in tmp_path.rglob("manifest.json")}
    plan = read_plan(directory)
    alone = search_plan(
        entry.build().double(), in_float64(entry.inputs()), config_of(2, 1, global_batch=16)
    ).plan
    assert (
        plan.batch == alone.batch == Batch(16, 1, MLP_DIMS) and plan.zero_stage == alone.zero_stage
    )
    assert plan.certificate == alone.certificate
    assert Plan.from_json(json.loads((tmp_path / "plan.json").read_text())).batch == plan.batch
    graph = trace(entry.build(), entry.inputs(), dynamic_dims={path: {0: "n"} for path in MLP_DIMS})
    with pytest.raises(ConfigError) as caught:
        compile_graph(
            graph,
            find_policy("autodist").apply,
            config_of(2, 1, global_batch=16, batch_dims=MLP_DIMS),
        )
    assert str(caught.value) == (
        "global_batch needs a model that was traced for a number of samples\n"
        "  why:   x, target have the dynamic size n there, and what a microbatch of it costs "
        "is not known\n"
        "  try:   call it 'batch' in dynamic_dims, or name them: --batch-dims "
        "input_ids=0,labels=0 of a command, in Python batch_dims={'input_ids': 0, 'labels': 0}"
    )


# ------------------------------------------------------------------------------------------------
# the search of searches


def variants_of(config: ComputeConfig, stages: Any = None) -> Subsearches:
    return Subsearches.of({None: plans.zoo_graph("mlp")}, config, stages)


def found_by(seconds: Mapping[int, float]) -> Any:
    """A search that takes no time."""

    def one(subsearch: Subsearch, time_limit_s: float, others_s: float) -> SearchResult:
        assert subsearch.zero_stage is not None
        if seconds[subsearch.zero_stage] < 0:
            raise KeyboardInterrupt
        step_s = seconds[subsearch.zero_stage]
        placed = PlacedModel(Plan(planning.mesh_of("1")), 0.9 * step_s, "none", "none")
        found = SearchResult(audited=[Candidate("one rank", placed.plan, step_s, (placed,))])
        lowered = LoweredPlacement(placed, cast(Walk, None))  # no program of it is asked for
        found.bound(
            CutRequest("2 stages", (lowered, lowered), 2, NamedSchedule("1f1b", 1)), 0.8 * step_s
        )
        return found

    return one


@pytest.mark.parametrize(("interrupted", "bounds_s"), [(None, [1.8, 1.8]), ("time", [1.8, 1.0])])
def test_plans_of_a_search_that_ran_twice_have_the_bound_of_a_run_that_came_to_its_end(
    interrupted: str | None, bounds_s: list[float]
) -> None:
    """The first run, in a hurry, has placed the mesh for speed alone."""

    def audited(step_s: float, bound_s: float) -> SearchResult:
        plan = Plan(planning.mesh_of("4"), recompute=(f"layers.{step_s}",))
        placed = PlacedModel(plan, bound_s, "none", "none")
        return SearchResult(audited=[Candidate("", plan, step_s, (placed,))])

    first, second = audited(2.0, 1.0), audited(1.9, 1.8)
    found = _once_more(replace(first, interrupted="time"), replace(second, interrupted=interrupted))
    assert [each.step_s for each in found.audited] == [1.9, 2.0]
    assert [each.bound_s for each in found.audited] == bounds_s


def test_no_search_is_begun_after_the_alarm() -> None:
    alarm = Alarm(0.0)

    def one(*asked: Any) -> SearchResult:
        with contextlib.suppress(TimeIsOver), alarm.may_interrupt():
            alarm.note_answer()
        return cast(SearchResult, found_by({0: 2.0})(*asked))

    found = variants_of(config_of(1, 2)).search(one, 60.0, alarm=alarm)
    why = "not searched, as 0.0 s were left, and the quickest search took 0.0 s"
    assert found.refused == {f"ZeRO-{stage}": why for stage in (1, 2, 3)}
    assert found.interrupted == "the time limit of 60 s, which 4 searches share"


def test_an_interrupt_keeps_the_best_of_the_searches_so_far() -> None:
    found = variants_of(config_of(1, 2)).search(found_by({0: 2.0, 1: 1.0, 2: -1.0, 3: 0.5}), 60.0)
    assert (
        found.best is not None
        and found.best.plan.zero_stage == 1
        and found.interrupted == INTERRUPT
    )
    assert found.refused == {"ZeRO-3": "not searched, as the search had ended"}
    left = "no time was left for 1 of 4 stages of ZeRO"
    assert found.searched == f"stages 0, 1 and 2 of ZeRO; {left}"
    stated = certificate(found, found.best, load_hardware("a100-80gb"))
    # Two were found, each with a mesh of its own and a pipeline that has a bound and no plan.
    covered = (
        "any plan on the 4 meshes and schedules that the search came to, but not with 1 of 4 "
        "stages of ZeRO"
    )
    assert stated.covers == covered and f"for {covered} (gap" in stated.claim
    with pytest.raises(KeyboardInterrupt):
        variants_of(config_of(1, 2)).search(found_by({0: -1.0}), 60.0)


def test_meshes_that_were_not_compared_are_told_in_a_line() -> None:
    """The most likely ones are named, and none whose bound is above what was found later."""
    left = [NotCompared(f"tp={size}", size / 100, 1 / size) for size in (2, 4, 8, 16, 60)]

    def one(subsearch: Subsearch, time_limit_s: float, others_s: float) -> SearchResult:
        found = found_by({0: 2.0, 1: 0.5, 2: 3.0, 3: 1.0})(subsearch, time_limit_s, others_s)
        return replace(found, not_compared=left, compared=["dp=2, as data has it"])  # type: ignore[no-any-return]

    found = variants_of(config_of(1, 2)).search(one, 60.0)
    assert found.best is not None and found.best.step_s == 0.5
    told = certificate(found, found.best, load_hardware("a100-80gb")).proof
    assert (
        "the simple policies may have a better plan: there was no time to compare it with those on "
        "16 meshes in 4 of these searches, the most likely of them: tp=16, no ZeRO; tp=16, ZeRO-1; "
        "4 of their plans were compared: among them dp=2, as data has it, no ZeRO; dp=2, as data "
        "has it, ZeRO-1"
    ) in told


def test_a_mesh_that_a_later_search_beats_is_compared() -> None:
    """No search has compared any mesh. All of the first one are ruled out by the second's plan."""
    left = {0: [NotCompared("tp=2", 1.2)], 1: [NotCompared("tp=4", 0.3)]}

    def one(subsearch: Subsearch, time_limit_s: float, others_s: float) -> SearchResult:
        found = found_by({0: 2.0, 1: 1.0})(subsearch, time_limit_s, others_s)
        return replace(found, not_compared=left[subsearch.zero_stage or 0])  # type: ignore[no-any-return]

    found = variants_of(config_of(1, 2), stages=[0, 1]).search(one, 60.0)
    assert found.best is not None
    told = certificate(found, found.best, load_hardware("a100-80gb")).proof
    assert (
        "the simple policies may have a better plan: there was no time to compare it with those on "
        "tp=4, ZeRO-1; none of their plans was compared"
    ) in told


def test_the_time_is_shared() -> None:
    given: list[tuple[float, float]] = []

    def one(subsearch: Subsearch, time_limit_s: float, others_s: float) -> SearchResult:
        given.append((time_limit_s, others_s))
        return found_by({0: 2.0, 1: 1.0, 2: 3.0, 3: 0.5})(subsearch, time_limit_s, others_s)  # type: ignore[no-any-return]

    found = variants_of(config_of(1, 2)).search(one, 80.0)
    assert [limit for limit, _ in given] == pytest.approx([20.0, 80 / 3, 40.0, 80.0], rel=0.05)
    assert [others for _, others in given] == [float("inf"), 2.0, 1.0, 1.0]
    assert [candidate.plan.zero_stage for candidate in found.audited] == [3, 1, 0, 2]
    assert found.bounds["2 stages, ZeRO-1"] == 0.8 and found.bound_s == 0.4 and found.tried_mixed
    given.clear()
    variants_of(config_of(1, 2)).search(one, 80.0, 40.0)  # half of it is over before
    assert [limit for limit, _ in given] == pytest.approx([10.0, 40 / 3, 20.0, 40.0], rel=0.05)
    late = variants_of(config_of(1, 2)).search(one, 0.0)
    assert (
        late.best is not None
        and late.best.plan.zero_stage == 0
        and late.interrupted == "the time limit of 0 s, which 4 searches share"
    )
    assert list(late.refused) == ["ZeRO-1", "ZeRO-2", "ZeRO-3"]


@pytest.mark.parametrize("overtime_is_over", [False, True])
def test_after_the_limit_what_needs_least_memory_is_searched_first(
    monkeypatch: pytest.MonkeyPatch, overtime_is_over: bool
) -> None:
    """Nothing fits. After the overtime of a search only the one that needs least is begun."""
    order: list[int | None] = []

    def one(subsearch: Subsearch, time_limit_s: float, others_s: float) -> SearchResult:
        order.append(subsearch.zero_stage)
        return SearchResult()

    monkeypatch.setattr(Clock, "is_over", overtime_is_over)
    found = variants_of(config_of(1, 2)).search(one, 0.0)
    assert order == ([0, 3] if overtime_is_over else [0, 3, 2, 1])
    why = "not searched, as the time limit was over"
    assert found.refused == ({f"ZeRO-{stage}": why for stage in (2, 1)} if overtime_is_over else {})


@pytest.mark.parametrize("num_left", [0, 3, 5])
def test_what_searches_leave_of_their_shares_is_for_those_that_need_more(num_left: int) -> None:
    """Two searches are ended by their shares, with four meshes left. The one with the better plan
    runs again first. It finds nothing new and says what it knows of more meshes, unless it comes
    less far.
    """
    given: list[tuple[int | None, float, float]] = []

    def one(subsearch: Subsearch, time_limit_s: float, others_s: float) -> SearchResult:
        stage = subsearch.zero_stage
        is_again = stage in [earlier for earlier, _, _ in given]
        given.append((stage, time_limit_s, others_s))
        found = found_by({0: 2.0, 1: 1.0, 2: 3.0, 3: 1.5})(subsearch, time_limit_s, others_s)
        found.seconds, found.num_left = 1.0, num_left if is_again else 4
        is_ended = stage in (0, 1) and not (is_again and not num_left)
        found.interrupted = "its share" if is_ended else None
        if is_again:
            found.audited, found.refused = [], {"dp=2": "again"}
        return cast(SearchResult, found)

    found = variants_of(config_of(1, 2)).search(one, 80.0)
    again = [(stage, others) for stage, _, others in given[4:]]
    assert again == [(1, 1.0), (0, 1.0)]
    assert [limit for _, limit, _ in given[4:]] == pytest.approx([80.0 * 2 / 3, 80.0], rel=0.05)
    assert [candidate.plan.zero_stage for candidate in found.audited] == [1, 3, 0, 2]
    assert [title for title, why in found.refused.items() if why == "again"] == (
        ["dp=2, no ZeRO", "dp=2, ZeRO-1"] if num_left < 4 else []
    )
    assert found.num_left == 2 * min(num_left, 4) + 2 * 4
    over = "the time limit of 80 s, which 4 searches share"
    assert found.interrupted == (over if num_left else None)


def test_a_stage_that_other_settings_rule_out_is_refused_in_words() -> None:
    table = {"overlap_param_sync": True}
    config = ComputeConfig(
        plan_ngpus=1, runtime_ngpus=2, use_zero="auto", distributed_optimizer=table
    )
    found = variants_of(config)
    assert [subsearch.zero_stage for subsearch in found.listed] == [1, 2]
    assert found.refused == {
        "no ZeRO": "overlap_param_sync has no meaning with use_zero=0",
        "ZeRO-3": "overlap_param_sync has no meaning with use_zero=3",
    }


def test_groups_and_scattering_hold_where_there_is_a_stage() -> None:
    config = ComputeConfig(
        plan_ngpus=1, runtime_ngpus=4, use_zero="auto", zero_ngroups=2, zero_use_reduce_scatter=True
    )
    listed = variants_of(config).listed
    assert [(v.config.zero_ngroups, v.config.zero_use_reduce_scatter) for v in listed] == [
        (1, False),
        *[(2, True)] * 3,
    ]


# ------------------------------------------------------------------------------------------------
# refusals


def refusal(
    config: ComputeConfig, inputs: Mapping[str, Any] | None = None, name: str = "mlp"
) -> str:
    entry = zoo.get(name)
    with pytest.raises(ConfigError) as caught, shared_traces(name):
        PlanSearch.of(entry.build(), inputs or entry.inputs(), config)
    return str(caught.value)


def test_refusals_of_stages() -> None:
    assert refusal(config_of(1, 2, 1, zero=[0, 1])) == (
        "policy 'autodist' has the option zero, and the config a stage of ZeRO\n"
        "  why:   zero=[0, 1] are stages to choose from, use_zero=1 is one\n"
        "  try:   use_zero='auto' leaves the stage to the search"
    )
    for stages in ([], [4], [1, 1]):
        assert refusal(config_of(1, 2, zero=stages)) == (
            f"option 'zero' of policy 'autodist' cannot be {stages}\n"
            "  why:   it lists stages of ZeRO, each once, to choose from\n"
            "  try:   some of 0, 1, 2 and 3; without it all are tried"
        )
    entry = zoo.get("mlp")
    graph = plans.traced(entry.build(), entry.inputs())
    with pytest.raises(PlanError) as caught:
        compile_graph(graph, find_policy("data").apply, config_of(2, 2), policy_name="data")
    assert str(caught.value) == (
        "the plan says no stage of ZeRO\n"
        "  why:   use_zero='auto' leaves it to the plan, and policy 'data' chose none\n"
        "  try:   policy 'autodist' searches it; else name a stage, use_zero=0 to 3"
    )


def test_refusals_of_batches() -> None:
    assert refusal(config_of(1, 2, 0, microbatch=[2])) == (
        "policy 'autodist' has microbatch but no global_batch\n"
        "  why:   the samples of a step are dealt to units and cut into microbatches, and their "
        "number is not known\n"
        "  try:   give global_batch, the samples of a step over all units"
    )
    assert refusal(config_of(1, 2, 0, global_batch=8, update_freq=2)) == (
        "policy 'autodist' has global_batch and update_freq\n"
        "  why:   global_batch=8 and the size of a microbatch say how many there are\n"
        "  try:   leave out update_freq, or global_batch"
    )
    assert refusal(config_of(1, 2, 0, global_batch=9)) == (
        "a batch of 9 samples cannot be dealt to 2 units\n"
        "  why:   runtime_ngpus=2, plan_ngpus=1, and units have as many samples each\n"
        "  try:   global_batch=8"
    )
    for sizes in ([3], [2, 2], [0]):
        assert refusal(config_of(1, 2, 0, global_batch=8, microbatch=sizes)) == (
            f"option 'microbatch' of policy 'autodist' cannot be {sizes}\n"
            "  why:   a unit has 4 of the 8 samples of a step, and the option lists sizes, "
            "each once, into which they can be "
            "cut\n"
            "  try:   some of 1, 2, 4"
        )


def test_sizes_of_a_microbatch_are_left_out_for_units_that_they_do_not_fit() -> None:
    """Units of 1, 2 and 4 ranks have 4, 8 and 16 of the samples of a step."""
    options = {"global_batch": 16, "unit_sizes": [1, 2, 4]}
    config = config_of(4, 1, 0, **options, microbatch=[8, 16])
    entry = zoo.get("mlp")
    with shared_traces("mlp"):
        found = PlanSearch.of(entry.build(), entry.inputs(), config).variants
    listed = [(v.unit_size, v.batch and v.batch.samples) for v in found.listed]
    assert listed == [(2, 8), (4, 16), (4, 8)]
    assert found.refused == {
        f"units of {unit}, microbatches of {size}": (
            f"a unit has {share} of the 16 samples of a step, which cannot be cut so"
        )
        for unit, share, size in ((1, 4, 8), (1, 4, 16), (2, 8, 16))
    }
    # Four units of one rank cannot share two samples; without a size that can, it is an error.
    few = {"unit_sizes": [1, 2, 4]}
    with shared_traces("mlp"):
        found = PlanSearch.of(
            entry.build(), entry.inputs(), config_of(4, 1, 0, **few, global_batch=2)
        ).variants
    assert {v.unit_size for v in found.listed} == {2, 4}
    assert found.refused == {"units of 1, all": "4 units cannot share 2 samples evenly"}
    assert refusal(config_of(4, 1, 0, unit_sizes=[1], global_batch=2)).startswith(
        "a batch of 2 samples cannot be dealt to 4 units\n"
    )
    assert refusal(config_of(4, 1, 0, **options, microbatch=[4, 5])) == (
        "option 'microbatch' of policy 'autodist' cannot be [4, 5]\n"
        "  why:   a unit has these of the 16 samples of a step: 4 in units of 1, 8 in units of 2, "
        "16 in units of 4; 5 divides none of them\n"
        "  try:   some of the sizes that divide 16"
    )


def test_refusals_of_dims_that_count_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"x": torch.zeros(1, 12), "target": torch.zeros(1, 8)}
    # Refused before the model is traced, which may take minutes.
    with monkeypatch.context() as patched, pytest.raises(ConfigError) as caught:
        patched.setattr("shardwright.frontend.search_plan.trace", None)
        PlanSearch.of(zoo.get("mlp").build(), one, config_of(1, 2, 0, global_batch=8))
    assert str(caught.value) == (
        "it cannot be told which dims of the inputs count samples\n"
        "  why:   x is [1, 12], target is [1, 8]: dims of size 1 look alike\n"
        "  try:   dummy arguments of two samples or more, or name the dims: --batch-dims "
        "x=0,target=0 of a command, in Python batch_dims={'x': 0, 'target': 0}"
    )
    mixed = {"x": torch.zeros(12), "target": torch.zeros(8)}
    assert "it cannot be told" in refusal(config_of(1, 2, 0, global_batch=8), mixed)
    named = config_of(1, 2, 0, global_batch=8, batch_dims=MLP_DIMS)
    entry = zoo.get("mlp")
    found = PlanSearch.of(entry.build(), one, named)
    assert [v.batch and v.batch.samples for v in found.variants.listed] == [4, 2, 1]
    assert [v.graph.inputs[0].shape[0] for v in found.variants.listed] == [4, 2, 1]
    assert refusal(config_of(1, 2, 0, global_batch=8, batch_dims={"y": 0})) == (
        "batch_dims names 'y', which is no input of the model\n  try:   one of 'target', 'x'"
    )
    assert refusal(config_of(1, 2, 0, global_batch=8, batch_dims={"x": 2})) == (
        "batch_dims says dim 2 of 'x'\n  why:   it has 2 dims, numbered from 0"
    )
    assert refusal(config_of(1, 2, 0, global_batch=8, batch_dims={"x": 0})) == (
        "batch_dims leaves out 'target'\n"
        "  why:   its dim 0 is the same dim of the model as dim 0 of 'x'\n"
        "  try:   add target=0 to --batch-dims of a command, in Python 'target': 0"
    )
    assert refusal(
        config_of(1, 2, 0, global_batch=8, batch_dims={"input_ids": 0, "labels": 1}), name="gpt2"
    ) == (
        "the inputs disagree on the number of samples\n"
        "  why:   dim 0 of 'input_ids' has 4, dim 1 of 'labels' has 8\n"
        "  try:   name them: --batch-dims input_ids=0,labels=0 of a command, in Python "
        "batch_dims={'input_ids': 0, 'labels': 0}"
    )


def test_arguments_get_the_samples_wanted() -> None:
    x, other = torch.arange(6.0).view(2, 3), torch.zeros(3)
    made = resized(
        {"x": x, "same": x, "nested": {"y": x}, "other": other, "flag": True},
        {"x": 1, "same": 1, "nested.y": 0},
        4,
    )
    assert made["x"].tolist() == [[0, 1, 2, 0], [3, 4, 5, 3]]
    assert made["same"] is made["x"] and made["other"] is other and made["flag"] is True
    assert made["nested"]["y"].tolist() == [[0, 1, 2], [3, 4, 5]] * 2
