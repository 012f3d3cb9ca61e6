"""The example of the page about costs runs, and gives the numbers that the page works out."""

import re
from pathlib import Path
from typing import Any

import pytest

from shardwright import load_hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.cost.time.body_time import body_time
from shardwright.compiler.plan.program import Adapt, Program

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cost-model.md"


def _example() -> dict[str, Any]:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def _column(heading: str) -> list[float]:
    """The numbers in the last column of the table with this heading."""
    table = PAGE.read_text().split(heading)[1].split("\n\n")[0].splitlines()[2:]
    return [float(row.split("|")[-2].strip(" *").replace(",", "")) for row in table]


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    names = _example()
    printed = capsys.readouterr().out
    cost: PlanCost = names["cost"]
    # The page shows what is printed.
    shown = PAGE.read_text().split("It prints:\n\n```text\n")[1].split("```")[0]
    assert printed.startswith(shown)
    # Its first table has the parts of the step, its second one those of the memory.
    program: Program = names["compiled"].program
    body = body_time(program, load_hardware("a100-80gb", num_devices=4), (0, 1))
    up, relu, down = (time for item, time in body.instructions if not isinstance(item, Adapt))
    spans = {part.name: part.end_s - part.start_s for part in cost.timeline}
    parts = [
        up.forward_s, relu.forward_s, down.forward_s, cost.ranks[0].comm_s["tp all_reduce"],
        down.backward_s, relu.backward_s, up.backward_s,
        cost.ranks[0].comm_s["units gradients"], spans["optimizer step"],
    ]  # fmt: skip
    assert _column("| part of the step |") == [round(1e3 * s, 3) for s in (*parts, cost.step_s)]
    assert sum(parts) == pytest.approx(cost.step_s)
    held = cost.memory[0].by_category
    order = ("parameter", "optimizer", "gradient", "input", "activation", "temporary")
    found = [*(held[name] for name in order), cost.peak_bytes]
    assert _column("| what | by hand | MB |") == [round(size / 1e6) for size in found]


def test_the_keys_of_a_cost() -> None:
    names = _example()
    table = PAGE.read_text().split("| key | |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()]
    found = names["cost"].to_json()
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row[1])} == set(found)
    for part in ("ranks", "memory"):
        (told,) = (row[2] for row in rows if row[1].strip() == f"`{part}`")
        assert set(found[part][0]) <= set(re.findall(r"`(\w+)`", told))
