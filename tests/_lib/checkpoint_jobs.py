"""What the processes of checkpoint tests run."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterable
from typing import Any

import torch
from mlp_files import make_batch
from mlp_training import adamw
from torch import Tensor

import shardwright
from shardwright.runtime.checkpoint import save as saving
from shardwright.runtime.loader import load_class
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer


def save_and_resume(files: str, directory: str) -> dict[str, bool]:
    """Whether the hand-made model, loaded from its checkpoint, goes on as it does without; the same
    for deduped state.
    """
    module, optimizer = _built(files)
    _train(module, optimizer, range(2))
    save = shardwright.save_checkpoint(directory, module, optimizer, step=2, async_save=True)
    deduped = copy.deepcopy(shardwright.deduped_state_dict(module, optimizer))
    _train(module, optimizer, [2])
    save.wait()
    results = {}
    for how in ("resumed", "deduped"):
        fresh, stepper = _built(files)
        if how == "resumed":
            assert shardwright.load_checkpoint(directory, fresh, stepper).step == 2
        else:
            shardwright.load_deduped_state_dict(fresh, deduped[0], stepper, deduped[1])
        _train(fresh, stepper, [2])
        results[how] = all(
            torch.equal(value, fresh.state_dict()[name])
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor) and (name != "mean" or module.ranks.unit == 0)
        )
    return results


def _built(files: str) -> tuple[ParallelModule, ParallelOptimizer]:
    module = load_class(files)()
    return module, build_optimizer(module, adamw)


def _train(module: ParallelModule, optimizer: ParallelOptimizer, steps: Iterable[int]) -> None:
    for number in steps:
        optimizer.zero_grad()
        module(*make_batch(10 * number + module.ranks.unit)).backward()
        optimizer.step()


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


def save_in_background_until_killed(directory: str, victim: int) -> None:
    """Save twice, the second time in the background; one process is killed while it writes, and
    nobody waits for the save.
    """
    owner: Any = saving
    owner.PATIENCE_S, owner._BEAT_S = 5.0, 0.2
    module = torch.nn.Linear(3, 3)
    shardwright.save_checkpoint(directory, module, step=1)
    if current_world().rank == victim:
        owner.CheckpointSave._write_own = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    shardwright.save_checkpoint(directory, module, step=2, async_save=True)
