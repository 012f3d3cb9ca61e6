"""What a pipeline is predicted to take is what the audit of its lowered program says."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from covers import spread
from planning import mesh_of, slow_machine, two_nodes
from plans import zoo_graph

from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.time.exchange_time import WHOLES
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.policies.autodist.candidates.mesh_requests import PlacedModel
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.results import Candidate, CutRequest, LoweredPlacement
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.cutting import (
    cut_bounds,
    model_chains,
    predicting,
    request_blocks,
)
from shardwright.policies.autodist.cutting.cut_stages import Cutter
from shardwright.policies.autodist.cutting.model_chains import ModelChains
from shardwright.policies.autodist.placement.place import place
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.runtime.config import ComputeConfig

COUNT = 4
"""Microbatches."""


@functools.cache
def cut_request_for(
    name: str, mesh: str, rate: float, num_positions: int, optimizer: OptimizerMemory = ADAM
) -> tuple[CutRequest, Auditor]:
    graph, inner = zoo_graph(name), mesh_of(mesh)
    size = inner.size * num_positions
    config = ComputeConfig(plan_ngpus=size, runtime_ngpus=size, use_end2end=True, outputs="loss")
    hardware, ranks = (
        slow_machine(size, bytes_per_s=rate),
        position_ranks(inner, num_positions, 0)[0],
    )
    kept_outputs = output_wishes(graph, config)
    found = place(
        PlacementRequest(
            graph,
            inner,
            ranks,
            hardware,
            config,
            microbatches=COUNT,
            outputs=kept_outputs,
            optimizer=optimizer,
        )
    )
    assert not isinstance(found, Infeasible)
    walk = Walk(
        lower(graph, found.plan),
        Setting(hardware, config, ranks, optimizer, num_microbatches=COUNT),
    )
    lowered = LoweredPlacement(PlacedModel(found.plan, found.bound_s, "test", "test"), walk)
    return CutRequest("test", (lowered,), num_positions, NamedSchedule("1f1b", 1)), Auditor(
        graph, config, hardware, COUNT, optimizer, gathers_ahead=False
    )


ONE_F_ONE_B, GPIPE, ZERO_BUBBLE, INTERLEAVED = (
    NamedSchedule("1f1b", 1),
    NamedSchedule("gpipe", 1),
    NamedSchedule("zb_h1", 1),
    NamedSchedule("1f1b_interleaved", 2),
)
CASES = [
    (name, mesh, rate, number, named_schedule)
    for name in ("gpt2", "t5")
    for mesh, number, rate in (("2", 2, 1e6), ("2x2", 2, 1e8), ("2", 3, 1e6), ("2", 3, 1e8))
    if name == "gpt2" or (mesh, rate) == ("2", 1e6)
    for named_schedule in (ONE_F_ONE_B, GPIPE, ZERO_BUBBLE, *([INTERLEAVED] if number == 2 else []))
]
FAST = [("gpt2", "2", 1e6, 2, ONE_F_ONE_B), ("gpt2", "2", 1e6, 2, ZERO_BUBBLE)]


@pytest.mark.parametrize(
    ("name", "mesh", "rate", "num_positions", "named_schedule"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_pipeline_takes_what_was_predicted(
    name: str, mesh: str, rate: float, num_positions: int, named_schedule: NamedSchedule
) -> None:
    """Predictions hold with nothing computed again, with some of it, and with all that can be."""
    cut_request, auditor = cut_request_for(name, mesh, rate, num_positions)
    cut_request = replace(cut_request, named_schedule=named_schedule)
    cutter = Cutter(zoo_graph(name), SearchSpace(meshes={}, num_microbatches=COUNT))
    free, least = cutter.cut(cut_request, float("inf")), cutter.leanest(cut_request)
    assert isinstance(free, Candidate) and least is not None
    between = cutter.cut(cut_request, (free.used_bytes + least.used_bytes) / 2)
    assert isinstance(between, Candidate) and between.plan.recompute
    # Its decoder reads, in every stage, what the encoder made.
    within = 2e-5 if name == "t5" else 1e-12
    for found in (free, between, least):
        assert found.predicted_s == pytest.approx(auditor(found.plan).compared_s, rel=within)


@pytest.mark.parametrize("rate", spread([1e6, 1e8], 2))
def test_the_exchange_of_whole_tensors_is_in_the_prediction(rate: float) -> None:
    """Each stage brings its own together."""
    cut_request, auditor = cut_request_for(
        "gpt2", "2", rate, 2, OptimizerMemory(named=NamedOptimizer("Adafactor"))
    )
    found = Cutter(zoo_graph("gpt2"), SearchSpace(meshes={}, num_microbatches=COUNT)).cut(
        cut_request, float("inf")
    )
    assert isinstance(found, Candidate)
    cost = auditor(found.plan)
    assert found.predicted_s == pytest.approx(cost.compared_s, rel=1e-12)
    assert all(rank.comm_bytes[WHOLES] > 0 for rank in cost.ranks)


@pytest.mark.parametrize(
    "named_schedule",
    spread([ONE_F_ONE_B, ZERO_BUBBLE, INTERLEAVED, NamedSchedule("zb_v", 2)], 2),
    ids=str,
)
def test_no_cut_that_fits_by_its_audit_is_below_the_bound_of_its_schedule(
    named_schedule: NamedSchedule,
) -> None:
    """Cuts go from nothing computed again to all that can be, in as much memory as the audit
    says.
    """
    cut_request, auditor = cut_request_for("gpt2", "2", 1e6, 2)
    cut_request, graph = replace(cut_request, named_schedule=named_schedule), zoo_graph("gpt2")
    cutter = Cutter(graph, SearchSpace(meshes={}, num_microbatches=COUNT))
    bounds = []
    for candidate in cutter.saving(cut_request):
        cost = auditor(candidate.plan)
        limited = Cutter(
            graph, SearchSpace(meshes={}, num_microbatches=COUNT, memory_bytes=cost.peak_bytes)
        )
        bound = limited.bounds.scheduled_bound(cut_request)
        while not bound.is_over:
            bound.play(float("inf"))
        bounds.append(bound.bound_s)
        assert 0.0 < bounds[-1] <= cost.compared_s * (1 + 1e-9)
    assert len(bounds) > 1


@pytest.mark.parametrize("named_schedule", [ONE_F_ONE_B, ZERO_BUBBLE, INTERLEAVED], ids=str)
def test_no_cut_gains_more_than_messages_where_these_are_faster(
    named_schedule: NamedSchedule,
) -> None:
    """The pipeline axis stands inside of nodes, and operators are as fast. Sums of gradients, which
    then go between nodes, are not: only on the slowest links is the step shorter.
    """
    cut_request, _ = cut_request_for("gpt2", "2", 1e6, 2)
    (lowered,) = cut_request.placements
    for rate in (1e2, 1e4):
        setting = replace(lowered.walk.setting, hardware=two_nodes(bytes_per_s=rate))
        on_nodes = replace(lowered, walk=Walk(lowered.walk.program, setting))
        found = []
        for pp_place in (0, 1):
            asked = replace(
                cut_request,
                placements=(on_nodes,),
                named_schedule=named_schedule,
                pp_place=pp_place,
            )
            cutter = Cutter(zoo_graph("gpt2"), SearchSpace(meshes={}, num_microbatches=COUNT))
            found.append(cutter.cut(asked, float("inf")))
        outermost, inside = found
        assert isinstance(outermost, Candidate) and isinstance(inside, Candidate)
        least_s = outermost.predicted_s - outermost.messages_s
        assert least_s <= inside.predicted_s * (1 + 1e-9)
        assert rate > 1e2 or inside.predicted_s < outermost.predicted_s


@pytest.mark.parametrize("named_schedule", [ZERO_BUBBLE, INTERLEAVED], ids=str)
def test_cuts_that_are_not_simulated_are_no_better(
    named_schedule: NamedSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one position has too much to do by itself, no schedule of that is better."""
    simulated, in_time = [0], predicting.ends_s

    def counted(*args: Any) -> list[float]:
        simulated[0] += 1
        return in_time(*args)

    monkeypatch.setattr(predicting, "ends_s", counted)
    cut_request, _ = cut_request_for("gpt2", "2", 1e6, 2)
    cut_request, graph = replace(cut_request, named_schedule=named_schedule), zoo_graph("gpt2")
    found, counts = [], []
    for _ in range(2):
        cutter = Cutter(graph, SearchSpace(meshes={}, num_microbatches=COUNT))
        found.append(cutter.cut(cut_request, float("inf")))
        counts.append(simulated[0] - sum(counts))
        monkeypatch.setattr(predicting.Prediction, "_busiest_s", lambda self, times: 0.0)
    assert found[0] == found[1] and counts[0] < counts[1]


