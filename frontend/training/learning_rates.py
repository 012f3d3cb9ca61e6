"""Learning rates over a run, as parts of the optimizer's own.

An example: 10 warm-up steps of 100, ``cosine`` down to 0.1. Step 0 takes 0.1 of the rate, step 9
all of it, step 55 half of the way down (0.55), and step 99 next to 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwright.frontend.training.run_settings import ScheduleSettings


def part_of_rate(settings: ScheduleSettings, num_steps: int) -> Callable[[int], float]:
    """The part of the learning rate that a step takes, by its number from 0.

    ``cosine`` is that of Loshchilov and Hutter, "SGDR", 2017, without restarts.
    """
    warmup = settings.warmup_steps

    def part(step: int) -> float:
        # The first step takes a part as well: a step at rate 0 would be thrown away.
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        down = {
            "constant": 1.0,
            "linear": 1.0 - done,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        }[settings.name]
        return settings.final + (1.0 - settings.final) * down

    return part


def make_scheduler(optimizer: Optimizer, settings: ScheduleSettings, num_steps: int) -> LambdaLR:
    """The scheduler of a run of ``num_steps`` steps."""
    return LambdaLR(optimizer, part_of_rate(settings, num_steps))
