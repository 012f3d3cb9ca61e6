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
(``flat``). What many small tiles would take is one with a mask: a window narrower than
:data:`NARROW`, or several bands, where computing more pairs costs less than more calls
(:func:`joined_tiles`). Every query of a tile without a mask sees a key of it, as kernels disagree
about queries that see none.

The queries and keys of a rank may be several runs. :func:`local_bands` counts them as they lie
there, end to end, so that a tile may go over the border of two runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from shardwright.runtime.runs import Run, common, joined

NARROW = 64
"""The width from which on a window is computed in tiles without a mask."""

MOST_GUESTS = 0.5
"""How many queries of others a rank computes at most, as a part of its own, where documents leave
ranks unequal work.

Half is what evens out a causal row of which each of many ranks has one piece, the most unequal row
of one document. Packed rows need less: 33 documents of log-normal lengths 0.4 at most on 16 ranks.
"""

EVEN = 1.02
"""The pairs of the busiest rank over the mean up to which no query moves to another rank."""

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
    """Queries and keys of which each query sees what ``kind`` says. ``ends``: in a masked tile, of
    each query the first of the tile's keys that it sees, and the first behind these.
    """

    queries: Run
    keys: Run
    kind: Kind
    ends: tuple[Run, ...] = ()

    @property
    def num_pairs(self) -> int:
        """The pairs of a query and a key that it sees."""
        rows, columns = self.queries[1], self.keys[1]
        if self.kind in ("full", "flat"):
            return rows * columns
        if self.kind == "masked":
            return sum(end - low for low, end in self.ends)
        return rows * (rows + 1) // 2


def tiles(bands: Iterable[Band], queries: Run, keys: Run) -> Iterator[Tile]:
    """The tiles of a run of queries with a run of keys."""
    first_key, key_stop = keys[0], keys[0] + keys[1]
    for band in bands:
        start, stop = max(band.start, queries[0]), min(band.stop, queries[0] + queries[1])
        if start >= stop or first_key >= key_stop:
            continue
        # Between two corners the first and the last key move evenly with the query.
        marks = sorted({start, stop, *_corners(band, start, stop, first_key, key_stop)})
        for a, b in pairwise(marks):
            piece = _clipped(band, a, b, first_key, key_stop)
            if piece is not None:
                yield from _rectangles(piece)


def _corners(band: Band, start: int, stop: int, first_key: int, key_stop: int) -> Iterator[int]:
    """The queries from which on another bound holds: one of the run of keys takes over from an end
    of the interval or hands over to it, or the interval opens or closes.
    """

    def when(at: int, step: int, key: int) -> int | None:
        return band.start + key - at if step else None

    found = [when(band.low, band.low_step, key_stop), when(band.end, band.end_step, first_key)]
    # The query at which an end of the interval is at a bound of the keys goes with those on the
    # side on which there are more: alone it would be a tile of one query.
    entering = when(band.low, band.low_step, first_key)
    if entering is not None and entering < stop - 1:
        found.append(entering)
    leaving = when(band.end, band.end_step, key_stop)
    if leaving is not None and leaving > start:
        found.append(leaving + 1)
    # The interval grows or shrinks: somewhere its ends meet.
    if band.low_step != band.end_step:
        found.append(when(band.low, band.low_step, band.end))
        found.append(when(band.end, band.end_step, band.low))
    return (query for query in found if query is not None and start < query < stop)


def _clipped(band: Band, start: int, stop: int, first_key: int, key_stop: int) -> Band | None:
    """The part of a band between two corners, with ends inside the run of keys; ``None`` if its
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
        # An interval that opens does so behind the query at the corner.
        if stop - start > 1 and last_low < last_end:
            return _clipped(band, start + 1, stop, first_key, key_stop)
        return None
    return Band(start, stop, low, end, int(last_low > low), int(last_end > end), band.flat)


def _rectangles(band: Band) -> Iterator[Tile]:
    """A band between two corners as tiles."""
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
            ends = tuple((row, row + width) for row in range(count))
            yield Tile((band.start + passed, count), keys, "masked", ends)
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


@dataclass(frozen=True, slots=True)
class _Places:
    """Where things lie among those that runs hold, end to end."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    before: tuple[int, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Places:
        sizes = tuple(size for _, size in runs)
        return cls(tuple(start for start, _ in runs), sizes, tuple(accumulate(sizes, initial=0)))

    def place(self, position: int) -> int:
        """How many of the things lie before a position."""
        run = bisect_right(self.starts, position) - 1
        if run < 0:
            return 0
        return self.before[run] + min(position - self.starts[run], self.sizes[run])

    def borders(self, low: int, high: int) -> Iterator[int]:
        """The positions between two at which a run begins or ends."""
        run = max(0, bisect_right(self.starts, low) - 1)
        while run < len(self.starts) and self.starts[run] < high:
            for border in (self.starts[run], self.starts[run] + self.sizes[run]):
                if low < border < high:
                    yield border
            run += 1


def clips(bands: Bands, runs: Iterable[Run]) -> Iterator[tuple[Band, int, int]]:
    """The bands that meet runs of queries, and from which query up to which."""
    stops = [band.stop for band in bands]
    for start, size in runs:
        index = bisect_right(stops, start)
        while index < len(bands) and bands[index].start < start + size:
            band = bands[index]
            yield band, max(band.start, start), min(band.stop, start + size)
            index += 1


