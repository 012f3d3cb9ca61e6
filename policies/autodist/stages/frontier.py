"""Which blocks of a stage to compute again: a knapsack, by its Pareto points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

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

    def cost_of(self, needed: float, *, least: bool = False) -> float:
        """The least seconds that save so many bytes; infinite if nothing does. ``least``: heeding
        that points are rounded.
        """
        index = self._point(needed - self.rounded if least else needed)
        return float(self.cost[index]) if index < len(self.cost) else float("inf")

    def chosen(self, needed: float) -> list[tuple[int, int]]:
        """The blocks, by number, of the cheapest choice that saves so many bytes, each with its
        way.
        """
        index, frontier, ways = self._point(needed), self, []
        while frontier._before is not None:
            ways.append(int(frontier._way[index]))
            index, frontier = int(frontier._origin[index]), frontier._before
        return [(number, way - 1) for number, way in enumerate(reversed(ways)) if way]

    def _point(self, needed: float) -> int:
        return int(np.searchsorted(self.saved, needed * (1 - 1e-12)))
