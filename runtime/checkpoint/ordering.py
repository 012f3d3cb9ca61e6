"""Putting the names of several ranks into one order, and their parameter groups side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Groups = tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]
"""The parameter groups of an optimizer: the names and the options of each."""


def united(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    """Both without repetitions, in an order that agrees with both; between two common names, ours go first.

    Ranks are taken in order, so what the stages of a pipeline hold follows each other as in the model.
    """
    if ours == theirs:
        return tuple(ours)
    common = set(ours) & set(theirs)
    before_common: list[list[str]] = [[]]  # of theirs: what precedes each common name, then what follows the last one
    for name in theirs:
        if name in common:
            before_common.append([])
        else:
            before_common[-1].append(name)
    if not common:
        return (*ours, *theirs)
    result: list[str] = []
    segments = iter(before_common)
    for name in ours:
        if name in common:
            result += next(segments)
        result.append(name)
    return (*result, *next(segments))


def reordered(names: Sequence[str], order: Sequence[str]) -> list[str]:
    """``names`` with those that are in ``order`` in that order, in the places they take together."""
    known = set(names)
    sorted_names = iter([name for name in order if name in known])
    ordered = set(order)
    return [next(sorted_names) if name in ordered else name for name in names]


def united_groups(ours: Groups, theirs: Groups) -> Groups:
    """Groups with equal options joined, those at the same position first.

    Ranks of a pipeline have different parameters, so they may not have the same groups. Empty ones of theirs say nothing.
    """
    result = list(ours)
    for position, (names, options) in enumerate(theirs):
        if not names:
            continue
        places = [position, *range(len(result))]
        found = next((at for at in places if at < len(result) and _alike(result[at][1], options)), None)
        if found is None:
            result.append((names, options))
        else:
            result[found] = (united(result[found][0], names), options)
    return tuple(result)


def ordered_groups(groups: Groups, first: Groups, order: Sequence[str]) -> Groups:
    """United ``groups`` with names in ``order``, the original one, unless the ``first`` rank has all of a group: its order is
    what the user's function made it.
    """
    kept = [names for names, _ in first]
    return tuple(
        (names if position < len(kept) and kept[position] == names else tuple(reordered(names, order)), options)
        for position, (names, options) in enumerate(groups)
    )


def _alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether options are equal; a learning rate may be a tensor."""
    return ours.keys() == theirs.keys() and all(bool(ours[key] == theirs[key]) for key in ours)
