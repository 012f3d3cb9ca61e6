"""The page about experts: its code runs, its policies are exact, its errors are as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright
from shardwright.policies.expert_axes import expert_axes
from shardwright.runtime.errors import PlanError

PAGE = (Path(__file__).resolve().parents[2] / "docs/experts.md").read_text()


def _names() -> dict[str, Any]:
    """What the Python blocks of the page define; only its last call is not made."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block.split("shardwright.parallelize(")[0], names)
    return names


@pytest.mark.slow
def test_the_policies_of_the_page_are_exact() -> None:
    names = _names()
    model = names["model"].double()
    for policy in ("ep", names["my_policy"], names["exchanged"]):
        report = shardwright.verify(model, names["batch"], policy, names["config"])
        assert report.ok, str(report)


def test_the_page_quotes_errors_as_they_are() -> None:
    for sizes in ((4, 1, 3, 1, "ep"), (2, 4, 4, 3, "hybrid")):
        with pytest.raises(PlanError) as refused:
            expert_axes(*sizes)
        assert str(refused.value) in PAGE
    config = shardwright.ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    with pytest.raises(PlanError) as refused:
        shardwright.verify(torch.nn.Linear(8, 8), {"input": torch.zeros(4, 8)}, "ep", config)
    assert str(refused.value) in PAGE
