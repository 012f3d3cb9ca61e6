"""What no split into stages can avoid on a schedule, whose actions wait for one another and share
the positions.

Actions that wait for one another form chains; a chain and what its last position does once per step
take as long as they take, whatever else there is. So a step takes no less than any average of
chains. And at every moment a position holds no more than its memory: so it costs nothing to add to
an average, for some moments, a price times what its stages hold too much together, which is never
more than 0. What an average takes with these prices is a sum over stages, each with the best for it
of what it may compute again: the split for which it is least is a shortest path, and no split that
fits takes less.

The average and the prices that say most are one side of a game, whose other side averages splits,
within the memory: to the chains the longest ones for the average of splits are added, to the splits
the best one against the average of chains, until neither side gains.

**Stages left out.** A bound is only wanted up to some seconds. No split below that has a stage with
which all splits take longer by some average with its prices: the best of them is a shortest path to
where the stage begins, the stage, and one from its end. Such stages are left out, and so of
averages of splits, too. That matters most where stages may differ: an average may give every stage
the most devices in turn, with nearly all blocks, and none of these splits is any good.

**Memory.** Of each stage alone what it has to compute again is a knapsack, as if all of the
position were its own (``frontier.py``). Of the stages of one position together it is relaxed by the
prices: of a stage then counts the convex hull of what its blocks can save for some time, from where
that knapsack lets it begin. What a position holds is taken at the moments at which its stages have
all gradients (:func:`~shardwright.compiler.schedule.live_microbatches.held_together`, in any case).

Between this bound and the best split lies what an average of splits takes less than each of them
(blocks do not come in fractions), and messages, which count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver.python import model_builder

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.live_microbatches import held_together
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.waits import run_order, waits_of
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.stage_costs import StageCosts, ranges
from shardwright.runtime.schedule_actions import ActionKind

MAX_ROUNDS = 120
"""How many splits are looked at for one bound."""

ADDED = 4
"""How many chains are added in a round, the longest of those that end at different positions."""

OVER = 1e-9
"""The share of its memory by which a position may be over for an average to fit."""

PENALTY = 10.0
"""The price of not fitting, for averages: how many times the longest chain it costs to need as much
memory again as a position has.
"""

MAX_HULLS = 4_000_000
"""How many numbers may be kept of what stages can save for some time. Where it were more, all that
can be saved is free as soon as a stage has to compute something again.
"""

NEAR = 1e-3
"""The game is over once the bound is that near to what is left to gain, relative to it."""

WORTH = 0.2
"""Stages to be left out are looked for in every round as long as that share of them is; else in
half as many rounds as before.
"""

NUM_PARTS = 6
FORWARD, INPUT, WEIGHT, ONCE, HELD, KEPT = range(NUM_PARTS)
"""What a stage has: seconds of forwards, of the two parts of backwards, and of what comes once per
step; shares of the memory of a position that it holds, and that it keeps of a microbatch.
"""

PARTS = {
    ActionKind.FORWARD: (FORWARD,),
    ActionKind.BACKWARD: (INPUT, WEIGHT),
    ActionKind.INPUT_GRADIENT: (INPUT,),
    ActionKind.WEIGHT_GRADIENT: (WEIGHT,),
}
"""The parts that an action consists of."""

KINDS = tuple(PARTS)


class Least:
    """The least that any stage of one placement can have, ``[start, stop]`` over blocks.

    Args:
        tables: of the placement.
        relief_s: ``[start, stop, side]``, at most 0: what boundaries can save in the forward and in
            the backward.
        inputs_s: by block, of its backward the gradients of what its stage gets, at least.
        counts: by stage, the microbatches in flight.
        memory_bytes: what a position may take.
    """

    def __init__(
        self,
        tables: StageCosts,
        relief_s: Array,
        inputs_s: Sequence[float],
        counts: Sequence[int],
        memory_bytes: float,
    ) -> None:
        some = np.isfinite(tables.work_s)
        self.num_blocks, self.num_devices = len(tables.blocks), tables.num_devices
        self.forward_s = np.maximum(np.where(some, tables.forward_s, 0.0) + relief_s[..., 0], 0.0)
        self.backward_s = np.maximum(np.where(some, tables.backward_s, 0.0) + relief_s[..., 1], 0.0)
        self.input_s = np.minimum(
            np.maximum(ranges(inputs_s) + relief_s[..., 1], 0.0), self.backward_s
        )
        self.once_s = tables.once_s
        self.held, self.kept = (
            tables.held_bytes / memory_bytes,
            tables.activation_bytes / memory_bytes,
        )
        self._again_s, self._saved = _ways(tables, memory_bytes)
        again = {
            count: tables.again_s(count, memory_bytes, least=True)
            for count in dict.fromkeys(counts)
        }
        self.fits = [some & np.isfinite(again[count]) for count in counts]
        first = {
            count: np.where(np.isfinite(seconds), seconds, 0.0) for count, seconds in again.items()
        }
        saved = {count: self._saved_for(seconds) for count, seconds in first.items()}
        self.first = [(first[count], saved[count]) for count in counts]

    def priced(self, stage: int, counts: Array) -> Array:
        """What the parts of a stage take at least, ``counts`` of each; infinite where it does not
        fit.
        """
        forwards, inputs, weights, once, held, kept = counts.tolist()
        whole = (
            min(inputs, weights) * self.backward_s
            + self._more(stage, inputs, weights) * self.input_s
        )
        first_s, first_saved = self.first[stage]
        time_s, saved = (ranges(amounts) for amounts in self._best(inputs, kept))
        again = inputs * (self.backward_s + np.maximum(time_s, first_s)) - kept * np.maximum(
            saved, first_saved
        )
        # One with something computed again is not split.
        backward = np.where(first_s > 0, again, np.minimum(whole, again))
        rest = forwards * self.forward_s + once * self.once_s + held * self.held + kept * self.kept
        return np.where(self.fits[stage], rest + backward, np.inf)

    def amounts(self, stage: int, span: tuple[int, int], counts: Array) -> list[float]:
        """What a stage has of every part behind its price."""
        _, inputs, weights, _, _, kept = counts.tolist()
        backward_s, first_s, first_saved = (
            float(of[span]) for of in (self.backward_s, *self.first[stage])
        )
        time_s, saved = (float(amounts[slice(*span)].sum()) for amounts in self._best(inputs, kept))
        time_s, saved = max(time_s, first_s), max(saved, first_saved)
        input_s = float(self.input_s[span]) if stage else 0.0
        whole = min(inputs, weights) * backward_s + max(0.0, inputs - weights) * input_s
        if not first_s and whole <= inputs * (backward_s + time_s) - kept * saved:
            time_s, saved = 0.0, 0.0
            input_s = input_s if inputs >= weights else backward_s
        else:
            input_s = backward_s + time_s
        once = float(self.once_s[span]), float(self.held[span]), float(self.kept[span]) - saved
        return [float(self.forward_s[span]), input_s, backward_s + time_s - input_s, *once]

    def _best(self, inputs: float, kept: float) -> tuple[Array, Array]:
        """The seconds of the way to compute each block again that is best at these prices, or of
        none, and what it saves.
        """
        best = (inputs * self._again_s - kept * self._saved).argmin(axis=1)
        blocks = np.arange(self.num_blocks)
        return self._again_s[blocks, best], self._saved[blocks, best]

    def _saved_for(self, seconds: Array) -> Array:
        """The most that every stage saves in so many seconds, where blocks may be computed again by
        fractions.
        """
        segments = [
            _hull(times, saved) for times, saved in zip(self._again_s, self._saved, strict=True)
        ]
        rates = sorted({rate for listed in segments for rate, _, _ in listed})
        if not seconds.any():
            return np.zeros_like(seconds)
        most: Array = ranges(self._saved.max(axis=1))
        if len(rates) * seconds.size > MAX_HULLS:
            return np.where(seconds > 0, most, 0.0)
        left, found = seconds.copy(), np.zeros_like(seconds)
        for rate in rates:
            own = [
                [(time, saved) for other, time, saved in listed if other == rate]
                for listed in segments
            ]
            time_s, saved = (
                ranges([sum(each[part] for each in listed) for listed in own]) for part in range(2)
            )
            share = np.divide(left, time_s, out=np.ones_like(left), where=time_s > 0)
            share = np.minimum(share, 1.0)
            found += share * saved
            left = left - share * time_s
        return found

    def _more(self, stage: int, inputs: float, weights: float) -> float:
        """How often gradients of what a stage gets are computed beside those of its weights; the
        first gets nothing.
        """
        return max(0.0, inputs - weights) if stage else 0.0


def _ways(tables: StageCosts, memory_bytes: float) -> tuple[Array, Array]:
    """``[block, way]``: seconds, and the share of the memory saved; the first way is to compute
    nothing again.
    """
    number = max((len(block.again) for block in tables.blocks), default=0)
    time_s, saved = np.zeros((2, len(tables.blocks), number + 1))
    for index, block in enumerate(tables.blocks):
        for way, again in enumerate(block.again, start=1):
            time_s[index, way], saved[index, way] = again.time_s, again.saved_bytes / memory_bytes
    return time_s, saved


def _hull(times: Array, saved: Array) -> list[tuple[float, float, float]]:
    """The ways of one block that are best by fractions, from nothing saved on: seconds per share of
    the memory, ascending, and how many of both.
    """
    found: list[tuple[float, float, float]] = []
    time, share = 0.0, 0.0
    while (further := saved > share).any():
        rates = np.where(further, (times - time) / np.where(further, saved - share, 1.0), np.inf)
        best = int(np.lexsort((-saved, rates))[0])
        found.append((float(rates[best]), float(times[best] - time), float(saved[best] - share)))
        time, share = float(times[best]), float(saved[best])
    return found


class Chains:
    """The chains of actions of a schedule. ``moments``: ``[stage, part]``, how often each is there
    of what a position holds at once, of positions with several stages.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_stages = schedule.num_stages
        waits = waits_of(schedule, Dataflow.chain(schedule.num_stages))
        before: dict[
            tuple[int, int], list[tuple[int, int]]
        ] = {}  # by rank and index, the actions that one waits for
        levels: dict[
            tuple[int, int], int
        ] = {}  # how many come one after the other before an action
        for rank, index in run_order(schedule, waits):
            before[rank, index] = [*waits[rank][index], *([(rank, index - 1)] if index else [])]
            levels[rank, index] = max(
                (levels[place] + 1 for place in before[rank, index]), default=0
            )
        numbers = {
            place: number
            for number, place in enumerate(sorted(levels, key=lambda place: levels[place]))
        }
        actions = [schedule.actions[rank][index] for rank, index in numbers]
        nothing, most = len(actions), max(map(len, before.values()))
        self._edges = np.searchsorted(
            sorted(levels.values()), range(max(levels.values()) + 2)
        ).tolist()  # between levels
        self._before = np.array(  # [action, ...]: numbers, or that of nothing
            [
                [*(numbers[other] for other in before[place]), *[nothing] * most][:most]
                for place in numbers
            ]
        )
        self._stages, self._kinds = (
            np.array(listed)
            for listed in zip(*((a.stage, KINDS.index(a.kind)) for a in actions), strict=True)
        )
        self.moments = _moments(schedule)
        self._last = [
            (numbers[rank, len(own) - 1], schedule.stages_of(rank))
            for rank, own in enumerate(schedule.actions)
        ]

    def longest(self, times: Array) -> list[tuple[float, Array]]:
        """The longest chain that ends at each position: its seconds, and ``[stage, part]`` how
        often it has each. ``times``: ``[stage, part]``, of one microbatch, or once.
        """
        seconds = np.stack([times[:, list(PARTS[kind])].sum(axis=1) for kind in KINDS], axis=1)[
            self._stages, self._kinds
        ]
        ends = np.zeros(len(seconds) + 1)
        for level in map(slice, self._edges, self._edges[1:]):
            ends[level] = ends[self._before[level]].max(axis=1) + seconds[level]
        origins = np.take_along_axis(
            self._before, ends[self._before].argmax(axis=1)[:, None], axis=1
        )[:, 0].tolist()
        found = []
        for number, stages in self._last:
            length = float(ends[number] + times[list(stages), ONCE].sum())
            chain = []
            while number < len(origins):
                chain.append(number)
                number = origins[number]
            often = np.bincount(
                self._stages[chain] * len(KINDS) + self._kinds[chain],
                minlength=self.num_stages * len(KINDS),
            )
            counts = np.zeros((self.num_stages, NUM_PARTS))
            counts[list(stages), ONCE] = 1.0
            for kind, column in zip(KINDS, often.reshape(self.num_stages, -1).T, strict=True):
                counts[:, list(PARTS[kind])] += column[:, None]
            found.append((length, counts))
        return found


