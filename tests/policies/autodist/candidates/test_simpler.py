"""The simpler one is taken of plans that take about as long."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.policies.autodist.candidates.simpler import Complexity, simplest
from shardwright.runtime.layout import Mesh

HARDWARE = load_hardware("a100-80gb", 64)  # eight to a node


def plan(mesh: dict[str, int], stages: int = 1) -> Plan:
    """A plan on a mesh for each of so many stages, side by side."""
    inner = Mesh.of(mesh)
    if stages == 1:
        return Plan(mesh=inner, strategies={})
    listed = tuple(
        StagePlan(f"op{i}", inner, tuple(range(i * inner.size, (i + 1) * inner.size)))
        for i in range(stages)
    )
    return Plan(mesh=Mesh.of({"pp": stages} | mesh), strategies={}, stages=listed)


@pytest.mark.parametrize(
    ("mesh", "stages", "expected"),
    [
        ({}, 1, Complexity(1, 0, 0)),
        ({"x": 1, "tp": 8}, 1, Complexity(1, 1, 0)),
        ({"tp": 16}, 1, Complexity(1, 1, 1)),
        ({"dp": 4, "tp": 8}, 1, Complexity(1, 2, 1)),
        ({"dp": 2, "tp": 4}, 8, Complexity(8, 2, 0)),
        ({"dp": 2, "tp": 16}, 2, Complexity(2, 2, 2)),
    ],
)
def test_what_is_counted(mesh: dict[str, int], stages: int, expected: Complexity) -> None:
    assert Complexity.of(plan(mesh, stages), HARDWARE) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({"two axes": 1.0, "one": 1.01}, "one"),
        ({"two axes": 1.0, "one": 1.03}, "two axes"),  # too slow
        ({"one": 1.0, "two axes": 1.01, "staged": 1.01}, "one"),
        ({"two axes": 1.0, "staged": 1.01}, "two axes"),  # fewer axes, but more stages
        ({"two axes": 1.0, "one": 1.005, "alone": 1.015}, "alone"),
        ({"ZeRO-3": 1.0, "ZeRO-2": 1.01, "ZeRO-1": 1.019}, "ZeRO-1"),
        ({"ZeRO-3": 1.0, "ZeRO-2": 1.01, "ZeRO-1": 1.03}, "ZeRO-2"),
        ({"two axes": 1.0, "ZeRO-1": 1.01}, "two axes"),  # fewer axes, but more of ZeRO
    ],
)
def test_what_is_taken(steps: dict[str, float], expected: str) -> None:
    plans = {
        "alone": plan({}),
        "one": plan({"tp": 8}),
        "two axes": plan({"dp": 4, "tp": 8}),
        "staged": plan({"tp": 8}, 2),
        **{f"ZeRO-{stage}": replace(plan({"tp": 8}), zero_stage=stage) for stage in (1, 2, 3)},
    }
    audited: list[Any] = [
        SimpleNamespace(title=name, plan=plans[name], step_s=step) for name, step in steps.items()
    ]
    assert simplest(audited, HARDWARE, 0.02).title == expected
    assert simplest(audited, HARDWARE, 0.0) is audited[0]
