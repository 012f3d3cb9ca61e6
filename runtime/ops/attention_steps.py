"""The steps of split attention: who sends which keys to whom, and which tiles a rank computes.

Example: 2 ranks of a ring have 4 positions each, and attention is causal. In step 0 each computes
with its own keys. In step 1 the second gets the keys of the first, and computes all of them; the
first gets none, as its queries see nothing later. Of documents a rank may compute queries of
others beside its own (:mod:`~shardwright.runtime.ops.attention_moves`), and gets their keys, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.runtime.marks import Seen
from shardwright.runtime.ops.attention_moves import Move, computed_by, moves_of
from shardwright.runtime.ops.axes import Length, piece_runs, whole_length
from shardwright.runtime.runs import Run, common, dealt, joined, places_of, within
from shardwright.runtime.visible_keys import (
    Bands,
    Tile,
    clips,
    joined_tiles,
    local_bands,
    seen_runs,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A tile of queries with the keys at hand in a step, counted as they lie there. ``samples``:
    those that see alike. ``own``, ``theirs``: all of these queries and keys, where they lie in the
    sequence. ``asks``: the marks say which keys of the tile are seen. ``guest``: which of the
    guests the queries are; ``None``: they are the rank's own. ``begins``: no earlier part has one
    of its queries.
    """

    tile: Tile
    samples: Run
    own: tuple[Run, ...]
    theirs: tuple[Run, ...]
    asks: bool
    guest: int | None = None
    begins: bool = False

    @property
    def queries(self) -> Run:
        """The queries of the tile."""
        return self.tile.queries

    @property
    def keys(self) -> Run:
        """The keys of the tile."""
        return self.tile.keys

    @property
    def queries_at(self) -> tuple[Run, ...]:
        """Where the queries lie in the sequence."""
        return within(self.own, (self.queries,))

    @property
    def keys_at(self) -> tuple[Run, ...]:
        """Where the keys lie in the sequence."""
        return within(self.theirs, (self.keys,))


