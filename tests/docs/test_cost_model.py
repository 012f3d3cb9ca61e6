"""The example of the page about costs runs."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cost-model.md"


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    printed = capsys.readouterr().out
    assert printed.startswith("step ") and "ranks 0-1: compute" in printed
    assert names["cost"].step_s > 0 and names["cost"].memory[0].moment


def test_the_keys_of_a_cost() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0], names)
    table = PAGE.read_text().split("| key | |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()]
    found = names["cost"].to_json()
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row[1])} == set(found)
    for part in ("ranks", "memory"):
        (told,) = (row[2] for row in rows if row[1].strip() == f"`{part}`")
        assert set(found[part][0]) <= set(re.findall(r"`(\w+)`", told))
