"""The table of all operators: by canonical name, and by the callables that mean them.

The entries stand in ``compiler/ops/tables/``; :func:`define` adds one. The user's own come through
``register_op``.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.compiler.ops.opdef import OpDef, RuleMaker
from shardwright.compiler.ops.originals import unpatched

_TABLES = "shardwright.compiler.ops.tables"


class _Loading:
    """How far the tables are."""

    lock = threading.RLock()
    is_done = False


_loading = _Loading()

Normalise = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Rewrites the arguments of an alias into those of the canonical operator (swapped operands, fixed
dtypes).
"""

OPS: dict[str, OpDef] = {}
CALLABLES: dict[Any, tuple[str, Normalise | None]] = {}


def define(
    name: str,
    signature: str,
    code: str,
    rule: RuleMaker | str,
    *aliases: Any,
    renames: Mapping[str, str] | None = None,
) -> OpDef:
    """Add an operator. ``aliases`` are the callables that mean it: ``F.linear``,
    ``torch.Tensor.add``, or pairs ``(callable, normalise)`` where the arguments must be rewritten
    first. A ``rule`` string is the same for every call.
    """
    maker = rule if callable(rule) else (lambda op, text=rule: text)
    assert name not in OPS, f"operator {name} defined twice"
    OPS[name] = opdef = OpDef(name, signature, code, maker, renames)
    for alias in aliases:
        function, normalise = alias if isinstance(alias, tuple) else (alias, None)
        assert function not in CALLABLES, (
            f"{function} means both {CALLABLES[function][0]} and {name}"
        )
        CALLABLES[function] = (name, normalise)
    return opdef


def find(function: Any) -> tuple[OpDef, Normalise | None] | None:
    """The operator a callable means, if there is one."""
    load_tables()
    try:
        found = CALLABLES.get(function)
    except TypeError:  # unhashable
        return None
    return (OPS[found[0]], found[1]) if found else None


def get(target: str) -> OpDef | None:
    """The operator with this canonical name, if there is one."""
    load_tables()
    return OPS.get(target)


def load_tables() -> None:
    """Import the tables (once)."""
    if _loading.is_done:
        return
    with _loading.lock:
        if (
            not _loading.is_done and _TABLES not in sys.modules
        ):  # the tables may ask while they are loaded
            with unpatched() as stand_ins:
                importlib.import_module(_TABLES)
            _loading.is_done = True
            _tell_of_lost(
                [name for function, name in stand_ins.items() if CALLABLES.pop(function, None)]
            )


def _tell_of_lost(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"{', '.join(names)} had been replaced before the first compile\n"
            "  why:   the function of torch that stood there cannot be found: where it is "
            "called, its operator has no rule\n"
            "  try:   import shardwright.compiler.ops.tables before it is replaced",
            stacklevel=2,
        )
