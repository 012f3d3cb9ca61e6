"""What tables say of a plan whose stages differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.frontend.report.diff import Change, diff
from shardwright.frontend.report.page import page
from shardwright.frontend.report.plan_tables import header, mesh_in_words, strategy_table
from shardwright.runtime.layout import Mesh
from shardwright.runtime.manifest import Manifest

TP2 = Mesh((("tp", 2),))
MIXED = Plan(
    Mesh((("rank", 3),)),
    {"up": {"tp": "split:n"}, "down": {}},
    policy="autodist",
    dims={"up": {"tp": "ffn"}},
    stages=(StagePlan("", TP2, (0, 1)), StagePlan("down", Mesh(), (2,))),
    schedule="1f1b",
    num_microbatches=2,
)
EQUAL = Plan(
    Mesh((("pp", 2), ("tp", 2))),
    stages=(StagePlan("", TP2, (0, 1)), StagePlan("down", TP2, (2, 3))),
)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (MIXED, "tp=2 | one rank"),
        (EQUAL, "pp=2 x tp=2"),
        (Plan(TP2), "tp=2"),
        (Plan(Mesh()), "one rank"),
    ],
)
def test_meshes_as_people_say_them(plan: Plan, text: str) -> None:
    assert mesh_in_words(plan) == text


def test_the_page_of_a_plan_whose_stages_differ() -> None:
    text = page("Model", MIXED, PlanCost("h100", 1.0, (), ()), load_hardware("h100", 3))
    assert "<title>Model: autodist on tp=2 | one rank</title>" in text and "rank=" not in text
    assert (
        "<title>rank 1: tp 1, stage 0</title>" in text
        and "<title>rank 2: the only one, stage 1</title>" in text
    )
    settings = diff(Plan(TP2), MIXED).settings
    assert Change("mesh", "tp=2", "tp=2 | one rank") in settings
    assert Change("stage 0", "-", "from the first operator, on ranks 0-1 as tp=2") in settings
    assert Change("stage 1", "-", "from down, on rank 2") in settings


def test_what_inspect_begins_with() -> None:
    manifest = Manifest("digest", "Model", MIXED.mesh, "autodist", {}, {})
    lines = str(header(Path("files"), manifest, MIXED)).splitlines()
    assert lines[2:4] == [
        "mesh     tp=2 | one rank, 1 unit",
        "pipeline 2 stages, 1f1b, 2 microbatches",
    ]
    twice = replace(MIXED, stages=(*MIXED.stages, replace(MIXED.stages[0], first_op="last")))
    assert "pipeline 3 stages in 2 positions" in str(header(Path("files"), manifest, twice))


def test_operators_along_the_axes_of_the_stages() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(strategy_table(MIXED, every_layer=False))
    header, row = capture.get().splitlines()[1:3]
    assert header.split() == ["name", "tp"] and row.split() == ["up", "split", "ffn"]
    alone = Plan(Mesh((("pp", 1),)), {"up": {}}, stages=(StagePlan("", Mesh(), (0,)),))
    assert (
        str(strategy_table(alone, every_layer=False))
        == "Every operator is computed on every rank of its stage."
    )
