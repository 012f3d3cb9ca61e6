"""Regions: which elements of a whole tensor a piece holds, and copying what two pieces have in
common.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import Coords

Runs = tuple[tuple[int, int], ...]
"""Ascending, disjoint ``(start, stop)`` along one dim of the whole."""

Fragment = tuple[int, int, int]
"""``(start in the target, start in the source, length)`` along one dim."""

MANY_FRAGMENTS = 8
"""A dim in more fragments is copied by index: one call, but a temporary as large as what is
copied.
"""


@dataclass(frozen=True, slots=True)
class Region:
    """The product over the dims of ``runs``. A piece stores these elements in their global order.

    Rank 1's half of a fused query-key-value of 3 x 12 x 64 is ``(((384, 768), (1152, 1536), (1920,
    2304)), ((0, 768),))``.
    """

    runs: tuple[Runs, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Region:
        """All elements of a tensor of that shape."""
        return cls(tuple(((0, size),) if size else () for size in shape))

    @classmethod
    def of(cls, layout: Layout, mesh: Mesh, coords: Coords) -> Region:
        """What the rank at ``coords`` holds of a tensor with this layout."""
        return cls(tuple(layout.runs(dim, mesh, coords) for dim in range(len(layout.dims))))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a region of a tensor of that shape: along each dim its runs ascend, are not
        empty, and lie inside.
        """
        if len(self.runs) != len(shape):
            return False
        for runs, size in zip(self.runs, shape, strict=True):
            previous = 0
            for start, stop in runs:
                # The invariant: all runs so far end at or before ``previous``.
                if not previous <= start < stop <= size:
                    return False
                previous = stop
        return True

    def parts(self, start: int, stop: int) -> tuple[Region, ...]:
        """The elements ``start`` to ``stop`` of the flattened piece, as regions whose elements
        follow each other there.

        Rows 1 to 3 of a piece 4 x 6 are one region; elements 4 to 15 of it are three, as row 0 and
        row 2 are not whole.
        """
        if start >= stop:
            return ()
        boxes = _boxes(self.shape, start, stop)
        return tuple(Region(tuple(map(_within, self.runs, box))) for box in boxes)

    def to_json(self) -> list[list[list[int]]]:
        return [[list(run) for run in runs] for runs in self.runs]

    @classmethod
    def from_json(cls, data: Any) -> Region:
        return cls(tuple(tuple((int(start), int(stop)) for start, stop in runs) for runs in data))


Cells = dict[frozenset[int], int]
"""How many elements lie in a combination of regions, given by their numbers, and in no others."""


def cells(regions: Sequence[Region]) -> Cells:
    """How many elements lie in each combination of ``regions``.

    Rows 0 to 2 and rows 1 to 3 of a tensor with 4 columns have two rows in common: ``{{0}: 4, {0,
    1}: 4, {1}: 4}``. Elements that lie in no region are not counted. The regions are of one tensor.
    """
    numbers = frozenset(number for number, region in enumerate(regions) if region.num_elements)
    return _cells(regions, numbers, 0, {}) if numbers else {}


def _cells(
    regions: Sequence[Region], numbers: frozenset[int], dim: int, known: dict[Any, Any]
) -> Cells:
    """The answer for some of the regions and the dims from ``dim`` on. ``known``: answers, as
    slices are often cut alike.
    """
    if dim == len(regions[0].runs):
        return {numbers: 1}
    counts: Cells = known.setdefault((numbers, dim), {})
    if counts:
        return counts
    # Between two neighbouring starts or stops along the dim, the same regions hold all positions.
    widths: Cells = {}
    for active, width in _stretches(regions, numbers, dim):
        widths[active] = widths.get(active, 0) + width
    for active, width in widths.items():
        for members, count in _cells(regions, active, dim + 1, known).items():
            counts[members] = counts.get(members, 0) + width * count
    return counts


def _stretches(
    regions: Sequence[Region], numbers: frozenset[int], dim: int
) -> Iterator[tuple[frozenset[int], int]]:
    """Stretches of positions along a dim, each with the regions that hold it and its length."""
    # Where a region begins to hold positions, and where it ends to.
    changes: dict[int, list[tuple[int, int]]] = {}
    for number in numbers:
        for start, stop in regions[number].runs[dim]:
            changes.setdefault(start, []).append((number, 1))
            changes.setdefault(stop, []).append((number, -1))
    active: dict[int, int] = {}  # one run may begin where another one of the same region ends
    previous = 0
    for position in sorted(changes):
        holders = frozenset(number for number, count in active.items() if count)
        if holders and position > previous:
            yield holders, position - previous
        for number, change in changes[position]:
            active[number] = active.get(number, 0) + change
        active = {number: count for number, count in active.items() if count}
        previous = position


def num_covered(needed: Sequence[Region], given: Sequence[Region]) -> int:
    """How many of the elements that lie in a ``needed`` region lie in a ``given`` one too. Each is
    counted once.
    """
    found = cells([*needed, *given])
    return sum(
        count for members, count in found.items() if min(members) < len(needed) <= max(members)
    )


