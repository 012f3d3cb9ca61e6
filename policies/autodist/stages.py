"""Cut a chain of blocks into pipeline stages on sub-meshes of chosen sizes: exact under the model of one-forward-one-backward.

Variables: the cuts, the devices of every stage, and what of its blocks is computed again in the backward.

Objective: ``sum_k t_k + max_k ((m - 1) t_k + u_k)`` s, where a microbatch takes ``t_k`` in stage ``k`` (forward, backward,
what is computed again, and the message from the stage before) and ``u_k`` comes once per step (reduction of gradients,
optimizer). For equal stages this is the time of 1F1B, GPipe and their like; for others the schedule is simulated later.

Constraints: the devices add up; each stage fits the memory of a device, with as many microbatches in flight as its place in the
schedule asks for.

Method: for a limit on the second term, the least first term is a shortest path over (stages left, block, devices left), solved
as min-plus products (:func:`_least_sum`). Lowering the limit below each solution's own maximum enumerates all Pareto points of
the two terms, so the best sum is found exactly. What a stage computes again is a knapsack, solved by Pareto frontiers
(:class:`_Frontier`). The bound drops memory and messages and takes what no schedule can avoid (:func:`_bound`): stage ``k``
works ``m w_k``, after the first microbatch has come through the stages before it and before its gradient has gone back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FRONTIER_STEPS = 4096
"""Into how many steps the bytes that recompute can save are divided, rounded down, once a frontier has that many points."""


@dataclass(frozen=True, slots=True)
class Again:
    """One way to compute part of a block again, or all of it: ``time_s`` more per microbatch, ``saved_bytes`` less kept."""

    time_s: float
    saved_bytes: float


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the model that stays in one piece, on a sub-mesh of some size. Seconds of one microbatch, bytes of one rank.

    ``once_s``: per step. ``held_bytes``: parameters, gradients and optimizer state. ``activation_bytes``: what one microbatch
    keeps from forward to backward; ``again``: the ways to compute it again, of which a plan takes one or none.
    ``transfer_s``: for the message into this block if a stage begins with it, there and back.
    """

    forward_s: float
    backward_s: float
    once_s: float = 0.0
    held_bytes: float = 0.0
    activation_bytes: float = 0.0
    again: tuple[Again, ...] = ()
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks ``start`` up to ``stop`` on ``num_devices``; ``recomputed``: blocks computed again, with the number of the way."""

    start: int
    stop: int
    num_devices: int
    recomputed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Split:
    """The best stages under the model. No split into as many stages, on any schedule, takes less than ``bound_s``.
    ``used_bytes``: of the stage that takes most.
    """

    stages: tuple[Stage, ...]
    cost_s: float
    bound_s: float
    used_bytes: float


@dataclass(frozen=True)
class NoFit:
    """No split fits: the best one still needs ``needed_bytes`` on its fullest device (infinite: the devices do not add up)."""

    needed_bytes: float


InFlight = Callable[[int], int]
"""From a stage's place, counted from the end (the last is 1), to the microbatches that it holds at once."""


def one_forward_one_backward(num_microbatches: int) -> InFlight:
    """A stage of 1F1B holds one microbatch for itself and one for every stage after it."""
    return lambda place: min(place, num_microbatches)


def all_at_once(num_microbatches: int) -> InFlight:
    """GPipe holds all of them."""
    return lambda place: num_microbatches


