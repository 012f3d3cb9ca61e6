"""Stages that no gradient comes back to: what they pass on is rounded to codes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.frontend.verification.verify import verify


class Codes(nn.Module):
    """A decoder of the nearest codes: its encoder has no gradients, so that no weight decay touches
    it either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
        self.codes, self.decoder = nn.Embedding(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        nearest = torch.cdist(self.encoder(x), self.codes.weight).argmin(-1)
        return F.mse_loss(self.decoder(F.embedding(nearest, self.codes.weight)), y)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_parameters_without_gradients_stay_without(schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, size, generator=generator) for size in (8, 2))
    options = {"schedule": schedule, "num_microbatches": 2}
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "use_end2end": True, "pas_config": options}
    report = verify(Codes(), {"x": x, "y": y}, "pp", config)
    assert report.ok, str(report)
