"""Which queries of a rank another one computes, so that all have the same work.

Of causal attention zigzag gives every rank the same pairs of a query and a key. Of a window that is
a large part of the sequence it does not: one of half of it leaves a rank of 4 with 1.25 times the
mean. Nor does it of rows of several documents, whose lengths are known at run time only. Then the
rank with most pairs hands queries to the one with fewest: theirs travel there, and their outputs
home.

Example: the 4 queries of one rank see 5, 6, 7 and 8 keys, those of another one 1, 2, 3 and 4. The
mean is 18 pairs, and the first has 26. It hands on its last query, and both have 18. What sees most
keys goes first, as it is the least to send for the pairs that it takes along.

A rank keeps what it computes for others until backward. So it takes no more than half as many
queries as it has itself, and this is what the cost model counts on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.runtime.marks import Seen
from shardwright.runtime.runs import Run, joined, without
from shardwright.runtime.visible_keys import EVEN, MOST_GUESTS, Band, clips


@dataclass(frozen=True, slots=True)
class Move:
    """Queries of rank ``source`` that rank ``target`` computes, of samples that see alike."""

    samples: Run
    source: int
    target: int
    queries: Run


@dataclass(slots=True)
class _Piece:
    """Queries ``start`` to ``stop`` of a band, which a rank computes."""

    samples: Run
    band: Band
    start: int
    stop: int

    def keys_of(self, query: int) -> int:
        """How many keys a query sees."""
        band = self.band
        passed = query - band.start
        return max(0, band.end - band.low + passed * (band.end_step - band.low_step))

    def pairs_from(self, query: int) -> int:
        """The pairs of the queries from this one on, of all samples."""
        ends = self.keys_of(query) + self.keys_of(self.stop - 1)
        return self.samples[1] * (self.stop - query) * ends // 2

    def first_within(self, amount: int) -> int:
        """The first query from which on there are at most so many pairs."""
        low, high = self.start, self.stop
        while low < high:
            middle = (low + high) // 2
            if self.pairs_from(middle) <= amount:
                high = middle
            else:
                low = middle + 1
        return low


@lru_cache(maxsize=256)
def moves_of(
    seen: tuple[Seen, ...], queries: tuple[tuple[Run, ...], ...], least_pairs: int
) -> tuple[Move, ...]:
    """What moves between ranks that have these queries each. ``least_pairs``: an imbalance of fewer
    pairs is not worth a message. Of marks without values, the most that may come to the first rank.
    """
    # A guest is a query of one sample.
    num_samples = sum(some.samples[1] for some in seen)
    rooms = [int(MOST_GUESTS * num_samples * sum(size for _, size in own)) for own in queries]
    if not all(some.known for some in seen):
        return _most_moves(seen, queries, rooms[0] // max(1, num_samples))
    pieces = [
        [
            _Piece(some.samples, band, start, stop)
            for some in seen
            for band, start, stop in clips(some.bands, own)
        ]
        for own in queries
    ]
    pairs = [sum(piece.pairs_from(piece.start) for piece in own) for own in pieces]
    mean = sum(pairs) / len(pairs)
    if max(pairs) - mean < least_pairs:
        return ()
    moves: list[Move] = []
    ranks = range(len(pairs))
    while max(pairs) > EVEN * mean and max(rooms):
        source = max(ranks, key=pairs.__getitem__)
        target = min((rank for rank in ranks if rooms[rank]), key=pairs.__getitem__)
        amount = int(min(pairs[source] - mean, mean - pairs[target]))
        found = _widest(pieces[source], amount)
        if found is None:
            break  # every query is more than what is left to even out
        alike = found.samples[1]
        first = max(found.first_within(amount), found.stop - rooms[target] // alike)
        if first == found.stop:
            rooms[target] = 0  # for so many samples there is no room
            continue
        moves.append(Move(found.samples, source, target, (first, found.stop - first)))
        rooms[target] -= alike * (found.stop - first)
        moved = found.pairs_from(first)
        pairs[source] -= moved
        pairs[target] += moved
        found.stop = first
    return tuple(moves)


def computed_by(
    rank: int, own: tuple[Run, ...], moves: Sequence[Move]
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """What a rank computes of its own queries, and of those of others."""
    gone = joined(move.queries for move in moves if move.source == rank)
    return without(own, gone), joined(move.queries for move in moves if move.target == rank)


def _most_moves(
    seen: tuple[Seen, ...], queries: tuple[tuple[Run, ...], ...], room: int
) -> tuple[Move, ...]:
    """The last queries of the second rank, of each sample as many as the first one has room for."""
    moves = []
    for some in seen if len(queries) > 1 else ():
        left = room
        for start, size in reversed(queries[1]):
            count = min(left, size)
            if count:
                moves.append(Move(some.samples, 1, 0, (start + size - count, count)))
            left -= count
    return tuple(moves)


def _widest(pieces: Sequence[_Piece], amount: int) -> _Piece | None:
    """The piece whose last query sees the most keys, of those where that is at most ``amount``."""
    able = [
        piece
        for piece in pieces
        if piece.stop > piece.start and 0 < piece.pairs_from(piece.stop - 1) <= amount
    ]
    return max(able, key=lambda piece: piece.keys_of(piece.stop - 1), default=None)
