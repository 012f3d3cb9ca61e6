"""Move the begins of stages for schedules that the model of stages does not describe, by simulating
the schedule itself.

Stages are cut for the time of 1F1B (:mod:`shardwright.policies.autodist.stages.split_chain`). Where
a schedule puts off gradients of weights, or a position runs several stages, other cuts can be
better. Each begin is tried a few blocks earlier and later, as long as the step gets shorter: a
local optimum, for small schedules only, as each trial is a simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from shardwright.policies.autodist.stages.shared_positions import Positions
from shardwright.policies.autodist.stages.split_chain import Split

REACH = 2
"""How many blocks a begin is moved at once, at most: of two places next to each other, one is often
crossed by more.
"""

MAX_ACTIONS = 4096
"""Forwards that are simulated in all for one cut."""


def moved(
    split: Split, positions: Positions, num_microbatches: int, step_s: Callable[[Split], float]
) -> Split:
    """The split with its begins moved, as ``positions`` have memory for it; ``step_s`` says what a
    step of a split takes.
    """
    left = MAX_ACTIONS // max(1, num_microbatches * len(split.stages))
    best_s = step_s(split) if left else 0.0
    improved = True
    while improved:
        improved = False
        for number, by in itertools.product(range(1, len(split.stages)), _steps()):
            trial = _with_begin(split, number, split.stages[number].start + by, positions)
            if trial is None:
                continue
            if left == 0:
                return split
            left -= 1
            seconds = step_s(trial)
            if seconds < best_s * (1 - 1e-12):
                split, best_s, improved = trial, seconds, True
    return split


def _steps() -> list[int]:
    return [sign * distance for distance in range(1, REACH + 1) for sign in (-1, 1)]


def _with_begin(split: Split, number: int, begin: int, positions: Positions) -> Split | None:
    """The split whose stage ``number`` begins at block ``begin``; None if a stage would be empty or
    a position not fit.
    """
    before, own = split.stages[number - 1], split.stages[number]
    if not before.start < begin < own.stop:
        return None
    found = list(split.stages)
    found[number - 1 : number + 1] = replace(before, stop=begin), replace(own, start=begin)
    fitted = positions.fitted(found)
    return None if fitted is None else replace(split, stages=fitted[0], used_bytes=fitted[1])
