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
