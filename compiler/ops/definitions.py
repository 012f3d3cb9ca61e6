"""The operators as the tables define them: by canonical name, and by the callables that mean them.

Those who look an operator up ask :mod:`shardwright.compiler.ops.registry`, which has read the
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.compiler.ops.opdef import OpDef, RuleMaker

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
