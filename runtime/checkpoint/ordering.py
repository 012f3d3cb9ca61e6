"""Putting the names of several ranks into one order, and their parameter groups side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.errors import CheckpointError

Groups = tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]
"""The parameter groups of an optimizer: the names and the options of each."""


def united(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    """Both without repetitions, in an order that agrees with both; between two common names, ours
    go first.

    Ranks are taken in order, so what the stages of a pipeline hold follows each other as in the
    model.
    """
    if ours == theirs:
        return tuple(ours)
    common = set(ours) & set(theirs)
    # Of theirs: what precedes each common name, then what follows the last one.
    before_common: list[list[str]] = [[]]
    for name in theirs:
        if name in common:
            before_common.append([])
        else:
            before_common[-1].append(name)
    if not common:
        return (*ours, *theirs)
    # Ours, with what precedes each common name of theirs in front of it.
    result: list[str] = []
    segments = iter(before_common)
    for name in ours:
        if name in common:
            result += next(segments)
        result.append(name)
    return (*result, *next(segments))


def reordered(names: Sequence[str], order: Sequence[str]) -> list[str]:
    """``names`` with those that are in ``order`` in that order, in the places they take
    together.
    """
    known = set(names)
    sorted_names = iter([name for name in order if name in known])
    ordered = set(order)
    return [next(sorted_names) if name in ordered else name for name in names]


def united_groups(ours: Groups, theirs: Groups) -> Groups:
    """The groups of two ranks, each with the parameters of both: ranks of a pipeline have different
    ones.

    Raises :class:`CheckpointError` if the ranks have another number of groups, or other options of
    one.
    """
    if len(ours) != len(theirs):
        raise CheckpointError(
            "the ranks have different parameter groups",
            why=f"{len(ours)} and {len(theirs)} of them",
            hint=_GROUPS_HINT,
        )
    result = []
    # Groups by position: the same options, members joined.
    for number, ((names, options), (other_names, others)) in enumerate(
        zip(ours, theirs, strict=True)
    ):
        if not alike(options, others):
            keys = [
                key
                for key in (*options, *others)
                if not alike(_only(options, key), _only(others, key))
            ]
            raise CheckpointError(
                "the ranks have different parameter groups",
                why=f"in group {number} {keys[0]!r} is {options.get(keys[0])!r} and "
                f"{others.get(keys[0])!r}",
                hint=_GROUPS_HINT,
            )
        result.append((united(names, other_names), options))
    return tuple(result)


_GROUPS_HINT = (
    "make the optimizer with build_optimizer(..., param_groups=fn); change options of its groups "
    "on all ranks"
)


def ordered_groups(groups: Groups, first: Groups, order: Sequence[str]) -> Groups:
    """United ``groups`` with names in ``order``, the original one, unless the ``first`` rank has
    all of a group: its order is what the user's function made it.
    """
    ordered = []
    for position, (names, options) in enumerate(groups):
        # The last groups may be on other ranks alone.
        is_kept = position < len(first) and first[position][0] == names
        ordered.append((names if is_kept else tuple(reordered(names, order)), options))
    return tuple(ordered)


def alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether options are equal; a learning rate may be a tensor."""
    return ours.keys() == theirs.keys() and all(_is_equal(ours[key], theirs[key]) for key in ours)


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours.cpu(), theirs.cpu())
    return bool(ours == theirs)


def _only(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: options[key]} if key in options else {}
