"""The steps of split attention: who sends which keys to whom, and which tiles a rank computes.

Example: 2 ranks of a ring have 4 positions each, and attention is causal. In step 0 each computes
with its own keys. In step 1 the second gets the keys of the first, and computes all of them; the
first gets none, as its queries see nothing later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.runtime.marks import Seen
from shardwright.runtime.ops.axes import Length, piece_runs
from shardwright.runtime.runs import Run, common, dealt, places_of, within
from shardwright.runtime.visible_keys import Tile, joined_tiles, local_bands, seen_runs


@dataclass(frozen=True, slots=True)
class Part:
    """A tile of a rank's own queries with the keys at hand in a step, counted as they lie there.
    ``samples``: those that see alike. ``own``, ``theirs``: all of these queries and keys, where
    they lie in the sequence. ``asks``: the marks say which keys of the tile are seen.
    """

    tile: Tile
    samples: Run
    own: tuple[Run, ...]
    theirs: tuple[Run, ...]
    asks: bool

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


Steps = tuple[Step, ...]
"""One step for each rank of a ring."""


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
) -> Steps:
    """What the rank at ``places`` does; the first step is with its own keys. ``call_pairs``: what a
    call of a kernel costs, as for :func:`~shardwright.runtime.visible_keys.joined_tiles`.
    """
    ring = next((place for place in places if place.is_ring), Place(1, 0, 0, True))
    size, index = ring.size, ring.index
    # Every rank computes what all of them need of each other, so that sender and receiver agree on
    # the size of each message without asking.
    members = [replace(ring, index=rank) for rank in range(size)]
    queries = [
        piece_runs([member if place.is_ring else place for place in places], lengths[0], query_unit)
        for member in members
    ]
    keys = [piece_runs([member], lengths[1]) for member in members]
    own = queries[index]

    sees = {some.samples: [seen_runs(some.bands, runs) for runs in queries] for some in seen}

    def needed(some: Seen, by: int, of: int) -> tuple[Run, ...]:
        """The keys of rank ``of`` that queries of rank ``by`` see."""
        return common(sees[some.samples][by], keys[of])

    def share(some: Seen, step: int) -> Share:
        # In step ``s`` keys travel ``s`` ranks at once: from rank ``i`` to rank ``i + s``.
        source, target = (index - step) % size, (index + step) % size
        here = keys[index] if step == 0 else needed(some, index, source)
        num_keys, bands = sum(count for _, count in here), local_bands(some.bands, own, here)
        parts = tuple(
            Part(tile, some.samples, own, here, not some.exact)
            for tile in joined_tiles(bands, num_keys, call_pairs)
        )
        given = () if step == 0 else needed(some, target, index)
        return Share(
            some.samples,
            num_keys,
            places_of(keys[index], given),
            parts,
        )

    def is_idle(step: int) -> bool:
        # Idle on all ranks or on none: an all-to-all needs everybody.
        pairs = (((of + step) % size, of) for of in range(size))
        return not any(needed(some, by, of) for by, of in pairs for some in seen)

    steps = []
    for step in range(size):
        shares = tuple(share(some, step) for some in seen)
        no_message = step == 0 or is_idle(step)
        steps.append(Step((index - step) % size, (index + step) % size, no_message, shares))
    return tuple(steps)
