"""Graphs as plain data, and their digest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.ir.op import RankDevice, WhenTraining
from shardwright.compiler.ir.serialize import digest, literal, to_json
from shardwright.compiler.ir.size import DynamicSize
from shardwright.compiler.trace import trace


class Model(nn.Module):
    def __init__(self, values: list[float], inside: float = 1.0) -> None:
        super().__init__()
        self.table = torch.tensor(values)
        self.linear = nn.Linear(3, 3)
        self.inside = inside

    def forward(
        self, x: Tensor, names: frozenset[str] = frozenset({"b", "a", "c"})
    ) -> dict[str, Tensor]:
        return {"y": self.linear(x) * self.table * self.inside}


X = torch.zeros(2, 3)


def test_plain_data() -> None:
    graph = trace(Model([1, 2, 3]), {"x": X}, dynamic_dims={"x": {0: "batch"}})
    data = json.loads(json.dumps(to_json(graph)))
    assert data["inputs"][0]["shape"] == ["batch", "3"] and data["ops"][0]["target"] == "linear"
    assert data["defaults"] == [["names", {"set": ["a", "b", "c"]}]]


def test_what_counts() -> None:
    first = digest(trace(Model([1, 2, 3]), {"x": X}))
    assert digest(trace(Model([1, 2, 3]), {"x": X + 1})) == first, "weights and inputs do not count"
    different = [
        trace(Model([1, 2, 4]), {"x": X}),  # a constant
        trace(Model([1, 2, 3], inside=1.5), {"x": X}),  # a literal
        trace(Model([1, 2, 3]), {"x": torch.zeros(3, 3)}),  # a shape
        trace(Model([1, 2, 3]), {"x": X}, dynamic_dims={"x": {0: "batch"}}),
        trace(Model([1, 2, 3]), {"x": X}, name="Other"),
        trace(Model([1, 2, 3]).double(), {"x": X.double()}),
    ]
    assert len({first, *map(digest, different)}) == len(different) + 1


def test_source_lines_do_not_count() -> None:
    graph = trace(Model([1, 2, 3]), {"x": X})
    moved = graph.with_ops(tuple(replace(op, source=None) for op in graph.ops))
    assert digest(moved) == digest(graph)


def test_literals_of_different_types_differ() -> None:
    values = [
        1,
        1.0,
        True,
        "1",
        None,
        (1,),
        {1: 1},
        {1},
        1j,
        b"1",
        slice(1),
        range(1),
        torch.float32,
        RankDevice(),
        int,
    ]
    values += [
        WhenTraining(1, 2),
        WhenTraining(2, 1),
        DynamicSize("n", 32),
        ...,
        -0.0,
        0.0,
        torch.ones(1),
        torch.ones(1, dtype=torch.int64),
    ]
    texts = [json.dumps(literal(value)) for value in values]
    assert len(set(texts)) == len(texts)


SCRIPT = """
import torch, sys
sys.path.insert(0, {folder!r})
import test_serialize as t
from shardwright.compiler.ir.serialize import digest
print(digest(t.trace(t.Model([1, 2, 3]), {{"x": t.X}})))
"""


@pytest.mark.slow
def test_the_same_in_every_process() -> None:
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", SCRIPT.format(folder=os.path.dirname(__file__))]
    there = subprocess.run(
        command, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert there == digest(trace(Model([1, 2, 3]), {"x": X})) and len(there) == 64
