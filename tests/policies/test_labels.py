"""R or G for every operator that is not split: the minimum cut against all assignments of small random graphs."""

import itertools
import random
from collections.abc import Mapping

import plans
import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.cost.communication import local_elements, step_elements
from shardwright.compiler.ops.strategy import allowed
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.labels import label
from shardwright.runtime.layout import Mesh

MAX_FREE = 7
"""Operators whose label is open: all ``2 ** MAX_FREE`` assignments are priced."""


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class RandomNet(nn.Module):
    """A few products, sums and norms of values made before, the last ones summed to a scalar."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.steps: list[tuple[str, int, int]] = []
        self.layers = nn.ModuleList()
        for index in range(rng.randint(3, 6)):
            kind = rng.choice(["linear", "linear", "add", "mul", "tanh", "norm", "scale"])
            self.steps.append((kind, rng.randint(0, index), rng.randint(0, index)))
            made = {
                "linear": nn.Linear(4, 4, bias=rng.random() < 0.5),
                "norm": nn.LayerNorm(4),
                "tanh": nn.Tanh(),
                "scale": Scale(),
            }
            self.layers.append(made.get(kind, nn.Identity()))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for (kind, left, right), layer in zip(self.steps, self.layers, strict=True):
            a, b = values[left], values[right]
            values.append({"add": torch.add, "mul": torch.mul}[kind](a, b) if kind in ("add", "mul") else layer(a))
        return values[-1].square().mean()


def random_case(seed: int) -> tuple[PlannableGraph, dict[str, str], int]:
    """A graph, random splits of some of its operators, and the number of ranks."""
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 3, 4])
    x = torch.randn(rng.choice([2, 6]), 4, requires_grad=rng.random() < 0.7)
    graph = plans.annotated(plans.traced(RandomNet(rng), {"x": x}))
    splits = {}
    mesh = Mesh.of({"tp": num_ranks})
    for op in graph.ops:
        assert op.rule is not None
        options = [f"split:{f.name}" for f in op.rule.factors if allowed(op.rule, {"tp": f"split:{f.name}"}, mesh)]
        if options and rng.random() < 0.4:
            splits[op.name] = rng.choice(options)
    return graph, splits, num_ranks


def traffic(graph: PlannableGraph, strategies: Mapping[str, str], num_ranks: int) -> tuple[float, bool]:
    """Elements that a rank sends in a step under these strategies: what lowering puts there, and gradient reductions; and
    whether a value changes the dim it is cut along, which the cut does not price.
    """
    mesh = Mesh.of({"tp": num_ranks})
    program = lower(graph, Plan(mesh, {name: {"tp": strategy} for name, strategy in strategies.items()}))
    total = 0.0
    for adapter in program.adapters():
        forward, backward = step_elements(adapter.step, mesh)
        total += forward + (backward if adapter.of.takes_gradient else 0.0)
    for declaration in program.declarations:
        if declaration.layout.grad_partial and declaration.value.takes_gradient:
            total += 0.99 * 2 * local_elements(declaration.layout, mesh) * (1 - 1 / num_ranks)
    return total, any(adapter.step.kind == "all_to_all" for adapter in program.adapters())


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 6))])
def test_the_cut_is_as_good_as_the_best_assignment(block: int) -> None:
    tried = 0
    for seed in range(60 * block, 60 * block + 60):
        graph, splits, num_ranks = random_case(seed)
        free = [op.name for op in graph.ops if op.name not in splits]
        if not splits or len(free) > MAX_FREE:
            continue
        tried += 1
        chosen, swaps = traffic(graph, splits | label(graph, splits, num_ranks), num_ranks)
        best, _ = min(
            traffic(graph, splits | dict(zip(free, labels, strict=True)), num_ranks)
            for labels in itertools.product("RG", repeat=len(free))
        )
        assert chosen <= best * (1.3 if swaps else 1) + 1e-6, f"seed {seed}: {chosen} against {best}"
    assert tried >= 12
