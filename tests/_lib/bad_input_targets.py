"""What is called with bad values, and the small model that calls are about."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Target:
    """``good`` gives arguments, by name, with which ``function`` returns. ``also``: names beside
    those of its signature;
    ``without``: names that are left alone.
    """

    group: str
    name: str
    function: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        named = [
            p.name
            for p in inspect.signature(self.function).parameters.values()
            if p.kind not in kinds
        ]
        return [name for name in dict.fromkeys((*named, *self.also)) if name not in self.without]


class Net(nn.Module):
    """Small, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        loss: torch.Tensor = (self.down(self.up(x).relu()) * scale).square().mean()
        return loss


CONFIG = {"plan_ngpus": 1, "runtime_ngpus": 1}


ARGS = {"x": torch.ones(2, 4)}
