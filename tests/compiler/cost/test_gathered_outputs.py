"""What making outputs whole costs is said where nobody has asked for it."""

import warnings
from typing import Any

import pytest
import torch
from planning import graph_of
from torch import nn

from shardwright.compiler.compile import compile_graph
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig

WORDS = 80_000
ROWS = 8


class Head(nn.Module):
    """Logits over many words; with a target, their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, WORDS)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        logits = self.head(self.up(x).relu())
        if target is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits}


def said(**settings: Any) -> list[str]:
    inputs = {"x": torch.randn(ROWS, 4)}
    if settings.pop("with_loss", False):
        inputs["target"] = torch.zeros(ROWS, dtype=torch.long)
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, **settings)
    graph = graph_of(Head(), inputs)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compile_graph(graph, find_policy("tp").apply, config)
    return [str(item.message) for item in found if "to make the outputs" in str(item.message)]


def test_bytes_of_outputs_without_a_loss_are_said() -> None:
    (text,) = said()
    received = ROWS * (WORDS // 2) * 4
    assert f"each rank receives in every step {received / 1e6:.2f} MB, beside " in text
    assert "outputs={'logits': 'sharded'}" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"with_loss": True},
        {"outputs": {"logits": "sharded"}},
        {"outputs": {"logits": "whole"}},
        {"outputs": "all"},
        {"inference_only": True},
    ],
    ids=str,
)
def test_nothing_is_said_where_it_is_asked_for_or_left_out(settings: dict[str, Any]) -> None:
    assert said(**settings) == []
