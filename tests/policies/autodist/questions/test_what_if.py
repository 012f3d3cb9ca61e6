"""What would help a plan."""

from __future__ import annotations

from typing import Any

import planning
import plans
import pytest
import torch
from torch import nn

from shardwright import ComputeConfig
from shardwright.compiler.plan.outputs import returns_more_than_loss
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import Request
from shardwright.policies.autodist.questions.what_if import levers

LOSS_ALONE = 'outputs="loss": nothing else returned'


class Classifier(nn.Module):
    """Returns a loss and what it is of."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(16, 64, bias=False)
        self.detached = detached

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits, y)
        return {"logits": logits, "loss": loss.detach() if self.detached else loss}


def graph_of(module: nn.Module) -> plans.PlannableGraph:
    return planning.graph_of(
        module, {"x": torch.randn(32, 16), "y": torch.zeros(32, dtype=torch.long)}
    )


def config(**fields: Any) -> ComputeConfig:
    return ComputeConfig(plan_ngpus=2, runtime_ngpus=2, **fields)


@pytest.mark.slow
def test_what_returning_the_loss_alone_would_buy() -> None:
    graph, machine = graph_of(Classifier()), planning.slow_machine(2)
    by_outputs: dict[str, list[tuple[str, float]]] = {}
    for outputs in ("all", "loss"):
        asked = config(outputs=outputs)
        best = search(graph, asked, AutodistOptions(), machine).best
        assert best is not None
        listed = levers(Request(graph, asked, AutodistOptions(), machine, best))
        by_outputs[outputs] = [(choice.name, choice.step_s) for choice in listed]
    every, alone = dict(by_outputs["all"]), dict(by_outputs["loss"])
    assert LOSS_ALONE not in alone
    assert (
        every[LOSS_ALONE] == pytest.approx(alone["the plan"], rel=1e-12)
        and every[LOSS_ALONE] < every["the plan"]
    )


def test_what_returns_more_than_a_loss() -> None:
    assert returns_more_than_loss(graph_of(Classifier()), config(outputs="all"))
    assert not returns_more_than_loss(graph_of(Classifier()), config())
    assert not returns_more_than_loss(graph_of(Classifier()), config(outputs="loss"))
    assert not returns_more_than_loss(graph_of(Classifier()), config(outputs={"logits": "sharded"}))
    assert not returns_more_than_loss(graph_of(Classifier(detached=True)), config(outputs="all"))
    assert not returns_more_than_loss(
        planning.graph_of(nn.Linear(4, 4), {"input": torch.randn(4, 4)}), config()
    )
