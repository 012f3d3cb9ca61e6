"""Other begins of stages, for schedules that the model of stages does not describe.

Stages are cut for the time of 1F1B (``stages/split_chain.py``). Other
cuts can be better where a schedule puts off gradients of weights, or where a position runs several
stages. Two ways lead to them, both to a local optimum:

- ``even_stages`` and ``evened`` cut so that stages, or the positions that run several of them, have
  about equal sums of seconds. The sum of a position counts, not its longest stage: where one stage
  is long anyhow, as with a large head, the others of its position should be short.
- ``moved`` tries each begin a few blocks earlier and later, as long as the simulated step gets
  shorter. It is for small schedules only, as each trial is a simulation.

Example: eight layers of 4 s and a head of 24 s in the stages 0, 1, 0, 1 of two positions. Stages of
3, 3 and 2 layers and the head are as even as stages can be, and give positions of 20 and 36 s. With
3, 0, 5 layers and the head, they have 32 and 24 s; with the fourth stage begun a layer earlier, 28
s each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shardwright.policies.autodist.stages.shared_positions import Positions
from shardwright.policies.autodist.stages.split_chain import Split

WORTH = 0.01
"""A begin is moved if that makes the sum of squares of the positions' sums smaller by that
share.
"""


def evened(times: Sequence[float], cuts: Sequence[int], placement: Sequence[int]) -> list[int]:
    """The blocks ``cuts`` at which stages 1, 2, ... begin, moved one at a time until positions are
    about even.

    ``times``: seconds of each block. ``placement``: the position that runs each stage. A begin is
    moved as long as that makes the sum of squares of the positions' sums clearly smaller: a local
    optimum.
    """
    sums = [0.0, *itertools.accumulate(times)]
    num_blocks = len(times)

    def squares(cuts: Sequence[int]) -> float:
        positions = [0.0] * (max(placement) + 1)
        for position, (start, stop) in zip(
            placement, itertools.pairwise((0, *cuts, num_blocks)), strict=True
        ):
            positions[position] += sums[stop] - sums[start]
        return sum(time * time for time in positions)

    # One begin at a time, to the best place between its neighbours, until nothing gets better.
    found, best, improved = list(cuts), squares(cuts), True
    while improved:
        improved = False
        for number in range(len(found)):
            if placement[number] == placement[number + 1]:
                continue  # wherever the begin is, the sums are the same
            low, high = (0, *found)[number], (*found, num_blocks)[number + 1]
            for place in range(low + 1, high):
                trial = [*found[:number], place, *found[number + 1 :]]
                value = squares(trial)
                if value < (1 - WORTH) * best:
                    best, found, improved = value, trial, True
    return found


def even_stages(times: Sequence[float], num_stages: int) -> list[int]:
    """Begins of the stages 1, 2, ... whose longest is as short as can be; of all such, the most
    even stages.

    Exact, by dynamic programming over the block that a stage ends before. Even are stages of a
    small sum of squares.
    """
    sums = np.concatenate([[0.0], np.cumsum(times)])
    seconds = sums[None, :] - sums[:, None]  # [first block, block after the last] of a stage
    seconds[np.tril_indices(len(sums))] = np.inf  # no stage is empty
    longest = seconds[0]
    for _ in range(num_stages - 1):
        longest = np.maximum(longest[:, None], seconds).min(axis=0)
    squares = np.where(seconds <= longest[-1] * (1 + 1e-9), seconds**2, np.inf)
    least, came_from = squares[0], []
    for _ in range(num_stages - 1):
        totals = least[:, None] + squares
        came_from.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
    begins = [len(times)]
    for origins in reversed(came_from):
        begins.append(int(origins[begins[-1]]))
    return begins[:0:-1]


REACH = 2
"""How many blocks a begin is moved at once, at most: of two places next to each other, one is often
crossed by more.
"""

MAX_ACTIONS = 16384
"""Forwards that are simulated in all for one cut."""


def moved(
    split: Split, positions: Positions, num_microbatches: int, step_s: Callable[[Split], float]
) -> Split:
    """The split with its begins moved, as ``positions`` have memory for it; ``step_s`` says what a
    step of a split takes.
    """
    # How many splits may be simulated: simulating takes time in proportion to actions.
    left = MAX_ACTIONS // max(1, num_microbatches * len(split.stages))
    best_s = step_s(split) if left else 0.0
    improved = True
    while improved:
        improved = False
        # Every begin, a few blocks forth and back; what is better is taken at once.
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
