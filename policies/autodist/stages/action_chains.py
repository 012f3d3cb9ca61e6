"""The chains of actions of a schedule that wait for one another, and the longest of them."""

from __future__ import annotations

import numpy as np

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.live_microbatches import held_together
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.waits import run_order, waits_of
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.stage_minima import (
    FORWARD,
    HELD,
    INPUT,
    KEPT,
    NUM_PARTS,
    ONCE,
    WEIGHT,
)
from shardwright.runtime.schedule_actions import ActionKind

PARTS = {
    ActionKind.FORWARD: (FORWARD,),
    ActionKind.BACKWARD: (INPUT, WEIGHT),
    ActionKind.INPUT_GRADIENT: (INPUT,),
    ActionKind.WEIGHT_GRADIENT: (WEIGHT,),
}
"""The parts that an action consists of."""


KINDS = tuple(PARTS)


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
        # ``[action]``: the seconds of each action.
        seconds = np.stack([times[:, list(PARTS[kind])].sum(axis=1) for kind in KINDS], axis=1)[
            self._stages, self._kinds
        ]
        # Level by level: an action ends after the last of those that it waits for. The last entry
        # is nothing.
        ends = np.zeros(len(seconds) + 1)
        for level in map(slice, self._edges, self._edges[1:]):
            ends[level] = ends[self._before[level]].max(axis=1) + seconds[level]
        # Which of them that was, to walk back along the longest chain.
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
            # How often the chain has each kind of action of each stage.
            often = np.bincount(
                self._stages[chain] * len(KINDS) + self._kinds[chain],
                minlength=self.num_stages * len(KINDS),
            )
            counts = np.zeros((self.num_stages, NUM_PARTS))
            # What the last position does once per step belongs to its chain.
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
