"""Which blocks of a stage to compute again: a knapsack, by its Pareto points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

Places = tuple[Array, Array]
"""The starts and the stops of some stretches."""

FRONTIER_STEPS = 4096
"""Into how many steps the bytes that recompute can save are divided, rounded down, once a frontier
has that many points.
"""


@dataclass(frozen=True, slots=True)
class Again:
    """One way to compute part of a block again, or all of it: ``time_s`` more per microbatch,
    ``saved_bytes`` less kept.
    """

    time_s: float
    saved_bytes: float


class Frontier:
    """The Pareto points of computing some of the blocks again: bytes saved against seconds, both
    ascending.

    ``origin``: the point of ``before``, the frontier of one block less, that a point comes from;
    ``way``: in which way the last block is computed again, counted from 1, or 0. ``rounded``: by
    how many bytes at most a point saves more than it says.
    """

    def __init__(
        self,
        saved: Array,
        cost: Array,
        origin: Array,
        way: Array,
        before: Frontier | None,
        rounded: float = 0.0,
    ) -> None:
        self.saved, self.cost, self.rounded = saved, cost, rounded
        self._origin, self._way, self._before = origin, way, before

    @classmethod
    def empty(cls) -> Frontier:
        """The frontier of no blocks: nothing saved, nothing spent."""
        return cls(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1), None)

    def with_block(self, again: Sequence[Again]) -> Frontier:
        """The frontier with one more block to choose or leave, in one of its ways."""
        # Every point, without the block or with each of its ways.
        points = len(self.saved)
        saved = np.concatenate([self.saved, *(self.saved + way.saved_bytes for way in again)])
        cost = np.concatenate([self.cost, *(self.cost + way.time_s for way in again)])
        rounded = self.rounded
        # Too many points: savings are rounded down, so that the frontier stays true.
        if len(saved) > FRONTIER_STEPS:
            step = saved.max() / FRONTIER_STEPS
            saved = np.floor(saved / step) * step
            rounded += step
        # Keep what saves more than all that takes less time.
        order = np.lexsort((-saved, cost))
        best = np.maximum.accumulate(saved[order])
        kept = order[np.concatenate([[True], saved[order][1:] > best[:-1]])]
        return Frontier(saved[kept], cost[kept], kept % points, kept // points, self, rounded)

    def cost_of(self, needed: float) -> float:
        """The least seconds that save so many bytes; infinite if nothing does."""
        return float(self.costs_of(np.array(needed)))

    def costs_of(self, needed: Array, *, least: bool = False) -> Array:
        """The least seconds that save so many bytes, each; infinite if nothing does. ``least``:
        heeding that points are rounded.
        """
        points = self._points(needed - self.rounded if least else needed)
        return np.append(self.cost, np.inf)[points]

    def chosen(self, needed: float) -> list[tuple[int, int]]:
        """The blocks, by number, of the cheapest choice that saves so many bytes, each with its
        way.
        """
        index, frontier, ways = int(self._points(np.array(needed))), self, []
        while frontier._before is not None:
            ways.append(int(frontier._way[index]))
            index, frontier = int(frontier._origin[index]), frontier._before
        return [(number, way - 1) for number, way in enumerate(reversed(ways)) if way]

    def _points(self, needed: Array) -> Array:
        return np.searchsorted(self.saved, needed * (1 - 1e-12))


class StageFrontiers:
    """The frontiers of all stretches of blocks, made as they are asked for. Stretches of blocks
    alike share one.

    Args:
        again: the ways to compute each block again.
    """

    def __init__(self, again: Sequence[tuple[Again, ...]]) -> None:
        self._again = again
        self._by_start: dict[int, list[Frontier]] = {}
        self._empty = Frontier.empty()
        self._grown: dict[tuple[int, tuple[Again, ...]], Frontier] = {}
        # ``[start, stop]``: which of those that differ a stretch has, where it was asked for.
        self._numbers = np.full((len(again) + 1, len(again) + 1), -1)
        self._distinct: list[Frontier] = []
        self._number_of: dict[int, int] = {}  # by identity

    def of(self, start: int, stop: int) -> Frontier:
        """The frontier of one stretch."""
        frontiers = self._by_start.setdefault(start, [self._empty])
        while len(frontiers) <= stop - start:
            last, again = frontiers[-1], self._again[start + len(frontiers) - 1]
            key = (id(last), again)
            if key not in self._grown:
                self._grown[key] = last.with_block(again)
            frontiers.append(self._grown[key])
        return frontiers[stop - start]

    def distinct(self, stretches: Array) -> Iterator[tuple[Frontier, Places]]:
        """The frontiers of some stretches, ``[start, stop]``, each with those that have it."""
        for start, stop in zip(*np.nonzero(stretches & (self._numbers < 0)), strict=True):
            frontier = self.of(start, stop)
            if id(frontier) not in self._number_of:
                self._number_of[id(frontier)] = len(self._distinct)
                self._distinct.append(frontier)
            self._numbers[start, stop] = self._number_of[id(frontier)]
        # Stretches with the same frontier stand together.
        starts, stops = np.nonzero(stretches)
        numbers = self._numbers[starts, stops]
        order = np.argsort(numbers, kind="stable")
        edges = np.flatnonzero(np.diff(numbers[order])) + 1
        for same in np.split(order, edges) if len(order) else ():
            yield self._distinct[int(numbers[same[0]])], (starts[same], stops[same])
