"""Conversions priced by pattern cost what their adapters cost, step by step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from covers import spread
from planning import mesh_of, slow_machine

from shardwright.compiler.plan.conversion import canonical
from shardwright.policies.autodist.placement.conversions import Conversions, ValueType
from shardwright.policies.autodist.placement.routes import Traits
from shardwright.policies.autodist.placement.strategies import LayoutTable
from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Layout, Mesh

SHAPES = [[(8,), (6,)], [(4, 3), (7,), (2, 8)], [(1,), (12,)], [(5,), (4, 4)], [(2, 1, 8)]]


def random_layout(shape: list[tuple[int, ...]], mesh: Mesh, rng: random.Random) -> Layout:
    atoms = [[Atom((size,)) for size in dim] for dim in shape]
    partial, grad_partial = [], []
    for axis in mesh.names:
        kind = rng.choice("RPGSSS")
        if kind == "S":
            dim = rng.randrange(len(atoms))
            place = rng.randrange(len(atoms[dim]))
            atoms[dim][place] = Atom(atoms[dim][place].segments, (*atoms[dim][place].axes, axis))
        elif kind in "PG":
            (partial if kind == "P" else grad_partial).append(axis)
    return canonical(Layout(tuple(map(tuple, atoms)), tuple(partial), tuple(grad_partial)), mesh)


@pytest.mark.parametrize("mesh", spread(["2x2", "3x2", "4x3", "2x2x2"], 2, first=1))
@pytest.mark.parametrize(
    ("is_weight", "takes_gradient"), [(False, True), (True, True), (False, False)]
)
def test_patterns_cost_what_the_steps_cost(
    mesh: str, is_weight: bool, takes_gradient: bool
) -> None:
    rng = random.Random(mesh)
    on = mesh_of(mesh)
    table = LayoutTable()
    conversions = Conversions(on, tuple(range(on.size)), slow_machine(on.size), table)
    kind = ValueType(
        torch.float32, differentiable=True, is_weight=is_weight, takes_gradient=takes_gradient
    )
    traits = Traits(torch.float32, True, takes_gradient)
    for shape in SHAPES:
        layouts = [table.id(random_layout(shape, on, rng)) for _ in range(12)]
        for source in layouts:
            for goal in layouts:
                if source != goal:
                    (route,) = conversions.routes.of(traits, [(source, goal)])
                    converted = conversions.routes.converted(traits, source, goal)
                    assert route.weight == pytest.approx(converted.weight, rel=1e-12, abs=0)
                    both = [conversions.times_of(kind, each) for each in (route, converted)]
                    assert [step.gathers for step in both[0]] == [step.gathers for step in both[1]]
                    seconds = [[(step.forward_s, step.backward_s) for step in own] for own in both]
                    assert np.ravel(seconds[0]) == pytest.approx(
                        np.ravel(seconds[1]), rel=1e-12, abs=0
                    )
                    # What tables have is the sum of the steps.
                    total_s = sum(step.forward_s + step.backward_s for step in both[0])
                    priced = conversions.seconds(kind, [source], [(goal,)])
                    assert priced == pytest.approx(np.array([[total_s]]), rel=1e-12, abs=0)
