"""Training with parameters in pieces over the units, for ranks that are processes or threads."""

from __future__ import annotations

from pathlib import Path

import zoo
from precision import float64_casts
from torch import Tensor

from shardwright.frontend.verification.one_device import adamw
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer


def train(directory: Path, name: str, steps: int = 3) -> dict[str, Tensor]:
    """This rank's pieces of the parameters after some steps on batches of its own."""
    module = load_class(directory)()
    optimizer = build_optimizer(module, adamw)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = rolled(zoo.get(name).inputs(), 2 * step + current_world().rank)
        zoo.loss_of(module(**inputs)).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def train_in_process(directory: Path, name: str) -> dict[str, Tensor]:
    """Train in a process of its own."""
    with float64_casts():
        return train(directory, name)
