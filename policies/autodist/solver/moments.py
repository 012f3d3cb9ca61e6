"""Rows over time inside a network: what each node uses in which moments, and the room of every
moment.

A moment stands for a stretch of time in which the same nodes use a row. Those that cannot be
exceeded are dropped, and so are those whose users are all users of the moment before or after, with
no more room there (`Moments.merge`).
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.pool import Pool
from shardwright.policies.autodist.solver.problem import ROW_TOLERANCE, Array, Row


@dataclass
class WorkRow:
    """A row in which every node's least usage is 0: ``sum of usage[node][choice] <= room``."""

    index: int
    room: float
    usage: dict[int, Array]


class Span(NamedTuple):
    """What the strategies of a node use in the moments from ``first`` to before ``last``,
    ``[strategies]``.
    """

    first: int
    last: int
    used: Array


class Moments:
    """The moments of all rows with intervals, one row's after another's.

    Attributes:
        room: what is left at each moment.
        rows: the row of the problem that each belongs to.
        times: when each begins, in the numbers of the row's intervals.
        spans: what each node uses, and when.
    """

    def __init__(self, rows: Sequence[Row], pool: Pool) -> None:
        rooms: list[Array] = []
        owners: list[NDArray[np.intp]] = []
        begins: list[int] = []
        self.spans: dict[int, tuple[Span, ...]] = {}
        count = 0
        for index, row in enumerate(rows):
            if row.intervals is None or row.limit == math.inf:
                continue
            # Between two times at which something begins or ends, nothing changes: a moment is such
            # a time.
            ends = (pair for pair in row.intervals.values() if pair[0] < pair[1])
            times = sorted(set(itertools.chain.from_iterable(ends)))
            # Moments of all rows are counted through.
            place = {time: count + i for i, time in enumerate(times)}
            for node, (start, end) in row.intervals.items():
                if start < end:
                    span = Span(place[start], place[end], pool.intern(row.usage[node]))
                    self.spans[node] = (*self.spans.get(node, ()), span)
            rooms.append(
                np.full(len(times), row.limit * (1 + math.copysign(ROW_TOLERANCE / 2, row.limit)))
            )
            owners.append(np.full(len(times), index, dtype=np.intp))
            begins += times
            count += len(times)
        self.room = np.concatenate([*rooms, np.zeros(0)])
        self.rows = np.concatenate([*owners, np.zeros(0, dtype=np.intp)])
        self.times = np.array(begins, dtype=np.intp)

    def __len__(self) -> int:
        return len(self.room)

    def over_time(self, amounts: Iterator[tuple[Span, float]]) -> Array:
        """The sum by moment of an amount per span."""
        changes = np.zeros(len(self.room) + 1)
        for span, amount in amounts:
            changes[span.first] += amount
            changes[span.last] -= amount
        return np.asarray(np.cumsum(changes)[:-1])

    def all_spans(self) -> Iterator[Span]:
        """Every span of every node."""
        return (span for spans in self.spans.values() for span in spans)

    def take(self, node: int, index: NDArray[np.intp], pool: Pool) -> None:
        """Keep only some strategies of a node."""
        if node in self.spans:
            self.spans[node] = tuple(
                span._replace(used=pool.take(span.used, (index,))) for span in self.spans[node]
            )

    def move(self, node: int, leader: int, index: NDArray[np.intp], pool: Pool) -> None:
        """Let another node use what this one does, strategy ``index[k]`` of it with strategy
        ``k``.
        """
        self.take(node, index, pool)
        moved = self.spans.pop(node, ())
        if moved:
            self.spans[leader] = (*self.spans.get(leader, ()), *moved)

    def tighten(self, pool: Pool) -> int | None:
        """Take out what every strategy of a node uses, and moments that cannot be exceeded; a row
        that cannot be kept.
        """
        # What any strategy of a node uses is taken out of the room.
        least = {id(span.used): float(span.used.min()) for span in self.all_spans()}
        taken = self.over_time((span, least[id(span.used)]) for span in self.all_spans())
        room = self.room - taken
        if (room < 0).any():
            return int(self.rows[int(room.argmin())])
        self.room = room
        # Spans of one node over the same moments are added up.
        kept: dict[int, tuple[Span, ...]] = {}
        for node, spans in self.spans.items():
            together: dict[tuple[int, int], Array] = {}
            for first, last, used in spans:
                rest = used if least[id(used)] == 0 else pool.intern(used - least[id(used)])
                if rest.any():
                    before = together.get((first, last))
                    together[first, last] = rest if before is None else pool.add(before, rest)
            if together:
                kept[node] = tuple(
                    Span(first, last, used) for (first, last), used in sorted(together.items())
                )
        self.spans = kept
        # A moment that the largest uses do not fill is always kept.
        most = self.over_time((span, float(span.used.max())) for span in self.all_spans())
        self._keep(most > self.room)
        return None

    def _keep(self, keep: NDArray[np.bool_]) -> None:
        if keep.all():
            return
        # Numbers of the moments that stay.
        place = np.concatenate([[0], np.cumsum(keep)])
        self.room, self.rows, self.times = self.room[keep], self.rows[keep], self.times[keep]
        moved = {}
        for node, spans in self.spans.items():
            # Spans over moments that are all gone go with them.
            left = tuple(
                Span(int(place[span.first]), int(place[span.last]), span.used)
                for span in spans
                if place[span.first] < place[span.last]
            )
            if left:
                moved[node] = left
        self.spans = moved

    def merge(self) -> None:
        """Drop moments that are kept whenever the one before or after is."""
        while len(self.room) > 1:
            starts, ends = (
                # Where spans begin, and behind which moments they end.
                np.zeros(len(self.room) + 1, dtype=bool),
                np.zeros(len(self.room) + 1, dtype=bool),
            )
            for span in self.all_spans():
                starts[span.first] = ends[span.last] = True
            # Two moments of one row.
            same = self.rows[:-1] == self.rows[1:]
            # Of each pair, the later one goes.
            by_earlier = same & ~starts[1:-1] & (self.room[:-1] <= self.room[1:])
            by_later = same & ~ends[1:-1] & (self.room[1:] <= self.room[:-1]) & ~by_earlier
            keep = np.ones(len(self.room), dtype=bool)
            keep[1:] &= ~by_earlier
            keep[:-1] &= ~by_later
            if keep.all():
                return
            self._keep(keep)

    def least_room(self) -> list[Array]:
        """The least room of every stretch of ``2 ** level`` moments, by level and first moment."""
        levels, size = [self.room], 1
        while size * 2 <= len(self.room):
            levels.append(np.minimum(levels[-1][:-size], levels[-1][size:]))
            size *= 2
        return levels

    def part(self, nodes: Collection[int]) -> Moments:
        """A copy for some of the nodes."""
        part = copy.copy(self)
        part.spans = {node: spans for node, spans in self.spans.items() if node in nodes}
        return part

    def usage_at(self, moments: Sequence[int], pool: Pool) -> list[dict[int, Array]]:
        """What nodes use at some moments, in ascending order."""
        usage: list[dict[int, Array]] = [{} for _ in moments]
        for node, spans in self.spans.items():
            for first, last, used in spans:
                for place in range(bisect_left(moments, first), bisect_left(moments, last)):
                    before = usage[place].get(node)
                    usage[place][node] = used if before is None else pool.add(before, used)
        return usage
