"""Windows: which places of a dim an operator reads to make a piece of its result, and who sends
them.

A convolution whose rows are cut over ranks reads rows that lie on neighbours. Here is which: plain
numbers, for the runtime, which sends them, and for the cost model, which counts them.

Example: 8 rows on 2 ranks, and a kernel of 3 with one row of padding, so that row ``p`` of the
result reads rows ``p - 1`` to ``p + 1``. Rank 0 makes rows 0 to 3 and reads ``[-1, 5)``: row -1 is
padding, rows 0 to 3 are its own, and row 4 comes from rank 1.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter

from shardwright.runtime.runs import Run, dealt, joined, within

Span = tuple[int, int]
"""The places from a start up to a stop that is not one of them."""

Spans = tuple[Span, ...]
"""Ascending, apart from each other."""


@dataclass(frozen=True, slots=True)
class Window:
    """Place ``p`` of a result reads ``reach`` places from ``p * stride - before``, which a resized
    dim divides by ``per``.

    ``stride`` may be negative: a flipped dim of 8 places is ``Window(-1, -7, 1)``. ``wraps``: the
    places beyond an end are those at the other end.
    """

    stride: int
    before: int
    reach: int
    per: int = 1
    wraps: bool = False

    def span(self, start: int, stop: int) -> Span:
        """What the places ``[start, stop)`` read together. It may begin before the dim, and end
        behind it.
        """
        # A negative stride turns the order around, so either end may read first.
        ends = (start * self.stride, (stop - 1) * self.stride)
        first, last = min(ends) - self.before, max(ends) - self.before + self.reach - 1
        return first // self.per, last // self.per + 1


@dataclass(frozen=True, slots=True)
class Edge:
    """A dim that is cut, on the way from an operand to a result.

    ``dim``: of the operand. ``size``, ``result_size``: the whole lengths. ``unit``,
    ``result_unit``: how many places are never cut apart. ``nums_ranks``: the sizes of the axes that
    cut it, major to minor. ``turns``: those of zigzag in which each of them deals.
    """

    dim: int
    size: int
    result_size: int
    window: Window
    nums_ranks: tuple[int, ...]
    unit: int = 1
    result_unit: int = 1
    turns: tuple[int, ...] = ()

    @property
    def ranks(self) -> list[tuple[int, ...]]:
        """The indices of every rank along the axes."""
        return list(itertools.product(*map(range, self.nums_ranks)))

    def held(self, index: tuple[int, ...]) -> Spans:
        """What a rank holds of the operand."""
        return self._runs(self.size, self.unit, index)

    def made(self, index: tuple[int, ...]) -> Spans:
        """What a rank makes of the result."""
        return self._runs(self.result_size, self.result_unit, index)

    def _runs(self, size: int, unit: int, index: tuple[int, ...]) -> Spans:
        # Major to minor: each axis cuts what the axes before it have left to this rank.
        runs: tuple[Run, ...] = ((0, size // unit),)
        for axis, (num_ranks, i) in enumerate(zip(self.nums_ranks, index, strict=True)):
            turns = self.turns[axis] if self.turns else 0
            count = sum(length for _, length in runs)
            runs = within(runs, dealt(count, num_ranks, i, turns=turns))
        return tuple((start * unit, (start + count) * unit) for start, count in joined(runs))

    def read(self, index: tuple[int, ...]) -> tuple[Reading, ...]:
        """What a rank reads for each run of the result that it makes, in the order in which it lies
        there.
        """
        return _readings(self, index)

    def reading(self, start: int, stop: int) -> Reading:
        """What the places ``[start, stop)`` of the result read."""
        low, high = self.window.span(start, stop)
        if not self.window.wraps:
            inside = max(low, 0), min(high, self.size)
            spans = (inside,) if inside[1] > inside[0] else ()
            left = min(max(0, -low), high - low)
            return Reading(stop - start, left, spans, high - low - left - length(spans))
        spans = ()
        while low < high:  # each round goes to the next end of the dim at most
            place = low % self.size
            count = min(high - low, self.size - place)
            spans = (*spans, (place, place + count))
            low += count
        return Reading(stop - start, 0, spans, 0)

    def wanted(self, index: tuple[int, ...]) -> Spans:
        """The places of the dim that a rank reads, in the order in which it reads them."""
        return tuple(span for reading in self.read(index) for span in reading.spans)


@dataclass(frozen=True, slots=True)
class Reading:
    """What an operator reads of a dim to make one run of its result. ``made``: places of the
    result. ``left``, ``right``: places of padding in front of ``spans`` and behind them.
    """

    made: int
    left: int
    spans: Spans
    right: int

    @property
    def length(self) -> int:
        """How many places it reads, padding included."""
        return self.left + length(self.spans) + self.right


@functools.lru_cache(maxsize=4096)
def _readings(edge: Edge, index: tuple[int, ...]) -> tuple[Reading, ...]:
    made, stride = edge.made(index), edge.window.stride
    found = [edge.reading(*span) for span in (reversed(made) if stride < 0 else made)]
    # The operator runs over all of it at once. So what a run reads is as long as a whole number of
    # strides, that of the last one excepted.
    for number, reading in enumerate(found[:-1]):
        missing = -reading.length % abs(stride)
        found[number] = replace(reading, right=reading.right + missing)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Hop:
    """One exchange along one axis: by member of the axis, what it has before and wants after."""

    axis: int
    have: tuple[Spans, ...]
    want: tuple[Spans, ...]

    @property
    def sends(self) -> bool:
        """Whether a member needs anything of another."""
        return _sends(self)

    def sent(self, member: int) -> int:
        """How many places a member sends."""
        readers = (want for reader, want in enumerate(self.want) if reader != member)
        return sum(length(common(self.have[member], want)) for want in readers)

    def back(self, member: int) -> int:
        """How many places of the gradient a member sends home."""
        owners = (have for owner, have in enumerate(self.have) if owner != member)
        return sum(length(common(have, self.want[member])) for have in owners)


def hops(edge: Edge, index: tuple[int, ...]) -> tuple[Hop, ...]:
    """The exchanges of the rank at ``index``, one for each axis, major to minor."""
    return _hops_of_all(edge)[index]


@functools.lru_cache(maxsize=1024)
def _hops_of_all(edge: Edge) -> dict[tuple[int, ...], tuple[Hop, ...]]:
    """The exchanges of every rank, one for each axis, major to minor.

    What lies on a rank with other indices along several axes comes in as many hops: along the
    first axis to the rank that shares all other indices with its owner, and so on. So no group of
    ranks is needed but those of the axes.
    """
    ranks = edge.ranks
    have: dict[tuple[int, ...], Spans] = {rank: edge.held(rank) for rank in ranks}
    wanted = {rank: edge.wanted(rank) for rank in ranks}
    found: dict[tuple[int, ...], list[Hop]] = {rank: [] for rank in ranks}
    for axis, num_ranks in enumerate(edge.nums_ranks):
        last = axis == len(edge.nums_ranks) - 1
        # Before the last hop a rank takes what all ranks want that it passes something on to. In
        # the last one each takes its own, in the order in which it reads it.
        need = wanted
        if not last:
            need = {}
            for rank in ranks:
                behind = (other for other in ranks if other[: axis + 1] == rank[: axis + 1])
                need[rank] = merged(span for other in behind for span in wanted[other])
        after = {}
        for rank in ranks:
            members = [(*rank[:axis], i, *rank[axis + 1 :]) for i in range(num_ranks)]
            found[rank].append(
                Hop(axis, tuple(have[m] for m in members), tuple(need[m] for m in members))
            )
            after[rank] = merged(
                span for member in members for span in common(have[member], need[rank])
            )
        have = after
    return {rank: tuple(own) for rank, own in found.items()}


@functools.lru_cache(maxsize=4096)
def _sends(hop: Hop) -> bool:
    pairs = itertools.permutations(range(len(hop.have)), 2)
    return any(common(hop.have[owner], hop.want[reader]) for owner, reader in pairs)


@functools.lru_cache(maxsize=4096)
def common(have: Spans, want: Spans) -> Spans:
    """The places of ``want`` that are in ``have``, in the order of ``want``."""
    found = []
    for start, stop in want:
        # Of what is had, the first that does not end before the span at hand.
        at = bisect_right(have, start, key=itemgetter(1))
        while at < len(have) and have[at][0] < stop:
            found.append((max(start, have[at][0]), min(stop, have[at][1])))
            at += 1
    return tuple(found)


def merged(spans: Iterable[Span]) -> Spans:
    """Spans without overlaps, in ascending order."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)


def length(spans: Spans) -> int:
    """The number of places."""
    return sum(stop - start for start, stop in spans)


def most_sent(edge: Edge) -> tuple[tuple[int, int], ...]:
    """The most places that a rank sends along each axis, forward and backward."""
    by_rank = [(rank, hops(edge, rank)) for rank in edge.ranks]
    most = []
    for axis in range(len(edge.nums_ranks)):
        forward = max(found[axis].sent(rank[axis]) for rank, found in by_rank)
        backward = max(found[axis].back(rank[axis]) for rank, found in by_rank)
        most.append((forward, backward))
    return tuple(most)


def most_read(edge: Edge) -> int:
    """The most places that a rank reads, padding included."""
    return max(sum(reading.length for reading in edge.read(rank)) for rank in edge.ranks)
