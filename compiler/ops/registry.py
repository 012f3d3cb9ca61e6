"""Look up an operator, by canonical name or by a callable that means it.

Importing this module reads the tables in ``compiler/ops/tables/``. The user's own operators come
through ``register_op``.
"""

from __future__ import annotations

from typing import Any

from shardwright.compiler.ops import tables
from shardwright.compiler.ops.definitions import CALLABLES, OPS, Normalise
from shardwright.compiler.ops.opdef import OpDef

__all__ = ["CALLABLES", "NAMES", "OPS", "Normalise", "find", "get", "tables"]

NAMES = tables.NAMES


def find(function: Any) -> tuple[OpDef, Normalise | None] | None:
    """The operator a callable means, if there is one."""
    try:
        found = CALLABLES.get(function)
    except TypeError:  # unhashable
        return None
    return (OPS[found[0]], found[1]) if found else None


def get(target: str) -> OpDef | None:
    """The operator with this canonical name, if there is one."""
    return OPS.get(target)