def split_stages(
    blocks: Mapping[int, Sequence[Block]],
    num_devices: int,
    num_stages: int,
    num_microbatches: int,
    *,
    memory_bytes: float = float("inf"),
    in_flight: InFlight | None = None,
    splits_backward: bool = False,
) -> Split | NoFit:
    """The best split into exactly ``num_stages``.

    ``blocks``: for each number of devices that a stage may have, all blocks of the model on that many. ``splits_backward``: the
    schedule puts off gradients of weights, so that the bound may count on forwards only before and after a stage's own work.
    """
    unit = math.gcd(*blocks, num_devices)  # devices are dealt out in lots of that many
    num_devices //= unit
    menus = [_Menu(size // unit, listed, num_microbatches, splits_backward) for size, listed in sorted(blocks.items())]
    holds = in_flight or one_forward_one_backward(num_microbatches)
    places = [holds(place) for place in range(1, num_stages + 1)]
    priced = [[menu.priced(count, memory_bytes) for menu in menus] for count in places]
    best, limit = None, np.inf
    while True:
        found = _least_sum(menus, priced, num_devices, limit)
        if found is None:
            break
        total, peak, _ = found
        if best is None or total + peak < best[0]:
            best = (total + peak, found[2])
        limit = np.nextafter(peak, -np.inf)
    if best is None:
        return NoFit(_least_memory(menus, places, num_devices))
    cost, path = best
    stages, used = [], 0.0
    for place, (start, stop, index) in zip(range(num_stages, 0, -1), path, strict=True):
        menu, count = menus[index], places[place - 1]
        stage = Stage(start, stop, menu.size * unit, menu.recomputed(start, stop, count, memory_bytes))
        stages.append(stage)
        used = max(used, menu.used_bytes(stage, count))
    bound = min(float(cost), _bound(menus, num_devices, num_stages, num_microbatches))
    return Split(tuple(stages), float(cost), bound, used)


class _Menu:
    """All stages that devices of one number could run: arrays [start, stop] over blocks."""

    def __init__(self, size: int, blocks: Sequence[Block], num_microbatches: int, splits_backward: bool) -> None:
        self.size, self.blocks, self.num_microbatches = size, blocks, num_microbatches
        self.work_s = _ranges([b.forward_s + b.backward_s for b in blocks], np.inf)
        self.fill_s = _ranges([b.forward_s for b in blocks], np.inf) if splits_backward else self.work_s
        self.time_s = self.work_s + np.array([0.0, *(b.transfer_s for b in blocks[1:]), 0.0])[:, None]
        self.once_s = _ranges([b.once_s for b in blocks])
        self.held_bytes = _ranges([b.held_bytes for b in blocks])
        self.activation_bytes = _ranges([b.activation_bytes for b in blocks])
        self._frontiers: dict[int, list[_Frontier]] = {}
        self._empty = _Frontier.empty()
        self._grown: dict[tuple[int, tuple[Again, ...]], _Frontier] = {}  # stages of blocks alike share theirs

    def priced(self, count: int, memory_bytes: float) -> tuple[Array, Array]:
        """Seconds per microbatch, and seconds counted into the maximum, with ``count`` microbatches in flight; infinite where
        the stage does not fit.
        """
        time = self.time_s.copy()
        lacking = self.held_bytes + count * self.activation_bytes - memory_bytes
        time[self.least_bytes(count) > memory_bytes * (1 + 1e-12)] = np.inf
        for start, stop in zip(*np.nonzero(np.isfinite(time) & (lacking > 0)), strict=True):
            time[start, stop] += self._frontier(start, stop).cost_of(lacking[start, stop] / count)
        counted = self.once_s.copy()
        if self.num_microbatches > 1:
            counted += (self.num_microbatches - 1) * time
        return time, counted

    def recomputed(self, start: int, stop: int, count: int, memory_bytes: float) -> tuple[tuple[int, int], ...]:
        """Which blocks of a stage are computed again so that it fits, and in which way."""
        lacking = self.held_bytes[start, stop] + count * self.activation_bytes[start, stop] - memory_bytes
        if lacking <= 0:
            return ()
        return tuple((start + index, way) for index, way in self._frontier(start, stop).chosen(lacking / count))

    def used_bytes(self, stage: Stage, count: int) -> float:
        """The bytes of one stage."""
        saved = sum(self.blocks[block].again[way].saved_bytes for block, way in stage.recomputed)
        start, stop = stage.start, stage.stop
        return float(self.held_bytes[start, stop] + count * (self.activation_bytes[start, stop] - saved))

    def least_bytes(self, count: int) -> Array:
        """The bytes of every stage with all blocks computed again, as far as they can be."""
        saved = _ranges([max((way.saved_bytes for way in block.again), default=0.0) for block in self.blocks])
        return np.where(np.isfinite(self.time_s), self.held_bytes + count * (self.activation_bytes - saved), np.inf)

    def _frontier(self, start: int, stop: int) -> _Frontier:
        frontiers = self._frontiers.setdefault(start, [self._empty])
        while len(frontiers) <= stop - start:
            last, block = frontiers[-1], self.blocks[start + len(frontiers) - 1]
            key = (id(last), block.again)
            if key not in self._grown:
                self._grown[key] = last.with_block(block)
            frontiers.append(self._grown[key])
        return frontiers[stop - start]


class _Frontier:
    """The Pareto points of computing some of the blocks again: bytes saved against seconds, both ascending.

    ``origin``: the point of ``before``, the frontier of one block less, that a point comes from; ``way``: in which way the last
    block is computed again, counted from 1, or 0.
    """

    def __init__(self, saved: Array, cost: Array, origin: Array, way: Array, before: _Frontier | None) -> None:
        self.saved, self.cost = saved, cost
        self._origin, self._way, self._before = origin, way, before

    @classmethod
    def empty(cls) -> _Frontier:
        """Of no blocks: nothing saved, nothing spent."""
        return cls(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1), None)

    def with_block(self, block: Block) -> _Frontier:
        """With one more block to choose or leave."""
        points = len(self.saved)
        saved = np.concatenate([self.saved, *(self.saved + way.saved_bytes for way in block.again)])
        cost = np.concatenate([self.cost, *(self.cost + way.time_s for way in block.again)])
        if len(saved) > FRONTIER_STEPS:
            step = saved.max() / FRONTIER_STEPS
            saved = np.floor(saved / step) * step
        order = np.lexsort((-saved, cost))
        best = np.maximum.accumulate(saved[order])
        kept = order[np.concatenate([[True], saved[order][1:] > best[:-1]])]
        return _Frontier(saved[kept], cost[kept], kept % points, kept // points, self)

    def cost_of(self, needed: float) -> float:
        """The least seconds that save so many bytes; infinite if nothing does."""
        index = self._point(needed)
        return float(self.cost[index]) if index < len(self.cost) else float("inf")

    def chosen(self, needed: float) -> list[tuple[int, int]]:
        """The blocks, by number, of the cheapest choice that saves so many bytes, each with its way."""
        index, frontier, ways = self._point(needed), self, []
        while frontier._before is not None:
            ways.append(int(frontier._way[index]))
            index, frontier = int(frontier._origin[index]), frontier._before
        return [(number, way - 1) for number, way in enumerate(reversed(ways)) if way]

    def _point(self, needed: float) -> int:
        return int(np.searchsorted(self.saved, needed * (1 - 1e-12)))


def _ranges(values: Sequence[float], empty: float = 0.0) -> Array:
    """[start, stop] -> the sum over the range; ``empty`` where there is nothing in it."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    table = sums[None, :] - sums[:, None]
    return np.where(np.triu(np.ones_like(table), 1) > 0, table, empty)


def _least_sum(
    menus: Sequence[_Menu], priced: Sequence[Sequence[tuple[Array, Array]]], num_devices: int, limit: float
) -> tuple[float, float, list[tuple[int, int, int]]] | None:
    """The least sum of stage times with no stage's counted seconds above ``limit``: ``(sum, largest counted, path)``.

    ``priced[place - 1][menu]``: the stages at that place from the end. The path is ``(start, stop, menu)`` from first to last.
    """
    num_blocks = len(menus[0].blocks) if menus else 0
    if not num_blocks:
        return None
    after = np.full((num_blocks + 1, num_devices + 1), np.inf)  # [block, devices left] -> seconds of the rest
    after[num_blocks, 0] = 0.0
    choices: list[Array] = []
    for listed in priced:
        best = np.full_like(after, np.inf)
        choice = np.full((*after.shape, 2), -1)
        for index, (menu, (time, counted)) in enumerate(zip(menus, listed, strict=True)):
            allowed = np.where(counted <= limit, time, np.inf)
            for left in range(menu.size, num_devices + 1):
                column = after[:, left - menu.size]
                if not np.isfinite(column).any():
                    continue
                sums = allowed + column[None, :]
                stops = sums.argmin(axis=1)
                values = sums[np.arange(len(sums)), stops]
                better = values < best[:, left]
                best[better, left] = values[better]
                choice[better, left, 0], choice[better, left, 1] = stops[better], index
        choices.append(choice)
        after = best
    if not np.isfinite(after[0, num_devices]):
        return None
    path, block, left, largest = [], 0, num_devices, 0.0
    for choice, listed in zip(reversed(choices), reversed(priced), strict=True):
        stop, index = (int(item) for item in choice[block, left])
        path.append((block, stop, index))
        largest = max(largest, float(listed[index][1][block, stop]))
        block, left = stop, left - menus[index].size
    return float(after[0, num_devices]), largest, path


def _bound(menus: Sequence[_Menu], num_devices: int, num_stages: int, num_microbatches: int) -> float:
    """What no split can avoid, memory and messages aside: the larger of the least ``max_k m w_k + u_k``, and the least
    ``max_k sum_{j<k} fill_j + m w_k`` (a stage's ``u_k`` comes while gradients go back through the stages before it).
    """
    work = [num_microbatches * menu.work_s for menu in menus]
    nothing = [np.where(np.isfinite(menu.work_s), 0.0, np.inf) for menu in menus]
    alone = _least_largest(
        menus, [own + menu.once_s for own, menu in zip(work, menus, strict=True)], nothing, num_devices, num_stages
    )
    return max(alone, _least_largest(menus, work, [menu.fill_s for menu in menus], num_devices, num_stages))


def _least_largest(
    menus: Sequence[_Menu], own: Sequence[Array], fill: Sequence[Array], num_devices: int, num_stages: int
) -> float:
    """The least over all splits of the largest ``sum_{j<k} fill_j + own_k``: by bisection, as the least sum of the stages
    before decides whether the next one keeps within a limit.
    """
    num_blocks = len(menus[0].blocks)

    def feasible(limit: float) -> bool:
        before = np.full((num_blocks + 1, num_devices + 1), np.inf)
        before[0, 0] = 0.0
        for _ in range(num_stages):
            following = np.full_like(before, np.inf)
            for menu, mine, filling in zip(menus, own, fill, strict=True):
                for used in range(num_devices - menu.size + 1):
                    start = before[:, used]
                    if np.isfinite(start).any():
                        sums = np.where(start[:, None] + mine <= limit, start[:, None] + filling, np.inf)
                        np.minimum(following[:, used + menu.size], sums.min(axis=0), out=following[:, used + menu.size])
            before = following
        return bool(np.isfinite(before[num_blocks, num_devices]))

    low, high = 0.0, 1.0
    while not feasible(high):
        low, high = high, 2 * high
        if high > 1e15:
            return float("inf")
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if feasible(middle):
            high = middle
        else:
            low = middle
    return low


def _least_memory(menus: Sequence[_Menu], places: Sequence[int], num_devices: int) -> float:
    """The least over all splits of what the fullest device needs."""
    tables = [[menu.least_bytes(count) for menu in menus] for count in places]
    sizes = sorted(set(itertools.chain.from_iterable(t[np.isfinite(t)].tolist() for listed in tables for t in listed)))
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        priced = [[(np.where(np.isfinite(table), 0.0, np.inf), table) for table in listed] for listed in tables]
        if _least_sum(menus, priced, num_devices, sizes[middle]) is not None:
            high = middle
        else:
            low = middle + 1
    return sizes[low] if low < len(sizes) else float("inf")
