"""The chains of actions of a schedule that wait for one another, and the longest of them.

An action that waits for one of another rank also waits for the message in between. So a chain has
messages, too: each is counted to the later of the two stages, there or back.

Example: two stages on two ranks, one microbatch. The chain 0F0, 1F0, 1B0, 0B0 has two messages of
stage 1, one there and one back. Two stages on one rank send each other none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.live_microbatches import held_together
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.waits import run_order, waits_of
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.stage_minima import (
    BACK,
    FORWARD,
    HELD,
    INPUT,
    KEPT,
    NUM_PARTS,
    ONCE,
    THERE,
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

MESSAGES = (THERE, BACK)
"""The parts that are messages."""


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
        # ``[action, ...]``: the number of the message that comes with each, or that of none.
        none = self.num_stages * len(MESSAGES)
        self._messages = np.array(
            [
                [*(_message(schedule, place, other) for other in before[place]), *[none] * most][
                    :most
                ]
                for place in numbers
            ]
        )
        self._messages[self._messages < 0] = none
        self._stages, self._kinds = (
            np.array(listed)
            for listed in zip(*((a.stage, KINDS.index(a.kind)) for a in actions), strict=True)
        )
        self.moments = _moments(schedule)
        self._last = [
            (numbers[rank, len(own) - 1], schedule.stages_of(rank))
            for rank, own in enumerate(schedule.actions)
        ]

    @functools.cached_property
    def by_position(self) -> Sequence[Array]:
        """The chain of all that each position does, with what its first action waits for and what
        waits for its last one, where that is most actions: ``[stage, part]``, how often it has
        each.
        """
        nothing, before = len(self._before), self._before.tolist()
        # How many actions come one after the other before each, and after it.
        heads, tails, after = [0] * (nothing + 1), [0] * nothing, [nothing] * nothing
        heads[nothing] = -1
        for number, others in enumerate(before):
            heads[number] = 1 + max(heads[other] for other in others)
        for number in reversed(range(nothing)):
            for other in before[number]:
                if other < nothing and tails[other] <= tails[number]:
                    tails[other], after[other] = tails[number] + 1, number
        own: dict[tuple[int, ...], list[int]] = {tuple(stages): [] for _, stages in self._last}
        position_of = {stage: stages for stages in own for stage in stages}
        for number, stage in enumerate(self._stages.tolist()):
            own[position_of[stage]].append(number)
        found = []
        for last, stages in self._last:
            chain = list(own[tuple(stages)])
            messages = []
            number = chain[0]
            while (first := max(before[number], key=heads.__getitem__)) < nothing:
                messages.append(self._message_between(first, number))
                chain.append(number := first)
            number = last
            while after[number] < nothing:
                messages.append(self._message_between(number, after[number]))
                chain.append(number := after[number])
            # It ends with what its last position does once per step.
            ends = position_of[int(self._stages[number])]
            found.append(self._counts(chain, messages, ends))
        return found

    def longest(self, times: Array) -> list[tuple[float, Array]]:
        """The longest chain that ends at each position: its seconds, and ``[stage, part]`` how
        often it has each. ``times``: ``[stage, part]``, of one microbatch, or once.
        """
        # ``[action]``: the seconds of each action.
        seconds = np.stack([times[:, list(PARTS[kind])].sum(axis=1) for kind in KINDS], axis=1)[
            self._stages, self._kinds
        ]
        messages_s = np.append(times[:, list(MESSAGES)], 0.0)[self._messages]
        # Level by level: an action ends after the last of those that it waits for. The last entry
        # is nothing.
        ends = np.zeros(len(seconds) + 1)
        for level in map(slice, self._edges, self._edges[1:]):
            there = ends[self._before[level]] + messages_s[level]
            ends[level] = there.max(axis=1) + seconds[level]
        # Which of them that was, to walk back along the longest chain.
        latest = (ends[self._before] + messages_s).argmax(axis=1)[:, None]
        origins, between = (
            np.take_along_axis(of, latest, axis=1)[:, 0].tolist()
            for of in (self._before, self._messages)
        )
        found = []
        for number, stages in self._last:
            length = float(ends[number] + times[list(stages), ONCE].sum())
            chain, messages = [], []
            while number < len(origins):
                chain.append(number)
                messages.append(between[number])
                number = origins[number]
            # What the last position does once per step belongs to its chain.
            found.append((length, self._counts(chain, messages, stages)))
        return found

    def _message_between(self, before: int, number: int) -> int:
        """The message that an action waits for behind one that it waits for."""
        return int(self._messages[number][self._before[number].tolist().index(before)])

    def _counts(self, chain: Sequence[int], messages: Sequence[int], once: Sequence[int]) -> Array:
        """How often a chain has each kind of action of each stage, and each message, and what
        stages do once.
        """
        often = np.bincount(
            self._stages[chain] * len(KINDS) + self._kinds[chain],
            minlength=self.num_stages * len(KINDS),
        )
        counts = np.zeros((self.num_stages, NUM_PARTS))
        counts[list(once), ONCE] = 1.0
        sent = np.bincount(messages, minlength=self.num_stages * len(MESSAGES) + 1)[:-1]
        counts[:, list(MESSAGES)] = sent.reshape(self.num_stages, -1)
        for kind, column in zip(KINDS, often.reshape(self.num_stages, -1).T, strict=True):
            counts[:, list(PARTS[kind])] += column[:, None]
        return counts


def _message(schedule: Schedule, place: tuple[int, int], before: tuple[int, int]) -> int:
    """The number of the message between an action and one that it waits for, -1 for none."""
    if place[0] == before[0]:
        return -1
    own, other = (schedule.actions[rank][index].stage for rank, index in (place, before))
    return max(own, other) * len(MESSAGES) + int(own < other)


def _moments(schedule: Schedule) -> list[Array]:
    found = []
    for rank, moments in enumerate(held_together(schedule, in_any_case=True)):
        stages = list(schedule.stages_of(rank))
        for moment in moments if len(stages) > 1 else ():
            counts = np.zeros((schedule.num_stages, NUM_PARTS))
            counts[stages, HELD], counts[stages, KEPT] = 1.0, moment
            found.append(counts)
    return found
