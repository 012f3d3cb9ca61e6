"""States of loaders: plain values, and why one does not fit a loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.runtime.errors import DataError, brief

VERSION = 1
"""Raised when states of an earlier version mean something else."""


def _same(saved: Any, here: Any) -> bool:
    """Whether two plain values are equal; what cannot be compared is not."""
    try:
        return bool(saved == here)
    except Exception:  # a tensor has no truth value; a class may compare as it likes
        return False


def check_state(state: Any, kind: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """``state``, if it is one of ``kind`` and agrees with this loader in the entries of
    ``expected``.

    Raises :class:`DataError` that names what differs, with both values.
    """
    if not isinstance(state, Mapping) or "kind" not in state:
        raise DataError(
            f"this is no state of a loader: {brief(state)}",
            hint="load what state_dict() of a loader of shardwright.data gave",
        )
    if not (_same(state["kind"], kind) and _same(state.get("version"), VERSION)):
        raise DataError(
            f"this is the state of a {brief(state['kind'])} loader, "
            f"version {brief(state.get('version'))}",
            why=f"here is a {kind!r} loader, whose states are of version {VERSION}",
            hint="make the loader as in the run that saved the state",
        )
    missing = [name for name in ("position", *expected) if name not in state]
    if missing:
        raise DataError(f"the state of the loader has no {missing[0]!r}", why=brief(dict(state)))
    different = [name for name, value in expected.items() if not _same(state[name], value)]
    if different:
        raise DataError(
            "the state is that of another loader",
            why="; ".join(
                f"{name} was {brief(state[name])} and is {brief(expected[name])}"
                for name in different
            ),
            hint="make the loader as in the run that saved the state, or begin anew without it",
        )
    if type(state["position"]) is not int or state["position"] < 0:
        raise DataError(f"position {brief(state['position'])} is no place in the data")
    return dict(state)