@lru_cache(maxsize=256)
def local_bands(bands: Bands, queries: tuple[Run, ...], keys: tuple[Run, ...]) -> Bands:
    """What the queries see of the keys, both runs, ascending; all are counted as they lie there,
    end to end.
    """
    own, theirs = _Places.of(queries), _Places.of(keys)
    found: list[Band] = []
    for band, start, stop in clips(bands, queries):
        # Between two borders an end of the interval moves on through keys, or stands still while it
        # moves where none are.
        corners = {start, stop}
        for at, step in ((band.low, band.low_step), (band.end, band.end_step)):
            if step:
                shift = at - band.start
                borders = theirs.borders(start + shift, stop + shift)
                corners |= {border - shift for border in borders}
        for a, b in pairwise(sorted(corners)):
            borders_of_band = ((band.low, band.low_step), (band.end, band.end_step))
            first, last = (
                tuple(theirs.place(at + (q - band.start) * step) for at, step in borders_of_band)
                for q in (a, b - 1)
            )
            if last[1] <= first[0]:
                continue
            steps = (int(last[0] > first[0]), int(last[1] > first[1]))
            begin = own.place(a)
            piece = Band(
                begin, begin + b - a, first[0], first[1], steps[0], steps[1], flat=band.flat
            )
            if not found or not _goes_on(found, piece):
                found.append(piece)
    return tuple(found)


def _goes_on(found: list[Band], band: Band) -> bool:
    """Make a band part of the last one, if both are one."""
    last = found[-1]
    if last.stop != band.start or last.flat != band.flat:
        return False
    passed = band.start - last.start
    steps = []
    for at, step, next_at, next_step in (
        (last.low, last.low_step, band.low, band.low_step),
        (last.end, last.end_step, band.end, band.end_step),
    ):
        # How an end moves is open where there is one query.
        if passed == 1:
            step = next_at - at
        if step not in (0, 1) or next_at != at + passed * step:
            return False
        if band.stop - band.start > 1 and next_step != step:
            return False
        steps.append(step)
    found[-1] = replace(last, stop=band.stop, low_step=steps[0], end_step=steps[1])
    return True


@lru_cache(maxsize=256)
def joined_tiles(bands: Bands, num_keys: int, call_pairs: int = 0) -> tuple[Tile, ...]:
    """The tiles of bands, those of neighbouring bands as one with a mask where computing the pairs
    in between costs less than the calls saved: a call costs as much as ``call_pairs`` pairs.
    """
    groups: list[tuple[list[Band], list[Tile]]] = []
    """Bands that become one tile, or a single one and its tiles."""
    spent = 0
    """What the last group costs, in pairs."""
    for band in bands:
        own = list(tiles((band,), (band.start, band.stop - band.start), (0, num_keys)))
        cost = sum(tile.num_pairs + call_pairs for tile in own)
        if groups and call_pairs and not (band.flat or groups[-1][0][0].flat):
            group = groups[-1][0]
            # The keys that any query of the joined tile sees, with those in between.
            low, end = _hull([*group, band])
            together = (band.stop - group[0].start) * (end - low) + call_pairs
            if together < spent + cost:
                group.append(band)
                spent = together
                continue
        groups.append(([band], own))
        spent = cost
    return tuple(
        tile for group, own in groups for tile in (own if len(group) == 1 else [_masked(group)])
    )


def _hull(bands: Sequence[Band]) -> tuple[int, int]:
    """The first key that some query of the bands sees, and the first behind all of them."""
    low = min(band.low for band in bands)
    end = max(band.end + (band.stop - 1 - band.start) * band.end_step for band in bands)
    return low, end


def _masked(bands: Sequence[Band]) -> Tile:
    """Bands as one tile with a mask."""
    start, stop = bands[0].start, bands[-1].stop
    low, end = _hull(bands)
    ends = [(0, 0)] * (stop - start)
    for band in bands:
        for passed in range(band.stop - band.start):
            first = band.low + passed * band.low_step - low
            behind = band.end + passed * band.end_step - low
            ends[band.start - start + passed] = (first, max(first, behind))
    return Tile((start, stop - start), (low, end - low), "masked", tuple(ends))


def seen_runs(bands: Bands, queries: Iterable[Run]) -> tuple[Run, ...]:
    """The keys that some of the queries see."""
    found = []
    for band, start, stop in clips(bands, queries):
        low = band.low + (start - band.start) * band.low_step
        end = band.end + (stop - 1 - band.start) * band.end_step
        # An interval that moves as a whole may be none.
        if band.low_step and band.end_step and band.end <= band.low:
            continue
        found.append((low, end - low))
    return joined((low, size) for low, size in found if size > 0)


def keys_seen(bands: Bands, queries: tuple[Run, ...], keys: tuple[Run, ...]) -> int:
    """How many of the keys some of the queries see."""
    return sum(size for _, size in common(seen_runs(bands, queries), keys))


def pairs(bands: Bands, queries: Iterable[Run]) -> int:
    """How many pairs of a query and a key that it sees there are."""
    everything = max((band.end + band.stop for band in bands), default=0)
    return sum(
        tile.num_pairs
        for band, start, stop in clips(bands, queries)
        for tile in tiles((band,), (start, stop - start), (0, everything))
    )