def test_where_a_bound_takes_too_much_memory_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_request, _ = cut_request_for("gpt2", "2", 1e6, 2)
    bounds = Cutter(zoo_graph("gpt2"), SearchSpace(meshes={}, num_microbatches=COUNT)).bounds
    found = []
    for most in (cut_bounds.MAX_ENTRIES, 1):
        monkeypatch.setattr(cut_bounds, "MAX_ENTRIES", most)
        bound = bounds.scheduled_bound(cut_request)
        for _ in range(4):  # a turn for each way to see the model as blocks, and more
            bound.play(float("inf"), 8)
        found.append((bound.bound_s > 0.0, bound.is_over and bound.bound_s == 0.0))
    assert found == [(True, False), (False, True)]


def test_what_schedules_share_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are those of cutters that share nothing: neither what a placement's blocks need for
    the gradients of inputs, nor what crosses the places of a graph.
    """
    cut_request, _ = cut_request_for("gpt2", "2", 1e6, 2)
    graph, space = zoo_graph("gpt2"), SearchSpace(meshes={}, num_microbatches=COUNT)
    requests = [replace(cut_request, named_schedule=each) for each in (ONE_F_ONE_B, ZERO_BUBBLE)]

    def bound_s(cutter: Cutter, request: CutRequest) -> float:
        bound = cutter.bounds.scheduled_bound(request)
        bound.play(float("inf"), 8)
        return bound.bound_s

    apart = [bound_s(Cutter(graph, space), request) for request in requests]
    asked: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            asked[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(request_blocks, "_inputs_s", counted("inputs", request_blocks._inputs_s))
    monkeypatch.setattr(model_chains, "cut_traffic", counted("traffic", model_chains.cut_traffic))
    chains = ModelChains(graph)
    cutter = Cutter(graph, space, chains=chains)
    assert [bound_s(cutter, request) for request in requests] == pytest.approx(apart)
    fewest = asked["inputs"]
    other = Cutter(graph, space, cutter.bounds.waits, chains)
    bound_s(other, requests[0])
    # By layer and finely, for both schedules; once more for a cutter of its own.
    assert fewest <= 3 and asked == {"inputs": 2 * fewest, "traffic": 1}
