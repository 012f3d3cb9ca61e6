"""The sets of layouts that the readers of one value can want together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardwright.policies.autodist.placement.conversions import MAX_GOALS, LayoutSet, union
from shardwright.policies.autodist.placement.emission import OUTSIDE, BodyPlace
from shardwright.policies.autodist.placement.strategies import Ids

MAX_SETS = 128
"""The most sets that are told apart. A value that could be wanted in more is read by way of one
shared copy.
"""


@dataclass(eq=False)
class Reader:
    """Something that reads a value: a node, with the set of layouts each choice wants; or the
    outside, with one set. ``place``: of the operator, or the end. ``keeps``: whether it keeps the
    value, a parameter, for its backward.
    """

    node: int | None
    wants: tuple[LayoutSet, ...]
    key: Hashable
    place: BodyPlace = OUTSIDE
    keeps: bool = False


@dataclass(eq=False)
class Maker:
    """What makes a value: a node, with the layout each choice gives; or nothing, with one
    layout.
    """

    node: int | None
    gives: Ids
    key: Hashable


def layout_sets(
    readers: Sequence[Reader], fixed: LayoutSet
) -> tuple[tuple[LayoutSet, ...], bool] | None:
    """The sets of at most :data:`MAX_GOALS` layouts that some readers can want together, and
    whether these are all of them; None where they are too many to tell apart.
    """
    counts: dict[Hashable, int] = {}
    found: dict[LayoutSet, None] = {fixed: None}
    complete = True
    for reader in readers:
        counts[reader.key] = counts.get(reader.key, 0) + 1
        if counts[reader.key] > MAX_GOALS:
            continue  # of readers alike, more than a set can hold add nothing
        joined = {union((base, want)) for base in found for want in dict.fromkeys(reader.wants)}
        grown = sorted(wanted for wanted in joined if len(wanted) <= MAX_GOALS)
        complete = complete and len(grown) == len(joined)
        if not grown or len(grown) > MAX_SETS:
            return None
        found = dict.fromkeys(grown)
    return tuple(found), complete
