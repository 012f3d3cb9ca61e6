"""Runs: which of a number of things, laid end to end, each of several places gets.

Nothing here knows of tensors or meshes. Of 8 things on 2 places the first has the run ``(0, 4)``,
start and size, the second ``(4, 4)``. In **zigzag** each has two runs, ``(0, 2), (6, 2)`` and
``(2, 2), (4, 2)``: where later things cost more, as in causal attention, all places have the same
work. In several **turns** of zigzag the things are dealt again and again: in two turns the first
has ``(0, 1), (3, 1), (4, 1), (7, 1)``. That gives all places the same work also where cost grows
several times anew, as in rows of several documents. Numbers that do not divide give the first
places one thing more; a place may get nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice


def piece(count: int, num_pieces: int, index: int) -> tuple[int, int]:
    """``(start, size)`` of piece ``index`` when ``count`` things are cut evenly; the first pieces
    get what is left over.
    """
    base, extra = divmod(count, num_pieces)
    return index * base + min(index, extra), base + (index < extra)


Run = tuple[int, int]
"""``(start, size)`` of things that lie one behind the other."""


@lru_cache(maxsize=4096)
def dealt(count: int, num_pieces: int, index: int, *, turns: int) -> tuple[Run, ...]:
    """The runs of piece ``index`` when an axis deals ``count`` things, ascending: one for ``turns``
    of 0, else two for each turn of zigzag. Either way it is :func:`piece` that says how many things
    they are.
    """
    if not turns:
        return (piece(count, num_pieces, index),)
    # Every piece is cut into two runs for each turn. The first runs of all pieces come first, in
    # the order of the pieces, then the second ones in the reverse order, and so on.
    base, extra = divmod(count, num_pieces)
    num_runs = 2 * turns
    before, others = min(index, extra), index - min(index, extra)  # longer, shorter pieces before
    found = []
    for number in range(num_runs):
        start_longer, longer = piece(base + 1, num_runs, number)
        start_shorter, shorter = piece(base, num_runs, number)
        own = longer if index < extra else shorter
        earlier = extra * start_longer + (num_pieces - extra) * start_shorter
        in_front = before * longer + others * shorter
        if number % 2:
            in_front = extra * longer + (num_pieces - extra) * shorter - in_front - own
        found.append((earlier + in_front, own))
    return tuple(found)


class PlaceOnAxis:
    """A place among the ``size`` places of an axis, and so which part of what the axis deals is
    there: that of a rank, or of a pass of a loop.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        """The number of places."""
        raise NotImplementedError

    @property
    def index(self) -> int:
        """Which of them this is."""
        raise NotImplementedError

    @property
    def turns(self) -> int:
        """The turns of zigzag in which the axis deals; 0: one run to each place."""
        return 0

    def local_size(self, count: int) -> int:
        """How many of ``count`` things are here when the axis cuts them."""
        return piece(count, self.size, self.index)[1]

    def offset(self, count: int) -> int:
        """Where this place's piece of ``count`` things begins; it is one run."""
        assert not self.turns, f"a piece along {self} is several runs"
        return piece(count, self.size, self.index)[0]

    def holds(self, index: int, count: int) -> int:
        """1 if thing ``index`` of ``count`` is here when the axis cuts them, else 0."""
        return int(self.place_of(index, count) >= 0)

    def place_of(self, index: int, count: int) -> int:
        """Where thing ``index`` of ``count`` is among those here; -1 if it is none of them."""
        before = 0
        for start, size in self.runs(count):
            if start <= index < start + size:
                return before + index - start
            before += size
        return -1

    def runs(self, count: int) -> tuple[Run, ...]:
        """Where this place's piece of ``count`` things lies."""
        return dealt(count, self.size, self.index, turns=self.turns)


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs in ascending order, those that touch or overlap as one."""
    found: list[Run] = []
    for start, size in sorted(runs):
        if not size:
            continue
        if found and start <= sum(found[-1]):
            begin = found[-1][0]
            found[-1] = begin, max(sum(found[-1]), start + size) - begin
        else:
            found.append((start, size))
    return tuple(found)


def common(runs: Iterable[Run], others: Sequence[Run]) -> tuple[Run, ...]:
    """What runs have in common with others, both ascending and disjoint."""
    found: list[Run] = []
    first = 0
    """The first of the others that does not end before the run at hand."""
    for start, size in runs:
        # Both ascend, so what ends before this run ends before all later ones.
        while first < len(others) and sum(others[first]) <= start:
            first += 1
        for begin, length in islice(others, first, None):
            if begin >= start + size:
                break
            low, high = max(start, begin), min(start + size, begin + length)
            if low < high:
                found.append((low, high - low))
    return tuple(found)


def without(runs: Iterable[Run], others: Sequence[Run]) -> tuple[Run, ...]:
    """What runs have that others do not, both ascending and disjoint."""
    found: list[Run] = []
    for start, size in runs:
        at = start
        for begin, length in common(((start, size),), others):
            found.append((at, begin - at))
            at = begin + length
        found.append((at, start + size - at))
    return joined(found)


def places_of(runs: Sequence[Run], inner: Iterable[Run]) -> tuple[Run, ...]:
    """Where ``inner``, parts of the runs, lie among what these hold end to end; the reverse of
    :func:`within`.
    """
    found: list[Run] = []
    before = 0
    parts = iter(common(runs, sorted(inner)))
    part = next(parts, None)
    for start, size in runs:
        while part is not None and part[0] < start + size:
            found.append((before + part[0] - start, part[1]))
            part = next(parts, None)
        before += size
    return joined(found)


def within(runs: Iterable[Run], inner: Iterable[Run]) -> tuple[Run, ...]:
    """What ``inner``, runs of the things that ``runs`` hold together, are of the whole."""
    found: list[Run] = []
    for start, size in inner:
        # How many of the things held come before this run.
        passed = 0
        for begin, length in runs:
            low, high = max(start, passed), min(start + size, passed + length)
            if low < high:
                found.append((begin + low - passed, high - low))
            passed += length
    return tuple(found)
