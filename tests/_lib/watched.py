"""A model that returns, beside its loss, what takes operators of its own: none of it is needed
where the loss alone is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Watched(nn.Module):
    """Layers of tanh, and the mean of what each of them gives."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Any:  # [B, 8]
        means = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            means.append(x.mean())
        return x.square().mean(), means


def inputs(batch: int = 4) -> dict[str, Tensor]:
    return {
        "x": torch.randn(batch, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    }


def watched(num_layers: int = 4) -> Watched:
    return Watched(num_layers).double()