@dataclass(frozen=True, slots=True)
class Share:
    """What a step does for samples that see alike. ``num_keys``: how many keys come. ``given``:
    which of this rank's own go.
    """

    samples: Run
    num_keys: int
    given: tuple[Run, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does in one step. ``source``, ``target``: the ranks whose keys come, and to which
    its own go. ``is_idle``: no rank of the axis sends any.
    """

    source: int
    target: int
    is_idle: bool
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Lent:
    """Queries that another rank computes. ``rank``: the one that has them, seen from where they are
    computed, and the one that computes them, seen from home. ``at``: where they lie in the
    sequence. ``places``: at home, where they lie among the rank's own.
    """

    rank: int
    samples: Run
    at: tuple[Run, ...]
    places: tuple[Run, ...] = ()

    @property
    def count(self) -> int:
        """How many queries they are."""
        return sum(size for _, size in self.at)


@dataclass(frozen=True, slots=True)
class Steps:
    """What a rank does: one step for each rank of a ring. ``away``: those of its queries that
    others compute. ``guests``: queries of others that it computes. ``moves``: some rank of the axis
    has guests.
    """

    steps: tuple[Step, ...]
    away: tuple[Lent, ...] = ()
    guests: tuple[Lent, ...] = ()
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place along an axis that cuts queries. ``is_ring``: it cuts keys, too."""

    size: int
    index: int
    turns: int
    is_ring: bool

    def runs(self, count: int) -> tuple[Run, ...]:
        """Where the rank's piece of ``count`` things lies."""
        return dealt(count, self.size, self.index, turns=self.turns)


@lru_cache(maxsize=256)
def steps_of(
    places: tuple[Place, ...],
    lengths: tuple[Length, Length],
    query_unit: int,
    seen: tuple[Seen, ...],
    call_pairs: int,
    *,
    evens_out: bool = False,
) -> Steps:
    """What the rank at ``places`` does; the first step is with its own keys. ``call_pairs``: what a
    call of a kernel costs, as for :func:`~shardwright.runtime.visible_keys.joined_tiles`.
    ``evens_out``: queries move where ranks would have unequal work: along the ring, or the first of
    the axes.
    """
    ring = next((place for place in places if place.is_ring), None)
    along = ring or (places[0] if evens_out and places else Place(1, 0, 0, is_ring=False))
    index, members = along.index, [replace(along, index=rank) for rank in range(along.size)]
    # Every rank computes what all of them need of each other, so that sender and receiver agree on
    # the size of each message without asking.
    queries = tuple(
        piece_runs(
            [member if place is along else place for place in places], lengths[0], query_unit
        )
        for member in members
    )
    # A move takes two messages each way, about as long as two calls. But pairs are computed three
    # and a half times, forward and backward: so half of the pairs of a call are worth it.
    moves = moves_of(seen, queries, call_pairs // 2) if evens_out else ()
    all_keys = ((0, whole_length(lengths[1])),)
    keys = [piece_runs([member], lengths[1]) if ring else all_keys for member in members]
    guests, kept, sees = _guests(moves, index), {}, {}
    for some in seen:
        own_moves = [move for move in moves if move.samples == some.samples]
        computed = [computed_by(rank, own, own_moves) for rank, own in enumerate(queries)]
        kept[some.samples] = computed[index][0]
        sees[some.samples] = [
            seen_runs(some.bands, joined((*here, *there))) for here, there in computed
        ]

    def needed(some: Seen, by: int, of: int) -> tuple[Run, ...]:
        """The keys of rank ``of`` that queries which rank ``by`` computes see."""
        return common(sees[some.samples][by], keys[of])

    def parts_of(some: Seen, here: tuple[Run, ...]) -> Iterator[Part]:
        num_keys = sum(count for _, count in here)
        own = queries[index]
        bands = local_bands(_only(some.bands, kept[some.samples]), own, here)
        for tile in joined_tiles(bands, num_keys, call_pairs):
            yield Part(tile, some.samples, own, here, not some.exact)
        for number, guest in enumerate(guests):
            if guest.samples == some.samples:
                bands = local_bands(some.bands, guest.at, here)
                for tile in joined_tiles(bands, num_keys, call_pairs):
                    yield Part(tile, some.samples, guest.at, here, not some.exact, number)

    size = ring.size if ring else 1

    def share(some: Seen, step: int) -> Share:
        # In step ``s`` keys travel ``s`` ranks at once: from rank ``i`` to rank ``i + s``.
        source, target = (index - step) % size, (index + step) % size
        here = keys[index] if step == 0 else needed(some, index, source)
        given = () if step == 0 else needed(some, target, index)
        return Share(
            some.samples,
            sum(count for _, count in here),
            places_of(keys[index], given),
            tuple(parts_of(some, here)),
        )

    def is_idle(step: int) -> bool:
        # Idle on all ranks or on none: an all-to-all needs everybody.
        pairs = (((of + step) % size, of) for of in range(size))
        return not any(needed(some, by, of) for by, of in pairs for some in seen)

    steps = []
    begun: dict[tuple[Run, int | None], tuple[Run, ...]] = {}
    for step in range(size):
        shares = tuple(_with_begins(share(some, step), begun) for some in seen)
        no_message = step == 0 or is_idle(step)
        steps.append(Step((index - step) % size, (index + step) % size, no_message, shares))
    return Steps(tuple(steps), _away(moves, index, queries[index]), guests, bool(moves))


def _with_begins(share: Share, begun: dict[tuple[Run, int | None], tuple[Run, ...]]) -> Share:
    """A share whose parts know whether they are the first of their queries. ``begun``: the queries
    that parts have had so far, by samples and guest.
    """
    parts = []
    for part in share.parts:
        had = begun.get((part.samples, part.guest), ())
        parts.append(replace(part, begins=not common((part.queries,), had)))
        begun[part.samples, part.guest] = joined((*had, part.queries))
    return replace(share, parts=tuple(parts))


def _guests(moves: Sequence[Move], rank: int) -> tuple[Lent, ...]:
    """What a rank computes for others, in the order in which it comes."""
    found: dict[tuple[int, Run], list[Run]] = {}
    for move in moves:
        if move.target == rank:
            found.setdefault((move.source, move.samples), []).append(move.queries)
    return tuple(
        Lent(source, samples, joined(runs)) for (source, samples), runs in sorted(found.items())
    )


def _away(moves: Sequence[Move], rank: int, own: tuple[Run, ...]) -> tuple[Lent, ...]:
    """What others compute for a rank, in the order in which it goes."""
    found: dict[tuple[int, Run], list[Run]] = {}
    for move in moves:
        if move.source == rank:
            found.setdefault((move.target, move.samples), []).append(move.queries)
    return tuple(
        Lent(target, samples, joined(runs), places_of(own, joined(runs)))
        for (target, samples), runs in sorted(found.items())
    )


def _only(bands: Bands, queries: tuple[Run, ...]) -> Bands:
    """What these queries see."""
    return tuple(
        replace(
            band,
            start=start,
            stop=stop,
            low=band.low + (start - band.start) * band.low_step,
            end=band.end + (start - band.start) * band.end_step,
        )
        for band, start, stop in clips(bands, queries)
    )
