"""Batch norms that average over all batches: outputs, gradients and running statistics of several
steps.
"""

from __future__ import annotations

import pytest
import torch
from covers import spread
from interpret import run_graph
from torch import Tensor, nn

from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify


class Averaging(nn.Module):
    """Without biases in front of norms: their gradients are zero but for rounding, which differs
    from machine to machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=None)
        self.down, self.last = (
            nn.Linear(8, 4, bias=False),
            nn.BatchNorm1d(4, momentum=None, affine=False),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return (self.last(self.down(hidden)) - y).square().mean()


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("policy", spread(["tp", "data"], 2, first=1))
def test_the_average_over_all_batches(policy: str) -> None:
    torch.manual_seed(0)
    model = Averaging().double()
    first = [b.clone() for b in model.buffers()]
    report = verify(
        model,
        {"x": rand(6, 3, 5, 5), "y": rand(6, 4)},
        policy,
        {"plan_ngpus": 2, "runtime_ngpus": 2},
    )
    assert report.ok, str(report)
    assert "buffers" in str(report)
    assert all(torch.equal(a, b) for a, b in zip(first, model.buffers(), strict=True))


def test_evaluation_reads_the_averages() -> None:
    model, args = Averaging().double(), {"x": rand(6, 3, 5, 5), "y": rand(6, 4)}
    graph = trace(model, args)
    for seed in (1, 2):
        model(rand(6, 3, 5, 5, seed=seed), args["y"])
    model.eval()
    torch.testing.assert_close(run_graph(graph, model, args), model(**args))


class Watching(nn.Module):
    """Norms whose results no loss needs: of one nobody reads any, the other's are for evaluation
    (an auxiliary head). Torch updates the statistics of both in training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 1)
        self.unread, self.shown = nn.BatchNorm2d(4), nn.BatchNorm1d(4)
        self.before = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.conv(x)
        self.unread(hidden * 2)
        pooled = hidden.mean((2, 3))
        shown = self.shown(self.before(pooled))
        return {"loss": self.head(pooled).square().mean(), "shown": shown}


@pytest.mark.parametrize("policy", spread(["tp", "data"], 2))
def test_statistics_that_no_loss_needs(policy: str) -> None:
    torch.manual_seed(0)
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "outputs": {"shown": "eval"}}
    report = verify(Watching(), {"x": rand(4, 3, 2, 2)}, policy, config, steps=2)
    assert report.ok, str(report)
    assert len(report.deviations["buffers"]) == 6
