"""Which keys each query sees, and the tiles in which a part of the queries sees a part of the keys.

A query sees an interval of keys, and neither end ever moves back from one query to the next:
causal attention, sliding windows, chunks and packed documents are all of this form. So no mask is
ever made. What queries see is a list of **bands**, runs of queries along which each end of the
interval stands still or moves on by one:

    causal attention of 4 queries       band 0..3: from key 0 on, up to key 0, 1, 2, 3
    with a window of 2                  band 0..0: key 0; band 1..3: two keys each

Where a run of queries meets a run of keys, a band is cut into **tiles**, rectangles that attention
kernels know: all is seen (``full``), query ``i`` sees the first ``i + 1`` keys (``causal``), or all
but the first ``i`` (``flipped``: causal, if both are read backwards), or all count alike
(``flat``). A window narrower than
:data:`NARROW` is not worth the many small tiles that it would take: it is one tile with a mask.
Every query of a tile sees a key of it, as kernels disagree about queries that see none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from shardwright.runtime.runs import Run, joined

NARROW = 64
"""The width from which on a window is computed in tiles without a mask."""

MOST_MASKED = 2**24
"""The most pairs of a query and a key for which one rank makes a mask: 4096 x 4096."""

Kind = Literal["full", "causal", "flipped", "masked", "flat"]


@dataclass(frozen=True, slots=True)
class Band:
    """Queries ``start`` to ``stop``. Query ``start`` sees the keys from ``low`` up to, but without,
    ``end``; from one query to the next these grow by ``low_step`` and ``end_step``, 0 or 1.
    ``flat``: all of these keys count alike, whatever their scores.
    """

    start: int
    stop: int
    low: int
    end: int
    low_step: int = 0
    end_step: int = 0
    flat: bool = False


Bands = tuple[Band, ...]
"""Disjoint, ascending. A query in none of them sees no key."""


def all_keys(num_queries: int, num_keys: int) -> Bands:
    """Every query sees every key."""
    return (Band(0, num_queries, 0, num_keys),) if num_queries and num_keys else ()


def earlier_keys(num_queries: int, num_keys: int, window: int | None = None) -> Bands:
    """Causal attention: a query sees the keys up to its own position, of these only the last
    ``window``. Both are counted from the same beginning, as ``is_causal`` of
    ``F.scaled_dot_product_attention`` has it.
    """
    window = max(num_queries, num_keys) if window is None else window
    growing, most = min(num_queries, num_keys, window), min(num_queries, num_keys)
    bands = [Band(0, growing, 0, 1, 0, 1), Band(growing, most, 1, growing + 1, 1, 1)]
    # Queries behind the last key: the window leaves the keys one by one.
    behind = Band(most, min(num_queries, num_keys + window - 1), most - window + 1, num_keys, 1, 0)
    if behind.low <= 0:
        still = min(num_queries, window)
        bands.append(Band(most, still, 0, num_keys))
        behind = Band(still, behind.stop, 1, num_keys, 1, 0)
    return tuple(band for band in (*bands, behind) if band.start < band.stop)


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of which each query sees what ``kind`` says. ``low``, ``end``: in a masked
    tile, what its first query sees of the keys; the interval moves on by one with every query.
    """

    queries: Run
    keys: Run
    kind: Kind
    low: int = 0
    end: int = 0


def tiles(bands: Iterable[Band], queries: Run, keys: Run) -> Iterator[Tile]:
    """The tiles of a run of queries with a run of keys."""
    first_key, key_stop = keys[0], keys[0] + keys[1]
    for band in bands:
        start, stop = max(band.start, queries[0]), min(band.stop, queries[0] + queries[1])
        if start >= stop or first_key >= key_stop:
            continue
        marks = sorted({start, stop, *_turns(band, start, stop, first_key, key_stop)})
        for a, b in pairwise(marks):
            piece = _clipped(band, a, b, first_key, key_stop)
            if piece is not None:
                yield from _rectangles(piece)


def _turns(band: Band, start: int, stop: int, first_key: int, key_stop: int) -> Iterator[int]:
    """The queries from which on another bound holds: one of the run of keys takes over from an end
    of the interval or hands over to it, or the interval opens or closes.
    """

    def when(at: int, step: int, key: int) -> int | None:
        return band.start + key - at if step else None

    found = [
        *(when(band.low, band.low_step, key) for key in (first_key, key_stop)),
        *(when(band.end, band.end_step, key) for key in (first_key, key_stop)),
    ]
    if band.low_step != band.end_step:
        found.append(when(band.low, band.low_step, band.end))
        found.append(when(band.end, band.end_step, band.low))
    return (query for query in found if query is not None and start < query < stop)