def untiled(regions: Sequence[Region], shape: Sequence[int]) -> str | None:
    """Why, in words, ``regions`` are not a tiling of a tensor of that shape, which has each element
    in exactly one of them; ``None`` if they are one.
    """
    whole = Region.whole(shape)
    for region in regions:
        if not region.fits(shape):
            return f"a piece lies outside of {list(shape)}"
    found = cells([whole, *regions])
    # Cells are told by which regions cover them; number 0 is the whole tensor.
    missing = found.get(frozenset((0,)), 0)
    if missing:
        return f"{missing} of {whole.num_elements} elements are in no piece"
    twice = sum(count for members, count in found.items() if len(members) > 2)
    return f"{twice} of {whole.num_elements} elements are in several pieces" if twice else None


def copy_shared(
    target: Tensor, target_region: Region, source: Tensor, source_region: Region
) -> int:
    """Copy into the piece ``target`` what the piece ``source`` holds of it, converting the dtype.
    Returns how many elements.

    Only those elements of ``source`` are read, so it may be a view of a mapped file.
    """
    assert tuple(target.shape) == target_region.shape and tuple(source.shape) == source_region.shape
    # What both pieces hold, as stretches along each dim.
    fragments = _fragments(target_region, source_region)
    # Many short stretches along one dim are copied by index, at once.
    most = max(range(len(fragments)), key=lambda dim: len(fragments[dim]), default=0)
    by_index = bool(fragments) and len(fragments[most]) > MANY_FRAGMENTS
    looped = [
        [(0, 0, -1)] if by_index and dim == most else parts for dim, parts in enumerate(fragments)
    ]
    with torch.no_grad():
        for block in itertools.product(*looped):
            into, out_of = target, source
            for dim, (target_start, source_start, length) in enumerate(block):
                if length >= 0:
                    into, out_of = (
                        into.narrow(dim, target_start, length),
                        out_of.narrow(dim, source_start, length),
                    )
            if by_index:
                to, of = _positions(fragments[most])
                values = out_of.index_select(most, of.to(source.device))
                into.index_copy_(most, to.to(target.device), values.to(target))
            else:
                into.copy_(out_of)
    return math.prod(sum(length for _, _, length in parts) for parts in fragments)


def _boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, int], ...]]:
    """The blocks that elements ``start`` to ``stop`` of a flattened tensor make up, in order. A
    block is ``(start, stop)`` of each dim. There is at least one element.
    """
    if not shape:
        return [()]
    inner = math.prod(shape[1:])
    # A part of the first row, whole rows, a part of the last row.
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        return [((first, first + 1), *box) for box in _boxes(shape[1:], head, tail)]
    boxes: list[tuple[tuple[int, int], ...]] = []
    if head:
        boxes += [((first, first + 1), *box) for box in _boxes(shape[1:], head, inner)]
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, size) for size in shape[1:])))
    if tail:
        boxes += [((last, last + 1), *box) for box in _boxes(shape[1:], 0, tail)]
    return boxes


def _within(runs: Runs, bounds: tuple[int, int]) -> Runs:
    """What positions ``bounds`` of a piece along one dim are of the whole."""
    kept, offset = [], 0
    for start, stop in runs:
        low, high = max(bounds[0], offset), min(bounds[1], offset + stop - start)
        if low < high:
            kept.append((start + low - offset, start + high - offset))
        offset += stop - start
    return tuple(kept)


def _fragments(target: Region, source: Region) -> list[list[Fragment]]:
    """What two regions have in common, per dim."""
    return [_common(a, b) for a, b in zip(target.runs, source.runs, strict=True)]


def _common(target: Runs, source: Runs) -> list[Fragment]:
    found: list[Fragment] = []
    i = j = target_offset = source_offset = 0
    # Two sorted lists of runs, walked together.
    while i < len(target) and j < len(source):
        (target_start, target_stop), (source_start, source_stop) = target[i], source[j]
        start, stop = max(target_start, source_start), min(target_stop, source_stop)
        if start < stop:
            found.append(
                (
                    target_offset + start - target_start,
                    source_offset + start - source_start,
                    stop - start,
                )
            )
        # The run that ends first is done.
        if target_stop <= source_stop:
            i, target_offset = i + 1, target_offset + target_stop - target_start
        if source_stop <= target_stop:
            j, source_offset = j + 1, source_offset + source_stop - source_start
    return _joined(found)


def _joined(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Fragments that lie end to end on both sides as one: runs of two pieces cut alike are copied
    at once.
    """
    joined: list[Fragment] = []
    for target, source, length in fragments:
        if joined:
            last_target, last_source, last_length = joined[-1]
            if (last_target + last_length, last_source + last_length) == (target, source):
                joined[-1] = (last_target, last_source, last_length + length)
                continue
        joined.append((target, source, length))
    return joined


def _positions(fragments: Sequence[Fragment]) -> tuple[Tensor, Tensor]:
    """The positions of all fragments in the target and in the source."""
    target = [torch.arange(start, start + length) for start, _, length in fragments]
    source = [torch.arange(start, start + length) for _, start, length in fragments]
    return torch.cat(target), torch.cat(source)
