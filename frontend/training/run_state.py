"""What is under way, as hooks see it, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from shardwright.data.make_loader import Loader
from shardwright.frontend.training.dealt_samples import Batches
from shardwright.frontend.training.hooks import Hooks
from shardwright.frontend.training.loggers import Loggers
from shardwright.frontend.training.loss_weights import LossWeights
from shardwright.frontend.training.observing import Observer
from shardwright.frontend.training.predictions import Prediction
from shardwright.frontend.training.run_model import MadeModel
from shardwright.frontend.training.run_settings import DataSettings, RunSettings
from shardwright.frontend.training.stopping import StopRequest
from shardwright.runtime.checkpoint.save import CheckpointSave
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.world import World
from shardwright.runtime.training.loss_scaling import LossScaler
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer


@dataclass(frozen=True)
class RunResult:
    """What a run came to. ``step``: the last one. ``stopped_by``: why it ended before all steps
    were taken, if it did; started again it goes on.
    """

    step: int
    num_steps: int
    stopped_by: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.step >= self.num_steps


@dataclass
class Run:
    """A run that is under way, as hooks see it. ``step``: how many steps were taken; ``stop``: what
    asks it to stop.
    """

    settings: RunSettings
    world: World
    original: MadeModel
    model: ParallelModule
    optimizer: ParallelOptimizer
    scheduler: LambdaLR
    scaler: LossScaler
    loader: Loader
    batches: Batches
    weights: LossWeights
    dtype: torch.dtype | None
    num_steps: int
    tokens_per_step: int | None
    stop: StopRequest
    loggers: Loggers
    hooks: Hooks
    observer: Observer
    evaluated: tuple[DataSettings, Any, Any] | None
    prediction: Prediction
    step: int = 0
    last_save: CheckpointSave | None = field(default=None, repr=False)
    saved_step: int | None = None
