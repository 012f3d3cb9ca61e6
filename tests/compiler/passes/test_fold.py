"""What constant folding computes while compiling, what it leaves alone, and that the numbers
stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import zoo
from torch import Tensor, nn

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.graph_grammar import verify as verify_graph
from shardwright.compiler.passes import fold
from shardwright.compiler.passes.fold import fold_constants
from shardwright.frontend.verification.verify import verify

X = {"x": torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(2, 6, 4)}


class Masked(nn.Module):
    """Scores under a causal mask and with a table of positions, both made from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        mask = positions[:, None] >= positions
        bias = (positions[:, None] - positions).abs().to(x.dtype).neg()
        scores = self.query(x) @ self.key(x).transpose(1, 2) + bias
        return scores.masked_fill(~mask, float("-inf")).softmax(-1).square().mean()


def folded(module: nn.Module, inputs: dict[str, Any] = X, **options: Any) -> IRGraph:
    graph = fold_constants(plans.traced(module.double(), inputs, **options))
    verify_graph(graph)
    return graph


def test_masks_and_tables_become_constants() -> None:
    graph = folded(Masked())
    assert [op.target for op in graph.ops] == [
        *(
            "linear",
            "linear",
            "transpose",
            "matmul",
            "add",
            "masked_fill",
            "softmax",
            "square",
            "mean",
        )
    ]
    assert {value.name: tuple(tensor.shape) for value, tensor in graph.constants} == {
        "const_bias": (6, 6),
        "const_bitwise_not": (6, 6),
    }
    row = torch.arange(6)
    expected = {
        "const_bias": -(row[:, None] - row).abs().double(),
        "const_bitwise_not": row[:, None] < row,
    }
    for value, tensor in graph.constants:
        assert torch.equal(tensor, expected[value.name])


def test_large_results_stay_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask has 36 bytes, the bias 288: it is computed by the ranks, from the smaller constant
    it follows from.
    """
    monkeypatch.setattr(fold, "MAX_CONSTANT_BYTES", 48)
    graph = folded(Masked())
    assert {value.name for value, _ in graph.constants} == {
        "const_bitwise_not",
        "const_positions",
        "const_getitem_1",
    }
    assert {"sub", "abs", "to", "neg"} <= {op.target for op in graph.ops}


class Mixed(nn.Module):
    """Values that look constant and are not, and one that is in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            x = x * torch.arange(1, 5, device=x.device) * torch.tensor([0.5])
        noise = torch.rand(4, dtype=x.dtype) * 0
        return (x + noise + self.scale.neg() + self.weight.neg()).square().mean()


def test_random_numbers_and_weights_are_no_constants() -> None:
    graph = folded(Mixed())
    assert not graph.constants
    assert {"rand", "neg"} <= {op.target for op in graph.ops}
    assert graph.eval_graph is not None
    assert [value.name for value, _ in graph.eval_graph.constants] == ["const_0", "const_arange"]


def test_dynamic_sizes_are_no_constants() -> None:
    graph = folded(Masked(), dynamic_dims={"x": {1: "seq"}})
    assert not graph.constants


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_the_numbers_stay(policy: str, tmp_path: Path) -> None:
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "constant_folding": True}
    report = verify(Masked(), X, policy, config, steps=2, directory=tmp_path)
    assert report.ok, str(report)
    (file,) = tmp_path.rglob("gencode0.py")
    assert "arange" not in file.read_text() and "self.const_bias" in file.read_text()


def test_a_model_of_transformers() -> None:
    entry = zoo.get("gpt2")
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "constant_folding": True}
    report = verify(entry.build(), entry.inputs(), "tp", config, steps=1)
    assert report.ok, str(report)
