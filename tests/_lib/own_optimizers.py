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


class Preconditioned(torch.optim.Optimizer):
    """Keeps a list of square matrices for each parameter, a momentum, and a flat view of that."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["squares"] = [torch.zeros(size, size, dtype=p.dtype, device=p.device) for size in p.shape]
                    state["momentum"], state["updates"] = torch.zeros_like(p), p.detach().view(-1)
                    state["flat"] = state["momentum"].view(-1)
                state["squares"][0].add_(p.grad @ p.grad.T)
                state["momentum"].add_(p.grad)
                state["updates"].add_(state["flat"], alpha=-group["lr"])


def muon_for_matrices(params: list[Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """Muon where it can be, AdamW elsewhere; made for one parameter at a time."""
    (parameter,) = params
    kind = torch.optim.Muon if parameter.ndim == 2 else torch.optim.AdamW
    return kind(params, lr=lr)


def nothing(params: list[Tensor]) -> int:
    return len(params)
