"""The bound where memory binds: below every plan that fits, whatever that computes again, and near the best of them."""

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
from planning import audited_s, mesh_of, request
from torch import Tensor, nn

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.recompute import mark_recompute
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.placement.memory_bound import least_step_s
from shardwright.policies.autodist.placement.place import Placement, place
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.stages.chain import layer_blocks, layer_parts
from shardwright.runtime.config import ComputeConfig


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
    return [part.path for parts in layer_parts(graph, *layer_blocks(graph)).values() for part in parts]


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
    cost = audit(lower(marked, plan), asked.config, asked.hardware, num_microbatches=asked.microbatches)
    return cost.step_s, cost.peak_bytes


@pytest.mark.parametrize("use_zero", [0, 2])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("mesh", ["2", pytest.param("2x2", marks=pytest.mark.slow), pytest.param("4", marks=pytest.mark.slow)])
def test_no_random_plan_that_fits_is_below(mesh: str, num_microbatches: int, use_zero: int) -> None:
    size = mesh_of(mesh).size
    config = ComputeConfig(plan_ngpus=size, runtime_ngpus=size, use_zero=use_zero)
    asked = replace(wanted(mesh, config=config), microbatches=num_microbatches)
    pricing, rng, parts = Pricing(asked), random.Random(mesh), parts_of(asked.graph)
    for _ in range(12):
        plan = plans.random_plan(asked.graph, asked.mesh, rng)
        plan = replace(plan, recompute=drawn(parts, rng))
        step_s, peak_bytes = cost_of(asked, plan)
        assert least_step_s(replace(asked, memory_limit_bytes=peak_bytes), pricing) <= step_s * (1 + 1e-12)


@pytest.mark.parametrize("mesh", ["1", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("2", "2x2"))])
def test_the_best_plan_of_every_set_of_parts_is_not_below(mesh: str) -> None:
    """At limits from no bother to nothing that fits; and the bound rises on the way."""
    asked = wanted(mesh)
    pricing, parts = Pricing(asked), parts_of(asked.graph)
    sets = [(), *((path,) for path in parts), *(pair for pair in itertools.combinations(parts, 2) if _apart(*pair))]
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


def test_what_may_not_be_computed_again_costs_more_or_cannot_be() -> None:
    asked = wanted("1")
    step_s, peak_bytes = cost_of(asked, Plan(asked.mesh))
    limited = replace(asked, memory_limit_bytes=0.9 * peak_bytes)
    assert step_s == pytest.approx(audited_s(asked.graph, Plan(asked.mesh), asked))
    assert least_step_s(limited) < math.inf
    assert least_step_s(limited, again=False) == math.inf
    assert least_step_s(replace(asked, memory_limit_bytes=1000.0)) == math.inf
