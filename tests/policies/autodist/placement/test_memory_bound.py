"""The bound where memory binds: below every plan that fits, whatever that computes again, and near
the best of them.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace

import planning
import plans
import pytest
import torch
from covers import spread
from planning import audited_s, mesh_of, request
from torch import Tensor, nn

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.schedule.published import generate
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.policies.autodist.placement.formulation import OpNode
from shardwright.policies.autodist.placement.memory_bound import _Draft, least_step_s
from shardwright.policies.autodist.placement.place import Placement, place
from shardwright.policies.autodist.placement.placement_problem import formulate
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.policies.autodist.stages.chain import layer_blocks, layer_parts
from shardwright.policies.partition import stage_starts
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


class Layer(nn.Module):
    """A part with much to keep and little to compute, and one the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 32, bias=False)
        self.act = nn.GELU()
        self.down = nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)).sin())


class Stack(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1).square().mean()


@functools.cache
def stack() -> PlannableGraph:
    return planning.graph_of(Stack(), {"x": torch.randn(8, 6, 4)})


def wanted(mesh: str, **options: object) -> PlacementRequest:
    return request(stack(), mesh_of(mesh), planning.slow_machine(4, bytes_per_s=3e7), **options)


def parts_of(graph: PlannableGraph) -> list[str]:
    return [
        part.path for parts in layer_parts(graph, *layer_blocks(graph)).values() for part in parts
    ]


def drawn(parts: list[str], rng: random.Random) -> tuple[str, ...]:
    """Some parts, none inside another."""
    found: list[str] = []
    for path in rng.sample(parts, rng.randint(0, len(parts))):
        if all(_apart(path, other) for other in found):
            found.append(path)
    return tuple(found)


def cost_of(asked: PlacementRequest, plan: Plan) -> tuple[float, float]:
    """Seconds of a step, and bytes at the peak."""
    marked = mark_recompute(asked.graph, plan.recompute) if plan.recompute else asked.graph
    cost = audit(
        lower(marked, plan),
        asked.config,
        asked.hardware,
        num_microbatches=asked.microbatches,
        gathers_ahead=False,
    )
    return cost.step_s, cost.peak_bytes


@pytest.mark.parametrize("use_zero", [0, 2])
@pytest.mark.parametrize("num_microbatches", spread([1, 3], 2, first=1))
@pytest.mark.parametrize(
    "mesh",
    ["2", pytest.param("4", marks=pytest.mark.slow)],
)
def test_no_random_plan_that_fits_is_below(mesh: str, num_microbatches: int, use_zero: int) -> None:
    size = mesh_of(mesh).size
    config = ComputeConfig(plan_ngpus=size, runtime_ngpus=size, use_zero=use_zero)
    asked = replace(wanted(mesh, config=config), microbatches=num_microbatches)
    pricing, rng, parts = Pricing(asked), random.Random(mesh), parts_of(asked.graph)
    for _ in range(12):
        plan = plans.random_plan(asked.graph, asked.mesh, rng)
        plan = replace(plan, recompute=drawn(parts, rng))
        step_s, peak_bytes = cost_of(asked, plan)
        assert least_step_s(replace(asked, memory_limit_bytes=peak_bytes), pricing) <= step_s * (
            1 + 1e-12
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1", pytest.param("2x2", marks=pytest.mark.slow)])
def test_the_best_plan_of_every_set_of_parts_is_not_below(mesh: str) -> None:
    """Limits go from no bother to nothing that fits; and the bound rises on the way."""
    asked = wanted(mesh)
    pricing, parts = Pricing(asked), parts_of(asked.graph)
    sets = [
        (),
        *((path,) for path in parts),
        *(pair for pair in itertools.combinations(parts, 2) if _apart(*pair)),
    ]
    free = place(replace(asked, memory_limit_bytes=1e12), pricing=pricing)
    assert isinstance(free, Placement) and free.memory is not None
    bounds = []
    for share in (1.0, 0.9, 0.8, 0.7, 0.6):
        limited = replace(asked, memory_limit_bytes=share * free.memory.peak_bytes)
        bounds.append(least_step_s(limited, pricing))
        found = [place(replace(limited, recompute=chosen), pricing=pricing) for chosen in sets]
        best = min((each.cost_s for each in found if isinstance(each, Placement)), default=math.inf)
        assert bounds[-1] <= best * (1 + 1e-12)
    assert bounds[0] == pytest.approx(free.bound_s, rel=1e-9)
    assert bounds == sorted(bounds) and bounds[-1] > bounds[0] * 1.001


def _apart(a: str, b: str) -> bool:
    return not f"{a}.".startswith(f"{b}.") and not f"{b}.".startswith(f"{a}.")


@pytest.mark.parametrize(
    ("schedule", "chunks"), spread([("1f1b", 1), ("zb_h1", 1), ("1f1b_interleaved", 2)], 2)
)
def test_no_random_pipeline_that_fits_is_below_the_share_of_a_position(
    schedule: str, chunks: int
) -> None:
    """Two positions, cut anywhere between layers, for the memory of both together; and at times it
    binds.
    """
    graph = planning.graph_of(Stack(6), {"x": torch.randn(8, 6, 4)})
    # Of microbatches: with few, much depends on what is computed again.
    rng, binds, count = (
        random.Random(schedule),
        0,
        chunks,
    )
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True, outputs="loss")
    machine = planning.slow_machine(2)
    asked = replace(
        request(graph, Mesh(()), machine, config=config), microbatches=count, in_flight=count
    )
    pricing, parts, audited = (
        Pricing(asked),
        parts_of(graph),
        Auditor(graph, config, machine, count),
    )
    free_s = least_step_s(replace(asked, memory_limit_bytes=1e12), pricing)
    begins = [graph.ops[start].name for start in layer_blocks(graph)[0][1:]]
    for _ in range(6):
        plan = replace(Plan(Mesh(())), recompute=rng.choice([drawn(parts, rng), ("layers.*",)]))
        starts = [begins[index] for index in sorted(rng.sample(range(len(begins)), 2 * chunks - 1))]
        cost = audited(staged(plan, starts, 2, NamedSchedule(schedule, chunks), count))
        bound_s = least_step_s(replace(asked, memory_limit_bytes=2 * cost.peak_bytes), pricing)
        assert bound_s / 2 <= cost.step_s * (1 + 1e-12)
        binds += bound_s > free_s * (1 + 1e-6)
    assert binds


