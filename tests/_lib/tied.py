"""A small model with tied weights that computes in float64 throughout, and samples for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tied(nn.Module):
    """An embedding that is the head, too. Nothing here is cast to float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()), logits


SAMPLES = [{"tokens": (torch.arange(24).view(4, 6) * 5 + m) % 12} for m in range(4)]