def _moments(schedule: Schedule) -> list[Array]:
    found = []
    for rank, moments in enumerate(held_together(schedule, in_any_case=True)):
        stages = list(schedule.stages_of(rank))
        for moment in moments if len(stages) > 1 else ():
            counts = np.zeros((schedule.num_stages, NUM_PARTS))
            counts[stages, HELD], counts[stages, KEPT] = 1.0, moment
            found.append(counts)
    return found


Path = tuple[tuple[int, int, int], ...]
"""A split: of each stage, from the first, the number of its placement, and the blocks at which it
starts and stops.
"""


@dataclass(frozen=True)
class _Paths:
    """What splits take, so many of each part of a stage counted. ``prices``: by stage and
    placement, ``[start, stop]``.
    ``before``: by stage, ``[lots used, block]``, the least of all stages before it; the last is of
    all. ``least_s``: the least of all splits, infinite where there are none; ``best``: the split
    that has it.
    """

    prices: list[list[Array]]
    before: list[Array]
    least_s: float
    best: Path


class _Splits:
    """The splits that are looked for: their stages have some of the placements and take so many
    devices, which are dealt out in lots. ``may_have``: by stage and placement, ``[start, stop]``.
    """

    def __init__(self, placements: Sequence[Least], num_devices: int, num_stages: int) -> None:
        unit = math.gcd(num_devices, *(least.num_devices for least in placements))
        self.placements, self.num_blocks = placements, placements[0].num_blocks
        self.num_lots, self.sizes = (
            num_devices // unit,
            [least.num_devices // unit for least in placements],
        )
        self.may_have = [[least.fits[stage] for least in placements] for stage in range(num_stages)]

    def priced(self, counts: Array) -> _Paths:
        """``counts``: ``[stage, part]``."""
        columns = np.arange(self.num_blocks + 1)
        prices, befores, origins = [], [self._nothing((0, 0))], []
        for stage, (own, masks) in enumerate(zip(counts, self.may_have, strict=True)):
            prices.append(
                [
                    np.where(mask, least.priced(stage, own), np.inf)
                    for least, mask in zip(self.placements, masks, strict=True)
                ]
            )
            before, after = befores[-1], self._nothing()
            origin = np.zeros((*before.shape, 2), dtype=int)  # placement, block
            for index, used in self._places(before):
                sums = before[used][:, None] + prices[-1][index]
                starts = sums.argmin(axis=0)
                values, stop = sums[starts, columns], used + self.sizes[index]
                better = values < after[stop]
                after[stop][better] = values[better]
                origin[stop][better] = np.column_stack([np.full_like(starts, index), starts])[
                    better
                ]
            befores.append(after)
            origins.append(origin)
        least_s = float(befores[-1][-1, -1])
        return _Paths(prices, befores, least_s, self._read(origins) if np.isfinite(least_s) else ())

    def _read(self, origins: Sequence[Array]) -> Path:
        used, stop, found = self.num_lots, self.num_blocks, []
        for origin in reversed(origins):
            index, start = origin[used, stop].tolist()
            found.append((index, start, stop))
            used, stop = used - self.sizes[index], start
        return tuple(found[::-1])

    def leave_out(self, paths: _Paths, above_s: float) -> float:
        """Leave out the stages of which every split takes more; the share that they are of those
        before.
        """
        after, known, left = self._nothing((-1, -1)), 0, 0
        for stage in reversed(range(len(self.may_have))):
            before, further = paths.before[stage], self._nothing()
            least = [np.full_like(prices, np.inf) for prices in paths.prices[stage]]
            for index, used in self._places(before):
                sums = paths.prices[stage][index] + after[used + self.sizes[index]]
                np.minimum(further[used], sums.min(axis=1), out=further[used])
                np.minimum(least[index], before[used][:, None] + sums, out=least[index])
            known += sum(int(mask.sum()) for mask in self.may_have[stage])
            self.may_have[stage] = [own <= above_s for own in least]
            left += sum(int(mask.sum()) for mask in self.may_have[stage])
            after = further
        return 1 - left / max(1, known)

    def has(self, path: Path) -> bool:
        """Whether no stage of a split is left out."""
        return all(
            masks[index][start, stop]
            for masks, (index, start, stop) in zip(self.may_have, path, strict=True)
        )

    def amounts(self, path: Path, counts: Array) -> Array:
        """``[stage, part]``: what the stages of a split have, so much of each counted."""
        stages = zip(path, counts, strict=True)
        return np.array(
            [
                self.placements[index].amounts(k, (start, stop), own)
                for k, ((index, start, stop), own) in enumerate(stages)
            ]
        )

    def _nothing(self, reached: tuple[int, int] | None = None) -> Array:
        """``[lots used, block]``: infinite, but 0 for what is reached."""
        found = np.full((self.num_lots + 1, self.num_blocks + 1), np.inf)
        if reached is not None:
            found[reached] = 0.0
        return found

    def _places(self, before: Array) -> list[tuple[int, int]]:
        """``(placement, lots used)`` of the stages that may come next."""
        reached = np.flatnonzero(np.isfinite(before).any(axis=1)).tolist()
        return [
            (index, used)
            for index, size in enumerate(self.sizes)
            for used in reached
            if used + size <= self.num_lots
        ]


@dataclass
class _Game:
    """The chains and the splits so far, as paths too, and in which shares they are ``mixed``.
    ``moments``: that must fit.
    """

    moments: list[Array]
    chains: list[Array] = field(default_factory=list)
    splits: list[Array] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    mixed: Array = field(default_factory=lambda: np.zeros(0))

    def add(self, path: Path, split: Array) -> None:
        """A split, of which the average has nothing yet, if it is not the only one."""
        self.paths.append(path)
        self.splits.append(split)
        self.mixed = np.append(self.mixed, 0.0 if self.mixed.any() else 1.0)

    def keep(self, splits: _Splits) -> bool:
        """Only the splits that are looked for still; whether there were others."""
        kept = [index for index, path in enumerate(self.paths) if splits.has(path)]
        if len(kept) == len(self.paths):
            return False
        self.paths, self.splits = (
            [self.paths[index] for index in kept],
            [self.splits[index] for index in kept],
        )
        mixed = self.mixed[kept]
        self.mixed = mixed / mixed.sum() if mixed.any() else mixed
        return True

    def average(self) -> Array:
        """``[stage, part]``: of the splits."""
        return np.tensordot(self.mixed, np.array(self.splits), axes=1)

    def solve(self) -> tuple[Array, float, bool] | None:
        """Mix what is there so that neither side can better it: what the parts of each stage count
        in the average of chains with the prices of memory, and these prices together; and whether
        the average of splits fits. There always is such a pair; None where rounding keeps the
        solver from it.
        """
        table, held = (
            np.tensordot(np.array(rows), np.array(self.splits), axes=((1, 2), (1, 2)))
            if rows
            else np.zeros((0, 0))
            for rows in (self.chains, self.moments)
        )
        scale = float(table.max()) or 1.0
        held[np.abs(held) < OVER] = (
            0.0  # what rounding left of all that is saved would lead the solver astray
        )
        model, sum_of = model_builder.Model(), model_builder.LinearExpr.weighted_sum
        shares = [model.new_var(0.0, 1.0, False, f"s{index}") for index in range(len(self.splits))]
        longest, over = (
            model.new_var(0.0, 1.0, False, "longest"),
            model.new_var(0.0, np.inf, False, "over"),
        )
        waits = [
            model.add(sum_of([longest, *shares], [1.0, *(-row / scale)]) >= 0.0) for row in table
        ]
        limits = [model.add(sum_of([over, *shares], [1.0, *(-row)]) >= -1.0) for row in held]
        model.add(model_builder.LinearExpr.sum(shares) == 1.0)
        model.minimize(longest + PENALTY * over)
        solver = model_builder.Solver("glop")
        if solver.solve(model) != model_builder.SolveStatus.OPTIMAL:
            return None
        weights = np.maximum([solver.dual_value(row) for row in waits], 0.0)
        prices = scale * np.maximum([solver.dual_value(row) for row in limits], 0.0) / weights.sum()
        counts = np.tensordot(weights / weights.sum(), np.array(self.chains), axes=1)
        if len(prices):
            counts = counts + np.tensordot(prices, np.array(self.moments), axes=1)
        mixed = np.maximum([solver.value(share) for share in shares], 0.0)
        self.mixed = mixed / mixed.sum()
        return counts, float(prices.sum()), solver.value(over) <= OVER


def least_step_s(
    chains: Chains,
    placements: Sequence[Least],
    num_devices: int,
    enough_s: float,
    is_over: Callable[[], bool] = lambda: False,
) -> float:
    """Seconds that no split takes less than whose stages have some of the placements and take so
    many devices; infinite if none fits. No better bound is looked for than ``enough_s``, or once
    time is over.
    """
    splits = _Splits(placements, num_devices, chains.num_stages)
    counts = np.ones((chains.num_stages, NUM_PARTS))
    counts[:, [HELD, KEPT]] = 0.0
    paths = splits.priced(counts)
    if paths.least_s == float("inf"):
        return float("inf")
    game, bound = _Game(chains.moments), 0.0
    game.add(paths.best, splits.amounts(paths.best, counts))
    least, fits = float("inf"), not chains.moments  # of the averages that fit, the longest chain
    pause, left = 1, 1  # rounds between those that leave out stages, and until the next
    most_s = float("inf")  # of splits that take less, none is left out
    for _ in range(MAX_ROUNDS):
        found = chains.longest(game.average())
        if fits:
            least = min(least, max(length for length, _ in found))
        if least <= bound * (1 + NEAR) or is_over():
            break
        longest = sorted(found, key=lambda item: -item[0])[:ADDED]
        game.chains += [counts for _, counts in longest]
        solved = game.solve()
        if solved is None:
            break
        counts, prices, fits = solved
        paths = splits.priced(counts)
        bound = max(bound, paths.least_s - prices)
        if bound >= enough_s:
            break
        left -= 1
        if left == 0 and enough_s < float("inf"):
            most_s = enough_s
            pause = (
                1 if splits.leave_out(paths, enough_s * (1 + OVER) + prices) >= WORTH else 2 * pause
            )
            left = pause
            if game.keep(splits):
                least, fits = float("inf"), not chains.moments
        game.add(paths.best, splits.amounts(paths.best, counts))
    return min(bound, most_s)
