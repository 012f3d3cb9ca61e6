"""What the processes of checkpoint tests run."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from mlp_files import make_batch
from mlp_training import adamw
from torch import Tensor

import shardwright
from shardwright.runtime.checkpoint import save as saving
from shardwright.runtime.loader import load_class
from shardwright.runtime.optimizer import build_optimizer
from shardwright.runtime.world import current_world


def train(files: str, directory: str, steps: int, resume: bool, async_save: bool = False) -> dict[str, Tensor]:
    """Train the hand-made model, from its current checkpoint or from the start, and save after every step."""
    module = load_class(files)()
    optimizer = build_optimizer(module, adamw)
    first = 0
    if resume:
        first = shardwright.load_checkpoint(directory, module, optimizer).step or 0
    for number in range(first, first + steps):
        optimizer.zero_grad()
        module(*make_batch(number)).div(module.ranks.num_units).backward()
        optimizer.step()
        save = shardwright.save_checkpoint(directory, module, optimizer, step=number + 1, async_save=async_save)
    save.wait()
    return {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def deduped_round_trip(files: str) -> bool:
    """Save in memory without copies, spoil everything, load again."""
    module = load_class(files)()
    optimizer = build_optimizer(module, adamw)
    module(*make_batch(0)).div(module.ranks.num_units).backward()
    optimizer.step()
    before = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    states = [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in shardwright.deduped_state_dict(module)[0].items()
        },
        shardwright.deduped_state_dict(module, optimizer)[1],
    ]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    shardwright.load_deduped_state_dict(module, states[0], optimizer, states[1])
    return all(torch.equal(module.state_dict()[name], value) for name, value in before.items())


def save_until_killed(directory: str, victim: int, phase: str) -> None:
    """Save twice; in a phase of the second save, one process is killed."""
    module = torch.nn.Linear(3, 3)
    shardwright.save_checkpoint(directory, module, step=1)
    if current_world().rank == victim:
        owner: Any = saving.CheckpointSave
        name = {"write": "_write_own", "part": "_write_own", "commit": "_commit"}[phase]
        original = getattr(owner, name)

        def killed(self: Any) -> None:
            if phase == "part":
                original(self)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, killed)
    shardwright.save_checkpoint(directory, module, step=2)
    if victim == 1 and phase == "commit":
        os.kill(os.getpid(), signal.SIGKILL)
