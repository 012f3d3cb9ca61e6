"""Optimizers of a user's own, as a command line names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

RATE = 1e-3


class _OneByOne(torch.optim.Optimizer):
    """Updates one parameter after the other."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p], group["lr"])

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Averaging(_OneByOne):
    """Keeps a float32 average of each parameter."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        average = state.setdefault("average", p.detach().float().clone())
        p.add_(p.grad, alpha=-lr)
        average.lerp_(p.float(), 0.1)


class Preconditioned(_OneByOne):
    """Keeps a list of square matrices for each parameter, a momentum, and a flat view of that."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["squares"] = [
                torch.zeros(size, size, dtype=p.dtype, device=p.device) for size in p.shape
            ]
            state["momentum"], state["updates"] = torch.zeros_like(p), p.detach().view(-1)
            state["flat"] = state["momentum"].view(-1)
        state["squares"][0].add_(p.grad @ p.grad.T)
        state["momentum"].add_(p.grad)
        state["updates"].add_(state["flat"], alpha=-lr)


def muon_for_matrices(params: list[Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """Muon where it can be, AdamW elsewhere; made for one parameter at a time."""
    (parameter,) = params
    kind = torch.optim.Muon if parameter.ndim == 2 else torch.optim.AdamW
    return kind(params, lr=lr)


def nothing(params: list[Tensor]) -> int:
    return len(params)
