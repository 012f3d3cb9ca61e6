"""Runs: which of a number of things, laid end to end, each of several places gets.

Nothing here knows of tensors or meshes. Of 8 things on 2 places the first has the run ``(0, 4)``,
start and size, the second ``(4, 4)``. In zigzag each has two runs, ``(0, 2), (6, 2)`` and ``(2, 2),
(4, 2)``: where later things cost more, as in causal attention, all places have the same work.
Numbers that do not divide give the first places one thing more; a place may get nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


def piece(count: int, num_pieces: int, index: int) -> tuple[int, int]:
    """``(start, size)`` of piece ``index`` when ``count`` things are cut evenly; the first pieces
    get what is left over.
    """
    base, extra = divmod(count, num_pieces)
    return index * base + min(index, extra), base + (index < extra)


Run = tuple[int, int]
"""``(start, size)`` of things that lie one behind the other."""


def dealt(count: int, num_pieces: int, index: int, *, zigzag: bool) -> tuple[Run, ...]:
    """The runs of piece ``index`` when an axis deals ``count`` things, ascending: one, or in zigzag
    two. Either way it is :func:`piece` that says how many they are.
    """
    start, size = piece(count, num_pieces, index)
    if not zigzag:
        return ((start, size),)
    # Of every piece the larger half lies in front, in the order of the ranks, the other half
    # behind, in the reverse order.
    in_front = _front_halves(count, num_pieces, index)
    half = (size + 1) // 2
    behind = (start - in_front) + (size - half)  # the other halves up to this rank's
    return (in_front, half), (count - behind, size - half)


class PlaceOnAxis:
    """A place among the ``size`` places of an axis, and so which part of what the axis deals is
    there: that of a rank, or of a turn of a loop.
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
    def zigzag(self) -> bool:
        """Whether the axis deals in zigzag."""
        return False

    def local_size(self, count: int) -> int:
        """How many of ``count`` things are here when the axis cuts them."""
        return piece(count, self.size, self.index)[1]

    def offset(self, count: int) -> int:
        """Where this place's piece of ``count`` things begins; it is one run."""
        assert not self.zigzag, f"a piece along {self} is two runs"
        return piece(count, self.size, self.index)[0]

    def holds(self, index: int, count: int) -> int:
        """1 if thing ``index`` of ``count`` is here when the axis cuts them, else 0."""
        return int(any(start <= index < start + size for start, size in self.runs(count)))

    def runs(self, count: int) -> tuple[Run, ...]:
        """Where this place's piece of ``count`` things lies."""
        return dealt(count, self.size, self.index, zigzag=self.zigzag)


def _front_halves(count: int, num_pieces: int, index: int) -> int:
    """How many things lie in the front halves of the first ``index`` pieces."""
    base, extra = divmod(count, num_pieces)
    longer = min(index, extra)
    return longer * ((base + 2) // 2) + (index - longer) * ((base + 1) // 2)


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


def within(runs: Iterable[Run], inner: Iterable[Run]) -> tuple[Run, ...]:
    """What ``inner``, runs of the things that ``runs`` hold together, are of the whole."""
    found: list[Run] = []
    for start, size in inner:
        passed = 0
        for begin, length in runs:
            low, high = max(start, passed), min(start + size, passed + length)
            if low < high:
                found.append((begin + low - passed, high - low))
            passed += length
    return tuple(found)
