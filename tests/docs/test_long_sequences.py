"""The page about long sequences: its code runs, its errors are as it says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright
from shardwright.runtime.errors import PlanError

PAGE = (Path(__file__).resolve().parents[2] / "docs/long-sequences.md").read_text()


@pytest.mark.slow
def test_the_plans_of_the_page_are_exact() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block.split("shardwright.parallelize(")[0], names)
    model, batch, config = names["model"].double(), names["batch"], names["config"]
    named = replace(config, pas_config=names["named"])
    for found in (config, names["two"], names["pieces"], named):
        report = shardwright.verify(model, batch, "cp", found, steps=1)
        assert report.ok, str(report)
    alone = shardwright.ComputeConfig(plan_ngpus=1, runtime_ngpus=1)
    report = shardwright.verify(model, batch, names["my_policy"], alone, steps=1)
    assert report.ok, str(report)
    many = shardwright.ComputeConfig(plan_ngpus=16, runtime_ngpus=16)
    with pytest.raises(PlanError) as refused:
        shardwright.verify(model, batch, "cp", many)
    assert str(refused.value) in PAGE


def test_the_page_quotes_errors_as_they_are() -> None:
    config = shardwright.ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    with pytest.raises(PlanError) as refused:
        shardwright.verify(torch.nn.Linear(8, 8), {"input": torch.zeros(4, 8)}, "cp", config)
    assert str(refused.value) in PAGE
