"""What runs again is priced as the program is emitted: recompute regions, and the adapters in front
of them and inside.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import planning
import pytest
import torch
from covers import spread
from planning import mesh_of, request
from plans import zoo_graph
from torch import Tensor, nn

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.policies.autodist.placement.formulation import Formulation, RelayNode
from shardwright.policies.autodist.placement.place import Placement, place, plan_of
from shardwright.policies.autodist.placement.placement_problem import formulate
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.stages.chain import layer_blocks, layer_pattern
from shardwright.runtime.config import ComputeConfig


def asked(
    graph: PlannableGraph, mesh: str, zero: int = 0, microbatches: int = 1, **options: object
) -> PlacementRequest:
    """A request with ZeRO, over two units."""
    size = mesh_of(mesh).size
    config = ComputeConfig(plan_ngpus=size, runtime_ngpus=size * (2 if zero else 1), use_zero=zero)
    hardware = planning.slow_machine(config.runtime_ngpus)
    return request(
        graph, mesh_of(mesh), hardware, config=config, microbatches=microbatches, **options
    )


def audited_s(wanted: PlacementRequest, formulation: Formulation, choice: tuple[int, ...]) -> float:
    marked = mark_recompute(wanted.graph, wanted.recompute) if wanted.recompute else wanted.graph
    plan = replace(plan_of(wanted, formulation, choice), zero=units_of_storage(wanted.config))
    return audit(
        lower(marked, plan),
        wanted.config,
        wanted.hardware,
        num_microbatches=wanted.microbatches,
        gathers_ahead=False,
    ).step_s


def check_any(wanted: PlacementRequest, rng: random.Random, count: int) -> Formulation:
    """Random choices of operators and stores, with the copies they want, cost what their programs
    do.
    """
    formulation = formulate(wanted)
    tried = 0
    while tried < count:
        drawn = [rng.randrange(len(cost)) for cost in formulation.problem.node_costs]
        try:
            choice = formulation.settle(drawn)
        except ValueError:
            continue  # copies outside of the space
        seconds = formulation.cost(choice)
        if math.isfinite(seconds):
            assert math.isclose(seconds, audited_s(wanted, formulation, choice), rel_tol=1e-9), (
                wanted.recompute
            )
            tried += 1
    return formulation


def check_best(wanted: PlacementRequest) -> None:
    found = place(wanted)
    assert isinstance(found, Placement)
    assert math.isclose(
        found.cost_s, audited_s(wanted, found.formulation, found.choice), rel_tol=1e-9
    ), wanted.recompute
    assert found.bound_s <= found.cost_s * (1 + 1e-12)
    assert found.gap < 0.001


def regions(graph: PlannableGraph, rng: random.Random, count: int) -> list[tuple[str, ...]]:
    """The first module, or all layers; and random modules, none inside another."""
    names = [op.module_path.split(".") for op in graph.ops if op.module_path]
    paths = sorted({".".join(parts[: end + 1]) for parts in names for end in range(len(parts))})
    layers = layer_blocks(graph)[1].values()
    found = [tuple(dict.fromkeys(map(layer_pattern, layers)))] if layers else [("up",)]
    while len(found) < count:
        drawn = rng.sample(paths, rng.randint(1, min(4, len(paths))))
        found.append(tuple(a for a in drawn if not any(a.startswith(f"{b}.") for b in drawn)))
    return found


class Spread(nn.Module):
    """Regions that share what they read with each other, with what follows, and with the outside;
    one that comes twice, with another operator in between; a weight that two of them use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.other = (
            nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(3)
        )
        self.head = nn.Linear(8, 8, bias=False, dtype=torch.float64)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start = x.sin()
        hidden = self.first(start)
        middle = self.twice(hidden + start)
        again = self.twice(middle.cos() + hidden)
        end = self.head(self.other(again) * middle + start)
        return end, again


REGIONS = [("first", "head"), ("twice",), ("other", "twice", "head"), ("first", "twice", "other")]
MESHES = [("2", 0, 1), ("2", 3, 2), pytest.param("2x2", 1, 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("recompute", REGIONS)
@pytest.mark.parametrize(("mesh", "zero", "microbatches"), spread(MESHES, 2))
def test_any_choice_costs_what_its_program_does(
    recompute: tuple[str, ...], mesh: str, zero: int, microbatches: int
) -> None:
    graph = planning.graph_of(Spread(), {"x": torch.randn(4, 8, dtype=torch.float64)})
    wanted = asked(graph, mesh, zero, microbatches, recompute=recompute)
    formulation = check_any(wanted, random.Random(str(recompute)), 5)
    assert formulation.weights
    assert formulation.spread or mesh != "2" or recompute == ("twice",)
    check_best(wanted)


@pytest.mark.slow
def test_copies_that_are_not_told_apart_cost_what_their_program_does() -> None:
    graph = planning.graph_of(Spread(), {"x": torch.randn(4, 8, dtype=torch.float64)})
    formulation = check_any(asked(graph, "2x2", recompute=("first", "twice")), random.Random(1), 8)
    assert any(isinstance(node, RelayNode) for node in formulation.nodes)


@pytest.mark.parametrize(
    ("name", "mesh", "zero", "microbatches"),
    [
        ("mlp", "2", 0, 1),
        ("mlp", "2", 1, 2),
        ("mlp", "2", 3, 2),
        pytest.param("mlp", "2x2", 3, 2, marks=pytest.mark.slow),
        pytest.param("gpt2", "2", 3, 2, marks=pytest.mark.slow),
        pytest.param("llama", "2", 0, 1, marks=pytest.mark.slow),
        pytest.param("t5", "2", 3, 2, marks=pytest.mark.slow),
        pytest.param("unet", "2", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_the_best_choice_costs_what_its_program_does(
    name: str, mesh: str, zero: int, microbatches: int
) -> None:
    graph = zoo_graph(name)
    for recompute in regions(graph, random.Random(zero), 3):
        check_best(asked(graph, mesh, zero, microbatches, recompute=recompute))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "zero", "microbatches"),
    [
        ("t5", "2", 1, 2),
        ("unet", "2", 3, 2),
    ],
)
def test_any_choice_of_a_model_costs_what_its_program_does(
    name: str, mesh: str, zero: int, microbatches: int
) -> None:
    graph, rng = zoo_graph(name), random.Random(f"{mesh}{zero}")
    for recompute in regions(graph, rng, 2):
        check_any(asked(graph, mesh, zero, microbatches, recompute=recompute), rng, 2)
