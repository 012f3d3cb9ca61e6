"""Other begins of stages, for schedules that the model of stages does not describe.

Stages are cut for the time of 1F1B (``stages/split_chain.py``). Other cuts can be better where a
schedule puts off gradients of weights, or where a position runs several stages. Two steps lead to
them, both to a local optimum:

- ``even_stages``, ``even_positions`` and ``evened`` cut so that stages, or the positions that run
  several of them, have about equal sums of seconds. The sum of a position counts, not its longest
  stage: where one stage is long anyhow, as with a large head, the others of its position should be
  short.
- ``moved`` tries begins a few blocks earlier and later, the most even cuts first, as long as the
  simulated step gets shorter. Each trial is a simulation, so their number is limited.

Both move *runs* of begins that follow one another. Of stages 2, 3, 4 with begins 10, 20, 30 moving
all three one block on gives stage 1 a block that stage 4 loses, and leaves 2 and 3 as long as they
were. Moved one by one, they would have to pass cuts that are worse.

Example: eight layers of 4 s and a head of 24 s in the stages 0, 1, 0, 1 of two positions. Stages of
3, 3 and 2 layers and the head are as even as stages can be, and give positions of 20 and 36 s. With
3, 0, 5 layers and the head, they have 32 and 24 s; with the fourth stage begun a layer earlier, 28
s each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.shared_positions import Positions
from shardwright.policies.autodist.stages.split_chain import Split

SQUARINGS = 3
NORM = 2**SQUARINGS
"""The norm of the positions' sums that is made small: nearly their largest, but a cut that makes
the second largest smaller is better, too.
"""

STAGES_WEIGHT = 0.02
"""The weight of uneven stages beside uneven positions. Stages of one position that differ much let
others wait, on most schedules.
"""

REACH = 2
"""How many blocks begins are moved at once, at most: of two places next to each other, one is often
crossed by more.
"""

MAX_NUMBERS = 2_000_000
"""How many begins all the cuts may have together that are compared at once: runs of begins are
shorter where there are many stages.
"""

ROUNDS = 12
"""How often the lengths that stages should have are changed to make positions even."""

TOWARDS = 0.5
"""The share of what a position has too much that its stages should be shorter in the next round."""

MAX_ACTIONS = 16384
"""Forwards that are simulated in all for one cut."""


class Evenness:
    """How even cuts are, and which cuts are near to one.

    Args:
        times: seconds of each block.
        placement: the position that runs each stage.
    """

    def __init__(self, times: Sequence[float], placement: Sequence[int]) -> None:
        self.num_blocks, self.placement = len(times), tuple(placement)
        self._sums = np.concatenate([[0.0], np.cumsum(np.asarray(times, dtype=np.float64))])
        # [stage, position]: 1 where the position runs the stage
        self._runs = np.eye(max(placement) + 1)[list(placement)]

    def unevenness(self, cuts: NDArray[np.intp]) -> Array:
        """The norm of the sums of positions, and of stages, each relative to an even share, of each
        row of ``[cut, begin]``. Perfectly even cuts have the least that there is.
        """
        edges = np.pad(cuts, ((0, 0), (1, 1)))
        edges[:, -1] = self.num_blocks
        stages = np.diff(self._sums[edges], axis=1)  # [cut, stage]
        positions = stages @ self._runs  # [cut, position]
        total = self._sums[-1] or 1.0
        powers = positions * self._runs.shape[1] / total
        for _ in range(SQUARINGS):  # much quicker than a power of floats
            powers = np.square(powers)
        long = powers.sum(axis=1) ** (1 / NORM)
        found: Array = long + STAGES_WEIGHT * len(self.placement) / total * np.sqrt(
            (stages**2).mean(axis=1)
        )
        return found

    def near(self, cuts: Sequence[int]) -> tuple[NDArray[np.intp], Array]:
        """The cuts whose begins differ from these by a run that is moved a little, as ``[cut,
        begin]``, the most even ones first, and their :meth:`unevenness`.
        """
        trials = np.asarray(cuts, dtype=np.intp) + _shifts(len(cuts))
        edges = np.pad(trials, ((0, 0), (1, 1)))
        edges[:, -1] = self.num_blocks
        trials = trials[(np.diff(edges, axis=1) > 0).all(axis=1)]  # no stage is empty
        found = self.unevenness(trials)
        order = np.argsort(found, kind="stable")
        return trials[order], found[order]


@functools.lru_cache(maxsize=8)
def _shifts(num_begins: int) -> NDArray[np.intp]:
    """``[trial, begin]``: how far each begin is moved: a run of them, all equally far."""
    steps = [sign * distance for distance in range(1, REACH + 1) for sign in (-1, 1)]
    longest = max(1, MAX_NUMBERS // (len(steps) * max(1, num_begins) ** 2))
    rows = []
    for first in range(num_begins):
        for stop in range(first + 1, min(first + longest, num_begins) + 1):
            for step in steps:
                row = np.zeros(num_begins, dtype=np.intp)
                row[first:stop] = step
                rows.append(row)
    return np.array(rows, dtype=np.intp).reshape(len(rows), num_begins)


def evened(evenness: Evenness, cuts: Sequence[int]) -> list[int]:
    """The blocks ``cuts`` at which stages 1, 2, ... begin, a run of them moved as long as that
    makes the cut more even: a local optimum.
    """
    found = list(cuts)
    best = float(evenness.unevenness(np.array([found], dtype=np.intp))[0])
    while True:
        trials, values = evenness.near(found)
        if not len(trials) or values[0] >= best * (1 - 1e-9):
            return found
        found, best = [int(begin) for begin in trials[0]], float(values[0])


def even_stages(times: Sequence[float], num_stages: int) -> list[int]:
    """Begins of the stages 1, 2, ... whose longest is as short as can be; of all such, the most
    even stages.

    Exact, by dynamic programming over the block that a stage ends before. Even are stages of a
    small sum of squares.
    """
    seconds = _seconds(times)
    longest = seconds[0]
    for _ in range(num_stages - 1):
        longest = np.maximum(longest[:, None], seconds).min(axis=0)
    squares = np.where(seconds <= longest[-1] * (1 + 1e-9), seconds**2, np.inf)
    return _shortest([squares] * num_stages)


def even_positions(times: Sequence[float], placement: Sequence[int]) -> list[int]:
    """Begins of the stages 1, 2, ... with which the sums of positions are about even, and the
    stages of a position of about the same length, as far as blocks allow.

    Each stage is to have a length, and the begins with the least sum of squared differences are
    found exactly. Then the stages of positions that have too much are to be shorter, and so on.
    """
    evenness, seconds = Evenness(times, placement), _seconds(times)
    position_of = np.asarray(placement)
    wanted = np.full(len(placement), sum(times) / len(placement))
    stages_of = np.bincount(position_of)
    found: list[tuple[float, list[int]]] = []
    for _ in range(ROUNDS):
        # Infinite where there is no stage.
        cuts = _shortest([np.square(seconds - s) for s in wanted])
        found.append((float(evenness.unevenness(np.array([cuts], dtype=np.intp))[0]), cuts))
        edges = np.array([0, *cuts, len(times)])
        own = np.bincount(position_of, weights=seconds[edges[:-1], edges[1:]])
        wanted -= (TOWARDS * (own - own.mean()) / stages_of)[position_of]
    return min(found)[1]


def _seconds(times: Sequence[float]) -> Array:
    """``[first block, block after the last]`` of a stage: its seconds; no stage is empty."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    seconds: Array = sums[None, :] - sums[:, None]
    seconds[np.tril_indices(len(sums))] = np.inf
    return seconds


