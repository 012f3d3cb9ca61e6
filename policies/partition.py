"""Cut a chain of operators into stages: exact min-max of time, and among the best cuts the one that sends the least.

Cuts are then moved until the sums of the pipeline's positions are about even. Where a position runs several stages its sum
counts, not the largest stage; and where one stage is long anyhow, the others need not be uneven.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.cost.hardware import load_hardware
from shardwright.compiler.cost.operators import op_time
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.size import product
from shardwright.compiler.passes.stages import from_nothing
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh


def balanced_cuts(times: Sequence[int], traffic: Sequence[float], num_parts: int) -> list[int]:
    """Where parts 1, 2, ... begin, so that the largest sum of ``times`` in a part is as small as possible, and then the sum of
    ``traffic`` at the cuts. ``traffic[i]`` is what crosses a cut before item ``i``; infinite: no cut there.

    Exact. The smallest feasible maximum is found by bisection over integers, the cheapest cuts under it by dynamic programming
    with minima of windows, O(parts x items x log items).

    Raises :class:`PlanError` if there are fewer places to cut than needed.
    """
    sums = [0, *itertools.accumulate(times)]
    places = [i for i in range(1, len(times)) if traffic[i] != float("inf")]
    if len(places) < num_parts - 1:
        raise PlanError(
            f"the graph cannot be cut into {num_parts} stages",
            why=f"it has {len(places)} places where a stage may begin",
            hint="ask for fewer stages",
        )
    low, high = max(sums[-1] // num_parts, 1) - 1, sums[-1]
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(sums, places, num_parts, middle):
            high = middle
        else:
            low = middle
    limit = high
    return _cheapest(sums, places, traffic, num_parts, limit)


def _fits(sums: Sequence[int], places: Sequence[int], num_parts: int, limit: int) -> bool:
    """Whether greedy parts of at most ``limit`` suffice."""
    start, parts = 0, 1
    while sums[-1] - sums[start] > limit:
        furthest = bisect.bisect_right(sums, sums[start] + limit) - 1
        index = bisect.bisect_right(places, furthest) - 1
        if index < 0 or places[index] <= start:
            return False
        start, parts = places[index], parts + 1
        if parts > num_parts:
            return False
    return True


def _cheapest(sums: Sequence[int], places: Sequence[int], traffic: Sequence[float], num_parts: int, limit: int) -> list[int]:
    """The cuts of least traffic with every part at most ``limit``; parts are never empty."""
    nodes = [0, *places, len(sums) - 1]
    at = np.array([sums[node] for node in nodes])
    crossing = np.array([0.0, *(traffic[place] for place in places), 0.0])
    begins = _Windows(np.searchsorted(at, at - limit))  # by node, where a part that ends there may begin
    best = np.full(len(nodes), np.inf)  # by node, the traffic of the parts up to there
    best[0] = 0.0
    before = []
    for _ in range(num_parts):
        before.append(best)
        best = begins.least(best) + crossing
    cuts, node = [], len(nodes) - 1
    for best in reversed(before[1:]):
        node = begins.latest(best, node)
        cuts.append(nodes[node])
    return cuts[::-1]


class _Windows:
    """For every item, those from ``first`` up to it, without it. What is asked of them takes two of 2, 4, 8, ... items each."""

    def __init__(self, first: np.ndarray) -> None:
        self._first = first
        places = np.arange(len(first))
        self._is_empty = first >= places
        self._levels = np.frexp(np.maximum(places - first, 1))[1] - 1
        self._second = np.maximum(places - (1 << self._levels), 0)

    def least(self, values: np.ndarray) -> np.ndarray:
        """Of each window, the least value; infinite for an empty one."""
        levels = [values]
        for level in range(self._levels.max(initial=0)):
            ahead = np.full(len(values), np.inf)
            ahead[: -(1 << level)] = levels[-1][1 << level :]
            levels.append(np.minimum(levels[-1], ahead))
        table = np.array(levels)
        found = np.minimum(table[self._levels, self._first], table[self._levels, self._second])
        return np.where(self._is_empty, np.inf, found)

    def latest(self, values: np.ndarray, item: int) -> int:
        """The last item of a window that has its least value."""
        first = int(self._first[item])
        return item - 1 - int(np.argmin(values[first:item][::-1]))


WORTH = 0.01
"""Cuts are moved if that makes the sums of positions by that share more even."""


def evened(times: Sequence[int], traffic: Sequence[float], cuts: Sequence[int], placement: Sequence[int]) -> list[int]:
    """The cuts moved, one at a time, to where no more crosses than at any of them, as long as that makes the sums of ``times``
    of the positions more even. ``placement``: the position that runs each stage.

    A descent of the sum of squares, from the cuts and from such that follow one another after equal times: the one with the
    smaller largest sum, which is never larger than before.
    """
    sums = [0, *itertools.accumulate(times)]
    most = max((traffic[cut] for cut in cuts), default=0.0)
    places = [i for i in range(1, len(times)) if traffic[i] <= most]

    def by_position(cuts: Sequence[int]) -> list[int]:
        positions = [0] * (max(placement) + 1)
        for position, (start, stop) in zip(placement, itertools.pairwise((0, *cuts, len(times))), strict=True):
            positions[position] += sums[stop] - sums[start]
        return positions

    def squares(cuts: Sequence[int]) -> int:
        return sum(time * time for time in by_position(cuts))

    def descended(cuts: list[int]) -> list[int]:
        best, improved = squares(cuts), True
        while improved:
            improved = False
            for number in range(len(cuts)):
                before, after = placement[number : number + 2]
                if before == after:
                    continue  # wherever the cut is, the sums are the same
                positions = by_position(cuts)
                others = best - positions[before] ** 2 - positions[after] ** 2
                first, both = positions[before] - sums[cuts[number]], positions[before] + positions[after]
                low, high = (0, *cuts)[number], (*cuts, len(times))[number + 1]
                for place in places[bisect.bisect_right(places, low) : bisect.bisect_left(places, high)]:
                    moved = first + sums[place]  # what the position before the cut has with it there
                    value = others + moved**2 + (both - moved) ** 2
                    if value < (1 - WORTH) * best:
                        best, cuts, improved = value, [*cuts[:number], place, *cuts[number + 1 :]], True
        return cuts

    starts = (list(cuts), _after_equal_times(sums, places, len(cuts)))
    found = min(map(descended, starts), key=lambda each: (max(by_position(each)), squares(each)))
    return found if max(by_position(found)) <= max(by_position(cuts)) else list(cuts)


def _after_equal_times(sums: Sequence[int], places: Sequence[int], num_cuts: int) -> list[int]:
    """Places that follow one another after about equal times."""
    found: list[int] = []
    for number in range(num_cuts):
        first, last = len(found) and places.index(found[-1]) + 1, len(places) - (num_cuts - number)
        wanted = sums[-1] * (number + 1) // (num_cuts + 1)
        found.append(min(places[first : last + 1], key=lambda place: abs(sums[place] - wanted)))
    return found


BALANCED_ON = "a100-80gb"
"""The machine whose times balance stages. Only ratios between operators matter."""


def stage_starts(graph: IRGraph, placement: Sequence[int]) -> list[str]:
    """The first operator of every stage but the first, balanced by estimated time. ``placement``: the position of the pipeline
    that runs each stage.

    Operators that every stage makes for itself cost nothing here; a stage does not begin inside a recompute region.
    """
    return Balance(graph).starts(placement)


class Balance:
    """Where stages of one graph begin: :func:`stage_starts` for any number of them."""

    def __init__(self, graph: IRGraph) -> None:
        free, machine = from_nothing(graph), load_hardware(BALANCED_ON)
        self._graph = graph
        self._times = [0 if op.name in free else round(op_time(op, {}, Mesh(), machine).total_s * 1e15) for op in graph.ops]
        self._traffic = cut_traffic(graph, free)
        self._known: dict[tuple[int, ...], list[str]] = {}

    def starts(self, placement: Sequence[int]) -> list[str]:
        """The first operator of every stage but the first. Raises :class:`PlanError` where there are too few places to cut."""
        if (key := tuple(placement)) not in self._known:
            cuts = balanced_cuts(self._times, self._traffic, len(key))
            starts = evened(self._times, self._traffic, cuts, key)
            self._known[key] = [self._graph.ops[i].name for i in starts]
        return self._known[key]


def cut_traffic(graph: IRGraph, free: set[str]) -> list[float]:
    """Per place, the elements that cross a cut in front of it: forward, and back as gradients."""
    change = [0.0] * (len(graph.ops) + 1)
    last_use: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        if op.name not in free:
            for value in op.operands:
                last_use[value.name] = index
    for index, op in enumerate(graph.ops):
        if op.name in free:
            continue
        for value in op.results:
            until = last_use.get(value.name, index)
            size = estimate(product(value.shape)) * (2 if value.takes_gradient else 1)
            change[index + 1] += size
            change[until + 1] -= size
    traffic = list(itertools.accumulate(change))[: len(graph.ops)]
    for index in range(1, len(graph.ops)):
        region = graph.ops[index].region
        if region is not None and graph.ops[index - 1].region == region:
            traffic[index] = float("inf")
    return traffic


def starts_at(graph: IRGraph, paths: Sequence[str]) -> list[str]:
    """The first operator of each module path. Raises :class:`PlanError` for a path without operators."""
    starts = []
    for path in paths:
        found = next((op.name for op in graph.ops if op.module_path == path or op.module_path.startswith(f"{path}.")), None)
        if found is None:
            every = sorted({op.module_path for op in graph.ops} - {""}, key=lambda name: (name.count("."), name))
            known = [name for name in every if name.count(".") <= path.count(".")] or every
            more = ", ..." if len(known) > 12 else ""
            raise PlanError(
                f"no operator belongs to module {path!r}", hint=f"one of {', '.join(known[:12])}{more}" if known else None
            )
        starts.append(found)
    return starts
