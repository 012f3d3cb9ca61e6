"""Optimizers of a user's own, as a command line names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Averaging(torch.optim.Optimizer):
    """Keeps a float32 average of each parameter."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", p.detach().float().clone())
                p.add_(p.grad, alpha=-group["lr"])
                average.lerp_(p.float(), 0.1)


def muon_for_matrices(params: list[Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """Muon where it can be, AdamW elsewhere; made for one parameter at a time."""
    (parameter,) = params
    kind = torch.optim.Muon if parameter.ndim == 2 else torch.optim.AdamW
    return kind(params, lr=lr)


def nothing(params: list[Tensor]) -> int:
    return len(params)