def _shortest(costs: Sequence[Array]) -> list[int]:
    """The begins of the stages 1, 2, ... for which the sum of the costs of all stages is least.
    ``costs``: by stage, ``[first block, block after the last]``.
    """
    least, came_from = costs[0][0], []
    for own in costs[1:]:
        totals = least[:, None] + own
        came_from.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
    begins = [len(least) - 1]
    for origins in reversed(came_from):
        begins.append(int(origins[begins[-1]]))
    return begins[:0:-1]


def moved(
    split: Split,
    evenness: Evenness,
    positions: Positions,
    num_microbatches: int,
    step_s: Callable[[Split, float], float],
) -> Split:
    """The split with runs of its begins moved, as ``positions`` have memory for it; ``step_s`` says
    what a step of a split takes, if it is less than so many seconds. The most even cuts are tried
    first, and what is better is taken at once.
    """
    # How many splits may be simulated: simulating takes time in proportion to actions.
    left = MAX_ACTIONS // max(1, num_microbatches * len(split.stages))
    best_s = step_s(split, float("inf")) if left else 0.0
    tried: set[tuple[int, ...]] = set()
    improved = left > 0
    while improved:
        improved = False
        trials, _ = evenness.near([stage.start for stage in split.stages[1:]])
        for cuts in map(tuple, trials.tolist()):
            if cuts in tried:
                continue
            tried.add(cuts)
            trial = with_begins(split, cuts, evenness.num_blocks, positions)
            if trial is None:
                continue
            if left == 0:
                return split
            left -= 1
            seconds = step_s(trial, best_s)
            if seconds < best_s * (1 - 1e-12):
                split, best_s, improved = trial, seconds, True
                break
    return split


def with_begins(
    split: Split, cuts: Sequence[int], num_blocks: int, positions: Positions
) -> Split | None:
    """The split with its stages 1, 2, ... begun at these blocks; None if a position does not
    fit.
    """
    edges = itertools.pairwise((0, *cuts, num_blocks))
    stages = [
        replace(stage, start=start, stop=stop)
        for stage, (start, stop) in zip(split.stages, edges, strict=True)
    ]
    fitted = positions.fitted(stages)
    return None if fitted is None else replace(split, stages=fitted[0], used_bytes=fitted[1])
