"""Models that draw random numbers are held to their program on one rank, which draws the same."""

import pytest
import torch
from torch import Tensor

from shardwright.frontend.verification.verify import verify
from shardwright.runtime.config import ComputeConfig


class SeldomSeen(torch.nn.Module):
    """What it draws decides something in one step of many."""

    def __init__(self, is_random: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 6)
        self.is_random = is_random

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.is_random:
            y = torch.where(torch.rand(y.shape) < 1e-9, 0.0, y)
        return y.square().mean()


@pytest.mark.parametrize(
    ("is_random", "reference"),
    [(False, "the model on one device"), (True, "its program on one rank")],
)
def test_the_reference_of_a_model_that_draws(is_random: bool, reference: str) -> None:
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    report = verify(SeldomSeen(is_random), {"x": torch.randn(4, 8)}, "tp", config)
    assert report.ok and report.compared_with.startswith(reference)