def _clipped(band: Band, start: int, stop: int, first_key: int, key_stop: int) -> Band | None:
    """The part of a band between two turns, with ends inside the run of keys; ``None`` if its
    queries see none of them.
    """

    def ends(query: int) -> tuple[int, int]:
        passed = query - band.start
        return (
            max(band.low + passed * band.low_step, first_key),
            min(band.end + passed * band.end_step, key_stop),
        )

    low, end = ends(start)
    last_low, last_end = ends(stop - 1)
    if low >= end:
        # An interval that opens does so behind the query at the turn.
        if stop - start > 1 and last_low < last_end:
            return _clipped(band, start + 1, stop, first_key, key_stop)
        return None
    return Band(start, stop, low, end, int(last_low > low), int(last_end > end), band.flat)


def _rectangles(band: Band) -> Iterator[Tile]:
    """A band between two turns as tiles."""
    size, width = band.stop - band.start, band.end - band.low
    if band.flat:
        yield Tile((band.start, size), (band.low, width), "flat")
    # No bound moves: every query sees the same keys.
    elif size == 1 or (not band.low_step and not band.end_step):
        yield Tile((band.start, size), (band.low, width), "full")
    # The last key moves with the query: a rectangle and a triangle below the diagonal.
    elif not band.low_step:
        yield from _tile(band.start, size, band.low, width - 1, "full")
        yield Tile((band.start, size), (band.end - 1, size), "causal")
    # The first key moves: a triangle above the diagonal and a rectangle.
    elif not band.end_step:
        yield Tile((band.start, size), (band.low, size), "flipped")
        yield from _tile(band.start, size, band.low + size, width - size, "full")
    # Both move, in a window so narrow that triangles would be many small calls: blocks with a mask.
    elif width <= NARROW:
        rows = 4 * NARROW
        for passed in range(0, size, rows):
            count = min(rows, size - passed)
            keys = (band.low + passed, width + count - 1)
            yield Tile((band.start + passed, count), keys, "masked", 0, width)
    else:
        # Both move, in a wide window: parallelograms, each two triangles and what lies between
        # them.
        for passed in range(0, size, width - 1):
            count = min(width - 1, size - passed)
            start, low, end = (at + passed for at in (band.start, band.low, band.end))
            if count == 1:
                yield Tile((start, 1), (low, width), "full")
                continue
            yield Tile((start, count), (low, count), "flipped")
            yield from _tile(start, count, low + count, width - 1 - count, "full")
            yield Tile((start, count), (end - 1, count), "causal")


def _tile(start: int, size: int, low: int, num_keys: int, kind: Kind) -> Iterator[Tile]:
    if num_keys:
        yield Tile((start, size), (low, num_keys), kind)


def place(runs: Iterable[Run], position: int) -> int:
    """Where a position lies among the things that ``runs`` hold, end to end."""
    return sum(min(start + size, position) - start for start, size in runs if start < position)


@lru_cache(maxsize=256)
def tiles_between(
    bands: Bands, queries: tuple[Run, ...], keys: tuple[Run, ...]
) -> tuple[Tile, ...]:
    """The tiles of all runs of queries with all runs of keys."""
    return tuple(tile for run in queries for other in keys for tile in tiles(bands, run, other))


def keys_seen(bands: Bands, queries: tuple[Run, ...], keys: tuple[Run, ...]) -> int:
    """How many of the keys some of the queries see."""
    runs = joined(tile.keys for tile in tiles_between(bands, queries, keys))
    return sum(size for _, size in runs)


def pairs(bands: Bands, queries: Iterable[Run]) -> int:
    """How many pairs of a query and a key that it sees there are."""
    everything = max((band.end + band.stop for band in bands), default=0)
    return sum(_pairs_in(tile) for run in queries for tile in tiles(bands, run, (0, everything)))


def _pairs_in(tile: Tile) -> int:
    rows, columns = tile.queries[1], tile.keys[1]
    if tile.kind in ("full", "flat"):
        return rows * columns
    return rows * (tile.end - tile.low) if tile.kind == "masked" else rows * (rows + 1) // 2
