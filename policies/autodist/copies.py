"""The sets of layouts that the readers of one value can want together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from shardwright.policies.autodist.conversions import MAX_GOALS, LayoutSet, union
from shardwright.policies.autodist.strategies import Ids, LayoutTable
from shardwright.runtime.layout import Mesh

MAX_SETS = 4096
"""The most sets of layouts that the copies of a value may be. Where there would be more, sets of three layouts are left out
first, then pairs, and the certificate says that the space was restricted."""


@dataclass(eq=False)
class Reader:
    """Something that reads a value: a node, with the set of layouts each choice wants; or the outside, with one set."""

    node: int | None
    wants: tuple[LayoutSet, ...]
    key: Hashable


@dataclass(eq=False)
class Maker:
    """What makes a value: a node, with the layout each choice gives; or nothing, with one layout."""

    node: int | None
    gives: Ids
    key: Hashable


def layout_sets(
    readers: Sequence[Reader], fixed: LayoutSet, table: LayoutTable, mesh: Mesh
) -> tuple[tuple[LayoutSet, ...], bool]:
    """The sets of layouts that some readers can want together, and whether these are all of them."""
    counts: dict[Hashable, int] = {}
    wants = []
    for reader in readers:  # of readers alike, more than a set can hold add nothing
        counts[reader.key] = counts.get(reader.key, 0) + 1
        if counts[reader.key] <= MAX_GOALS:
            wants.append(tuple(dict.fromkeys(reader.wants)))
    for largest in range(MAX_GOALS, 0, -1):

        def small(joined: LayoutSet, most: int = largest) -> bool:
            return len(joined) <= most

        found = _joined(wants, fixed, small)
        if found is not None:
            return found

    def alike(joined: LayoutSet) -> bool:
        """Whether two layouts have the same placement along all axes but one."""
        if len(joined) != 2:
            return len(joined) < 2
        first, second = (table[layout] for layout in joined)
        return sum(first.placement(axis) != second.placement(axis) for axis in mesh.names) <= 1

    found = _joined(wants, fixed, alike, limit=4 * MAX_SETS)
    assert found is not None
    return found


def _joined(
    wants: Sequence[Sequence[LayoutSet]], fixed: LayoutSet, fits: Callable[[LayoutSet], bool], limit: int = MAX_SETS
) -> tuple[tuple[LayoutSet, ...], bool] | None:
    """The unions of one option of each reader that fit, and whether all did; None where there are too many or none."""
    found: dict[LayoutSet, None] = {fixed: None}
    complete = True
    for options in wants:
        grown: dict[LayoutSet, None] = {}
        for base in found:
            for want in options:
                joined = union((base, want)) if base else want
                if fits(joined):
                    grown[joined] = None
                else:
                    complete = False
            if len(grown) > limit:
                return None
        found = grown
    return (tuple(found), complete) if found else None
