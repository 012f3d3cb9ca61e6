"""What stages compute again where several share the memory of a position: chosen for all of them
together.

A stage of a position may hold more than another, and at another time. So the memory of a position
is not dealt out among its stages: at every moment that may be its fullest, all they hold must fit.
What is computed again then is a knapsack over the blocks of all stages of the position
(``frontier.py``), in which a microbatch's bytes count as often as the stage holds them at one
moment; of several moments the one that lacks most, if that is enough for the others too, else the
most of each stage, and where nothing else fits, all that saves memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from shardwright.compiler.schedule.live_microbatches import held_together
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.policies.autodist.stages.frontier import Again, Frontier
from shardwright.policies.autodist.stages.split_chain import Stage
from shardwright.policies.autodist.stages.stage_costs import StageCosts

Ways = tuple[tuple[int, int], ...]
"""Blocks that are computed again, with the number of the way."""

Moment = tuple[int, ...]
"""How many microbatches a position holds of each of its stages."""


class Positions:
    """The positions of a schedule, with so much memory each. ``tables``: by placement."""

    def __init__(
        self, tables: Sequence[StageCosts], schedule: Schedule, memory_bytes: float
    ) -> None:
        self.tables, self.memory_bytes = tables, memory_bytes
        self._stages = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
        self._moments = held_together(schedule)
        self._empty = Frontier.empty()
        self._grown: dict[tuple[int, int], Frontier] = {}  # by frontier and kind of a block
        self._kinds: dict[tuple[Again, ...], int] = {}
        self._again: list[tuple[Again, ...]] = []  # by kind
        self._kind_of: dict[tuple[int, int, int], int] = {}  # by placement, block and count
        self._known: dict[
            tuple[int, tuple[tuple[int, int, int], ...]], tuple[list[Ways], float] | None
        ] = {}

    def fitted(self, stages: Sequence[Stage]) -> tuple[tuple[Stage, ...], float] | None:
        """The stages with what they compute again so that every position fits, and the bytes of the
        fullest; None if one does not fit.
        """
        found, used = list(stages), 0.0
        # Positions by themselves, as nothing but the stages of a position share its memory.
        for position, own in enumerate(self._stages):
            spans = tuple(
                (stages[index].placement, stages[index].start, stages[index].stop) for index in own
            )
            # The same stages on a position were looked at before.
            if (position, spans) not in self._known:
                self._known[position, spans] = self._chosen(
                    [stages[index] for index in own], self._moments[position]
                )
            known = self._known[position, spans]
            if known is None:
                return None
            ways, own_bytes = known
            for index, recomputed in zip(own, ways, strict=True):
                found[index] = replace(stages[index], recomputed=recomputed)
            used = max(used, own_bytes)
        return tuple(found), used

    def least_bytes(self, stages: Sequence[Stage]) -> float:
        """What the fullest position takes with as much computed again as saves memory."""
        every = [self._most_saving(stage) for stage in stages]
        used: list[float] = []
        for own, moments in zip(self._stages, self._moments, strict=True):
            held, again = [stages[index] for index in own], [every[index] for index in own]
            used += [self._used(held, again, moment) for moment in moments]
        return max(used)

    def _most_saving(self, stage: Stage) -> Ways:
        blocks = self.tables[stage.placement].blocks
        return tuple(
            (block, max(range(len(ways)), key=lambda way: ways[way].saved_bytes))
            for block in range(stage.start, stage.stop)
            if (ways := blocks[block].again)
        )

    def _chosen(
        self, stages: Sequence[Stage], moments: Sequence[Moment]
    ) -> tuple[list[Ways], float] | None:
        """What each stage of a position computes again, and the bytes at its fullest moment; None
        if that does not fit.
        """
        nothing: list[Ways] = [()] * len(stages)
        # The fullest moment first: what fits there mostly fits everywhere. ``most`` is a moment
        # that may never be, with the most of every stage; what fits there fits for sure.
        by_need = sorted(moments, key=lambda moment: -self._used(stages, nothing, moment))
        most = tuple(map(max, zip(*moments, strict=True)))
        found = (self._cheapest(stages, moment) for moment in dict.fromkeys((*by_need, most)))
        for ways in itertools.chain(found, [[self._most_saving(stage) for stage in stages]]):
            if ways is None:
                continue
            used = max(self._used(stages, ways, other) for other in moments)
            if used <= self.memory_bytes * (1 + 1e-12):
                return ways, used
        return None

    def _used(self, stages: Sequence[Stage], ways: Sequence[Ways], moment: Moment) -> float:
        """The bytes of a position at one moment."""
        return sum(
            self.tables[stage.placement].used_bytes(stage.start, stage.stop, own, count)
            for stage, own, count in zip(stages, ways, moment, strict=True)
        )

    def _cheapest(self, stages: Sequence[Stage], moment: Moment) -> list[Ways] | None:
        """What takes least time of all that fits at one moment."""
        # What is missing if nothing is computed again.
        lacking = self._used(stages, [()] * len(stages), moment) - self.memory_bytes
        if lacking <= 0:
            return [()] * len(stages)
        blocks = [
            (self._kind(stage.placement, block, count), number, block)
            for number, (stage, count) in enumerate(zip(stages, moment, strict=True))
            for block in range(stage.start, stage.stop)
        ]
        # A knapsack over all blocks of the position. Their order is free: those alike stand
        # together, so that cuts which differ in few blocks begin with the same frontiers.
        blocks.sort()
        frontier = self._empty
        for kind, _, _ in blocks:
            frontier = self._with_block(frontier, kind)
        if frontier.cost_of(lacking) == float("inf"):
            return None
        found: list[list[tuple[int, int]]] = [[] for _ in stages]
        for index, way in frontier.chosen(lacking):
            _, number, block = blocks[index]
            found[number].append((block, way))
        return [
            self.tables[stage.placement].earliest(stage.start, stage.stop, ways)
            for stage, ways in zip(stages, found, strict=True)
        ]

    def _kind(self, placement: int, block: int, count: int) -> int:
        """The number of the ways to compute a block again, if that is saved in ``count``
        microbatches; those of blocks alike are one.
        """
        key = placement, block, count
        if key not in self._kind_of:
            ways = self.tables[placement].blocks[block].again
            again = tuple(Again(way.time_s, count * way.saved_bytes) for way in ways)
            if again not in self._kinds:
                self._kinds[again] = len(self._again)
                self._again.append(again)
            self._kind_of[key] = self._kinds[again]
        return self._kind_of[key]

    def _with_block(self, frontier: Frontier, kind: int) -> Frontier:
        """The frontier with one more block of a kind."""
        key = id(frontier), kind
        if key not in self._grown:
            self._grown[key] = frontier.with_block(self._again[kind])
        return self._grown[key]
