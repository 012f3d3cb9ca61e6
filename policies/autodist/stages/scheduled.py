"""What no split into stages can avoid on a schedule, whose actions wait for one another and share the positions.

Actions that wait for one another form chains; a chain and what its last position does once per step take as long as they take,
whatever else there is. So a step takes no less than any average of chains. And at every moment a position holds no more than
its memory: so it costs nothing to add to an average, for some moments, a price times what its stages hold too much together,
which is never more than 0. What an average takes with these prices is a sum over stages, each with the best for it of what it
may compute again: the split for which it is least is a shortest path, and no split that fits takes less.

The average and the prices that say most are one side of a game, whose other side averages splits, within the memory: to the
chains the longest ones for the average of splits are added, to the splits the best one against the average of chains, until
neither side gains.

**Memory.** Of each stage alone what it has to compute again is a knapsack, as if all of the position were its own
(``frontier.py``). Of the stages of one position together it is relaxed by the prices: of a stage then counts the convex hull of
what its blocks can save for some time, from where that knapsack lets it begin. What a position holds is taken at the moments
at which its stages have all gradients (:func:`~shardwright.compiler.schedule.memory.held_together`, in any case).

Between this bound and the best split lies what an average of splits takes less than each of them (blocks do not come in
fractions), and messages, which count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver.python import model_builder

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.memory import held_together
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.waits import run_order, waits_of
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.menu import Tables, ranges
from shardwright.runtime.schedule import ActionKind

MAX_ROUNDS = 120
"""How many splits are looked at for one bound."""

OVER = 1e-9
"""By how much of its memory a position may be over for an average to fit."""

PENALTY = 10.0
"""Of averages that do not fit: how many times the longest chain it costs to need as much memory again as a position has."""

MAX_HULLS = 4_000_000
"""How many numbers may be kept of what stages can save for some time. Where it were more, all that can be saved is free as soon
as a stage has to compute something again.
"""

NEAR = 1e-3
"""The game is over once the bound is that near to what is left to gain, relative to it."""

NUM_PARTS = 6
FORWARD, INPUT, WEIGHT, ONCE, HELD, KEPT = range(NUM_PARTS)
"""What a stage has: seconds of forwards, of the two parts of backwards, and of what comes once per step; shares of the memory
of a position that it holds, and that it keeps of a microbatch.
"""

PARTS = {
    ActionKind.FORWARD: (FORWARD,),
    ActionKind.BACKWARD: (INPUT, WEIGHT),
    ActionKind.INPUT_GRADIENT: (INPUT,),
    ActionKind.WEIGHT_GRADIENT: (WEIGHT,),
}
"""The parts that an action consists of."""


class Least:
    """The least that any stage of one placement can have, ``[start, stop]`` over blocks.

    Args:
        tables: of the placement.
        relief_s: ``[start, stop, side]``, at most 0: what boundaries can save in the forward and in the backward.
        inputs_s: by block, of its backward the gradients of what its stage gets, at least.
        counts: by stage, the microbatches in flight.
        memory_bytes: what a position may take.
    """

    def __init__(
        self, tables: Tables, relief_s: Array, inputs_s: Sequence[float], counts: Sequence[int], memory_bytes: float
    ) -> None:
        some = np.isfinite(tables.work_s)
        self.num_blocks, self.num_devices = len(tables.blocks), tables.num_devices
        self.forward_s = np.maximum(np.where(some, tables.forward_s, 0.0) + relief_s[..., 0], 0.0)
        self.backward_s = np.maximum(np.where(some, tables.backward_s, 0.0) + relief_s[..., 1], 0.0)
        self.input_s = np.minimum(np.maximum(ranges(inputs_s) + relief_s[..., 1], 0.0), self.backward_s)
        self.once_s = tables.once_s
        self.held, self.kept = tables.held_bytes / memory_bytes, tables.activation_bytes / memory_bytes
        self._again_s, self._saved = _ways(tables, memory_bytes)
        again = {count: tables.again_s(count, memory_bytes, least=True) for count in dict.fromkeys(counts)}
        self.fits = [some & np.isfinite(again[count]) for count in counts]
        first = {count: np.where(np.isfinite(seconds), seconds, 0.0) for count, seconds in again.items()}
        saved = {count: self._saved_for(seconds) for count, seconds in first.items()}
        self.first = [(first[count], saved[count]) for count in counts]

    def priced(self, stage: int, counts: Array) -> Array:
        """What the parts of a stage take at least, ``counts`` of each; infinite where it does not fit."""
        forwards, inputs, weights, once, held, kept = counts.tolist()
        whole = min(inputs, weights) * self.backward_s + self._more(stage, inputs, weights) * self.input_s
        first_s, first_saved = self.first[stage]
        time_s, saved = (ranges(amounts) for amounts in self._best(inputs, kept))
        again = inputs * (self.backward_s + np.maximum(time_s, first_s)) - kept * np.maximum(saved, first_saved)
        backward = np.where(first_s > 0, again, np.minimum(whole, again))  # one with something computed again is not split
        rest = forwards * self.forward_s + once * self.once_s + held * self.held + kept * self.kept
        return np.where(self.fits[stage], rest + backward, np.inf)

    def amounts(self, stage: int, span: tuple[int, int], counts: Array) -> list[float]:
        """What a stage has of every part behind its price."""
        _, inputs, weights, _, _, kept = counts.tolist()
        backward_s, first_s, first_saved = (float(of[span]) for of in (self.backward_s, *self.first[stage]))
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
        """By block the seconds of the way to compute it again that is best at these prices, or of none, and what it saves."""
        best = (inputs * self._again_s - kept * self._saved).argmin(axis=1)
        blocks = np.arange(self.num_blocks)
        return self._again_s[blocks, best], self._saved[blocks, best]

    def _saved_for(self, seconds: Array) -> Array:
        """The most that every stage saves in so many seconds, where blocks may be computed again by fractions."""
        segments = [_hull(times, saved) for times, saved in zip(self._again_s, self._saved, strict=True)]
        rates = sorted({rate for listed in segments for rate, _, _ in listed})
        if not seconds.any():
            return np.zeros_like(seconds)
        most: Array = ranges(self._saved.max(axis=1))
        if len(rates) * seconds.size > MAX_HULLS:
            return np.where(seconds > 0, most, 0.0)
        left, found = seconds.copy(), np.zeros_like(seconds)
        for rate in rates:
            own = [[(time, saved) for other, time, saved in listed if other == rate] for listed in segments]
            time_s, saved = (ranges([sum(each[part] for each in listed) for listed in own]) for part in range(2))
            share = np.divide(left, time_s, out=np.ones_like(left), where=time_s > 0)
            share = np.minimum(share, 1.0)
            found += share * saved
            left = left - share * time_s
        return found

    def _more(self, stage: int, inputs: float, weights: float) -> float:
        """How often gradients of what a stage gets are computed beside those of its weights; the first gets nothing."""
        return max(0.0, inputs - weights) if stage else 0.0


def _ways(tables: Tables, memory_bytes: float) -> tuple[Array, Array]:
    """``[block, way]``: seconds, and the share of the memory saved; the first way is to compute nothing again."""
    number = max((len(block.again) for block in tables.blocks), default=0)
    time_s, saved = np.zeros((2, len(tables.blocks), number + 1))
    for index, block in enumerate(tables.blocks):
        for way, again in enumerate(block.again, start=1):
            time_s[index, way], saved[index, way] = again.time_s, again.saved_bytes / memory_bytes
    return time_s, saved


def _hull(times: Array, saved: Array) -> list[tuple[float, float, float]]:
    """From nothing saved on, what of the ways of one block is best by fractions: seconds per share of the memory, ascending,
    and how many of both.
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
    """The chains of actions of a schedule. ``moments``: ``[stage, part]``, how often each is there of what a position holds at
    once, of positions with several stages.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_stages = schedule.num_stages
        waits = waits_of(schedule, Dataflow.chain(schedule.num_stages))
        numbers: dict[tuple[int, int], int] = {}
        self._actions: list[tuple[int, tuple[int, ...], list[int]]] = []  # stage, parts, what it waits for
        for rank, index in run_order(schedule, waits):
            action = schedule.actions[rank][index]
            before = [numbers[place] for place in waits[rank][index]]
            before += [numbers[rank, index - 1]] if index else []
            numbers[rank, index] = len(self._actions)
            self._actions.append((action.stage, PARTS[action.kind], before))
        self.moments = _moments(schedule)
        self._last = [(numbers[rank, len(own) - 1], schedule.stages_of(rank)) for rank, own in enumerate(schedule.actions)]

    def longest(self, times: Array) -> list[tuple[float, Array]]:
        """By position the longest chain that ends there: its seconds, and ``[stage, part]`` how often it has each. ``times``:
        ``[stage, part]``, of one microbatch, or once.
        """
        seconds = {parts: times[:, list(parts)].sum(axis=1).tolist() for parts in PARTS.values()}
        ends, origins = [0.0] * len(self._actions), [-1] * len(self._actions)
        for number, (stage, parts, before) in enumerate(self._actions):
            begin = 0.0
            for other in before:
                if ends[other] > begin:
                    begin, origins[number] = ends[other], other
            ends[number] = begin + seconds[parts][stage]
        found = []
        for number, stages in self._last:
            counts = np.zeros((self.num_stages, NUM_PARTS))
            counts[list(stages), ONCE] = 1.0
            length = ends[number] + float(times[list(stages), ONCE].sum())
            while number >= 0:
                stage, parts, _ = self._actions[number]
                counts[stage, list(parts)] += 1.0
                number = origins[number]
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


@dataclass
class _Game:
    """The chains and the splits so far. ``moments``: that must fit."""

    moments: list[Array]
    chains: list[Array] = field(default_factory=list)
    splits: list[Array] = field(default_factory=list)

    def solved(self) -> tuple[Array, float, Array, bool] | None:
        """What neither side can better with what is there: what the parts of each stage count in the average of chains with the
        prices of memory, and these prices together; the shares of splits; and whether their average fits. There always is
        such a pair; None where rounding keeps the solver from it.
        """
        table, held = (
            np.tensordot(np.array(rows), np.array(self.splits), axes=((1, 2), (1, 2))) if rows else np.zeros((0, 0))
            for rows in (self.chains, self.moments)
        )
        scale = float(table.max()) or 1.0
        held[np.abs(held) < OVER] = 0.0  # what rounding left of all that is saved would lead the solver astray
        model, sum_of = model_builder.Model(), model_builder.LinearExpr.weighted_sum
        shares = [model.new_var(0.0, 1.0, False, f"s{index}") for index in range(len(self.splits))]
        longest, over = model.new_var(0.0, 1.0, False, "longest"), model.new_var(0.0, np.inf, False, "over")
        waits = [model.add(sum_of([longest, *shares], [1.0, *(-row / scale)]) >= 0.0) for row in table]
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
        return counts, float(prices.sum()), mixed / mixed.sum(), solver.value(over) <= OVER


def least_step_s(
    chains: Chains,
    placements: Sequence[Least],
    num_devices: int,
    enough_s: float,
    is_over: Callable[[], bool] = lambda: False,
) -> float:
    """Seconds that no split takes less than whose stages have some of the placements and take so many devices; infinite if none
    fits. No better bound is looked for than ``enough_s``, or once time is over.
    """
    counts = np.ones((chains.num_stages, NUM_PARTS))
    counts[:, [HELD, KEPT]] = 0.0
    bound, split = _shortest(placements, num_devices, counts)
    if bound == float("inf"):
        return bound
    game, mixed, bound = _Game(chains.moments, splits=[split]), np.ones(1), 0.0
    least, fits = float("inf"), not chains.moments  # of the averages that fit, the longest chain
    for _ in range(MAX_ROUNDS):
        found = chains.longest(np.tensordot(mixed, np.array(game.splits), axes=1))
        if fits:
            least = min(least, max(length for length, _ in found))
        if least <= bound * (1 + NEAR) or is_over():
            break
        game.chains += [counts for _, counts in found]
        solved = game.solved()
        if solved is None:
            break
        counts, prices, mixed, fits = solved
        seconds, split = _shortest(placements, num_devices, counts)
        bound = max(bound, seconds - prices)
        if bound >= enough_s:
            break
        game.splits.append(split)
        mixed = np.append(mixed, 0.0)
    return bound


def _shortest(placements: Sequence[Least], num_devices: int, counts: Array) -> tuple[float, Array]:
    """The split whose stages take least, so many of each part: their sum, and ``[stage, part]`` what each has."""
    unit = math.gcd(num_devices, *(least.num_devices for least in placements))
    num_lots, sizes = num_devices // unit, [least.num_devices // unit for least in placements]
    num_blocks = placements[0].num_blocks
    before = np.full((num_lots + 1, num_blocks + 1), np.inf)  # [lots used, block]
    before[0, 0] = 0.0
    origins = []
    for stage, own in enumerate(counts):
        after, origin = np.full_like(before, np.inf), np.zeros((*before.shape, 2), dtype=int)  # placement, block
        for index, (least, size) in enumerate(zip(placements, sizes, strict=True)):
            prices = least.priced(stage, own)
            for used in np.flatnonzero(np.isfinite(before[: num_lots - size + 1]).any(axis=1)).tolist():
                sums = before[used][:, None] + prices
                starts = sums.argmin(axis=0)
                values = sums[starts, np.arange(num_blocks + 1)]
                better = values < after[used + size]
                after[used + size][better] = values[better]
                origin[used + size][better] = np.column_stack([np.full(num_blocks + 1, index), starts])[better]
        before = after
        origins.append(origin)
    used, stop, amounts = num_lots, num_blocks, []
    if not np.isfinite(before[used, stop]):
        return float("inf"), np.zeros_like(counts)
    for stage in reversed(range(len(counts))):
        index, begin = origins[stage][used, stop].tolist()
        amounts.append(placements[index].amounts(stage, (begin, stop), counts[stage]))
        used, stop = used - sizes[index], begin
    return float(before[-1, -1]), np.array(amounts[::-1])
