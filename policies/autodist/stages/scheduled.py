"""What no split into stages can avoid on a schedule, whose actions wait for one another and share the positions.

Actions that wait for one another form chains; a chain and what its last position does once per step take as long as they take,
whatever else there is. So a step takes no less than any average of chains. What an average takes is a sum over stages: the
split for which it is least is a shortest path. The average that says most is one side of a game, whose other side averages
splits: to the chains the longest ones for the average of splits are added, to the splits the best one against the average of
chains, until neither side gains.

Between this bound and the best split lies what an average of splits takes less than each of them, and messages, which count
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver.python import model_builder

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.waits import run_order, waits_of
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.menu import Tables, ranges
from shardwright.runtime.schedule import ActionKind

MAX_ROUNDS = 40
"""How many splits are looked at for one bound."""

NEAR = 1e-3
"""The game is over once the bound is that near to what is left to gain, relative to it."""

NUM_PARTS = 4
FORWARD, INPUT, WEIGHT, ONCE = range(NUM_PARTS)
"""What a stage has seconds of: forwards, the two parts of backwards, and what comes once per step."""

PARTS = {
    ActionKind.FORWARD: (FORWARD,),
    ActionKind.BACKWARD: (INPUT, WEIGHT),
    ActionKind.INPUT_GRADIENT: (INPUT,),
    ActionKind.WEIGHT_GRADIENT: (WEIGHT,),
}
"""The parts that an action consists of."""


class Least:
    """The least seconds that any stage can have, ``[start, stop]`` over blocks.

    Args:
        tables: of one placement.
        relief_s: ``[start, stop, side]``, at most 0: what boundaries can save in the forward and in the backward.
        inputs_s: by block, of its backward the gradients of what its stage gets, at least.
        counts: by stage, the microbatches in flight.
        memory_bytes: what a stage may take.
    """

    def __init__(
        self, tables: Tables, relief_s: Array, inputs_s: Sequence[float], counts: Sequence[int], memory_bytes: float
    ) -> None:
        some = np.isfinite(tables.work_s)
        self.num_blocks = len(tables.blocks)
        self.forward_s = np.maximum(np.where(some, tables.forward_s, 0.0) + relief_s[..., 0], 0.0)
        self.backward_s = np.maximum(np.where(some, tables.backward_s, 0.0) + relief_s[..., 1], 0.0)
        self.input_s = np.minimum(np.maximum(ranges(inputs_s) + relief_s[..., 1], 0.0), self.backward_s)
        self.once_s = tables.once_s
        again = {count: tables.again_s(count, memory_bytes, least=True) for count in dict.fromkeys(counts)}
        self.fits = [some & np.isfinite(again[count]) for count in counts]
        self.again_s = [np.where(np.isfinite(again[count]), again[count], 0.0) for count in counts]

    def priced(self, stage: int, counts: Array) -> Array:
        """What the parts of a stage take at least, ``counts`` of each; infinite where it does not fit."""
        forwards, inputs, weights, once = counts.tolist()
        whole = min(inputs, weights) * self.backward_s + self._more(stage, inputs, weights) * self.input_s
        again = inputs * (self.backward_s + self.again_s[stage])  # such a backward is not split
        backward = np.where(self.again_s[stage] > 0, again, whole)
        return np.where(self.fits[stage], forwards * self.forward_s + backward + once * self.once_s, np.inf)

    def times(self, stage: int, span: tuple[int, int], counts: Array) -> list[float]:
        """The seconds of every part behind the price of a stage."""
        again_s = float(self.again_s[stage][span])
        backward_s = float(self.backward_s[span]) + again_s
        input_s = backward_s
        if not again_s and counts[INPUT] >= counts[WEIGHT]:
            input_s = float(self.input_s[span]) if stage else 0.0
        return [float(self.forward_s[span]), input_s, backward_s - input_s, float(self.once_s[span])]

    def _more(self, stage: int, inputs: float, weights: float) -> float:
        """How often gradients of what a stage gets are computed beside those of its weights; the first gets nothing."""
        return max(0.0, inputs - weights) if stage else 0.0


class Chains:
    """The chains of actions of a schedule."""

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


@dataclass
class _Game:
    """The chains and the splits so far."""

    chains: list[Array] = field(default_factory=list)
    splits: list[Array] = field(default_factory=list)

    def solved(self) -> tuple[Array, Array]:
        """The average of chains, and the average of splits, that neither side can better with what is there: their shares."""
        table = np.tensordot(np.array(self.chains), np.array(self.splits), axes=((1, 2), (1, 2)))
        scale = float(table.max()) or 1.0
        model = model_builder.Model()
        shares = [model.new_var(0.0, 1.0, False, f"s{index}") for index in range(len(self.splits))]
        longest = model.new_var(0.0, 1.0, False, "longest")
        rows = [
            model.add(model_builder.LinearExpr.weighted_sum([longest, *shares], [1.0, *(-row / scale)]) >= 0.0) for row in table
        ]
        model.add(model_builder.LinearExpr.sum(shares) == 1.0)
        model.minimize(longest)
        solver = model_builder.Solver("glop")
        status = solver.solve(model)
        assert status == model_builder.SolveStatus.OPTIMAL, f"a game always has an answer, and the solver says {status}"
        weights = np.maximum([solver.dual_value(row) for row in rows], 0.0)
        mixed = np.maximum([solver.value(share) for share in shares], 0.0)
        return weights / weights.sum(), mixed / mixed.sum()


def least_step_s(chains: Chains, least: Least, enough_s: float, is_over: Callable[[], bool] = lambda: False) -> float:
    """Seconds that no split takes less than; infinite if none fits. No better one is looked for than ``enough_s``, or once time
    is over.
    """
    bound, split = _shortest(least, np.ones((chains.num_stages, NUM_PARTS)))
    if bound == float("inf"):
        return bound
    game, mixed, bound = _Game(splits=[split]), np.ones(1), 0.0
    for _ in range(MAX_ROUNDS):
        found = chains.longest(np.tensordot(mixed, np.array(game.splits), axes=1))
        if max(length for length, _ in found) <= bound * (1 + NEAR) or is_over():
            break
        game.chains += [counts for _, counts in found]
        weights, mixed = game.solved()
        seconds, split = _shortest(least, np.tensordot(weights, np.array(game.chains), axes=1))
        bound = max(bound, seconds)
        if bound >= enough_s:
            break
        game.splits.append(split)
        mixed = np.append(mixed, 0.0)
    return bound


def _shortest(least: Least, counts: Array) -> tuple[float, Array]:
    """The split whose stages take least, so many of each part: their sum, and ``[stage, part]`` the seconds of each."""
    before = np.full(least.num_blocks + 1, np.inf)
    before[0] = 0.0
    origins = []
    for stage, own in enumerate(counts):
        sums = before[:, None] + least.priced(stage, own)
        origins.append(sums.argmin(axis=0))
        before = sums.min(axis=0)
    stop, times = least.num_blocks, []
    for stage in reversed(range(len(counts))):
        begin = int(origins[stage][stop])
        times.append(least.times(stage, (begin, stop), counts[stage]))
        stop = begin
    return float(before[-1]), np.array(times[::-1])