class Passing(nn.Module):
    """Whose layers keep nothing for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Negation() for _ in range(48))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Negation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.neg()


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b_interleaved", 2)])
def test_each_stage_of_a_position_lets_go_of_its_variables(schedule: str, chunks: int) -> None:
    graph = planning.graph_of(Passing(), {"x": torch.randn(256, 16)})
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True, outputs="loss")
    asked = replace(
        request(graph, Mesh(()), planning.slow_machine(2), config=config), microbatches=4
    )
    starts = stage_starts(
        graph, Plan(Mesh(())), generate(schedule, 2, 4, chunks), config, asked.hardware
    )
    cost = Auditor(graph, config, asked.hardware, 4)(
        staged(Plan(Mesh(())), starts, 2, NamedSchedule(schedule, chunks), 4)
    )
    assert (
        least_step_s(replace(asked, memory_limit_bytes=2 * cost.peak_bytes, in_flight=2)) / 2
        <= cost.step_s
    )


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_the_shares_of_what_is_let_go_of_add_up_to_no_more_than_a_forward(
    num_microbatches: int,
) -> None:
    asked = replace(wanted("2"), microbatches=num_microbatches, memory_limit_bytes=1e12)
    formulation = formulate(asked)
    draft = _Draft(asked, formulation, again=True)
    draft.problem()
    nodes = [
        node
        for node in formulation.nodes
        if isinstance(node, OpNode) and node.op.module_path.startswith("layers.")
    ]
    forward_s = num_microbatches * sum(float(node.choices.forward_s.min()) for node in nodes)
    assert 0.5 * forward_s < sum(draft.prices.values()) <= forward_s * (1 + 1e-12)


def test_what_may_not_be_computed_again_costs_more_or_cannot_be() -> None:
    asked = wanted("1")
    step_s, peak_bytes = cost_of(asked, Plan(asked.mesh))
    limited = replace(asked, memory_limit_bytes=0.9 * peak_bytes)
    assert step_s == pytest.approx(audited_s(asked.graph, Plan(asked.mesh), asked))
    assert least_step_s(limited) < math.inf
    assert least_step_s(limited, again=False) == math.inf
    assert least_step_s(replace(asked, memory_limit_bytes=1000.0)) == math.inf
