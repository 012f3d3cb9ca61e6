"""Branches on whether numbers are finite: the tracer takes the one for finite numbers, and the
program checks that.

``if not torch.isfinite(x).all(): x = x.clamp(-c, c)`` mends what overflows. A graph has one branch:
the one that healthy numbers take. So ``x`` passes through an operator that raises where a number is
not finite.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.stand_ins import only_finite
from shardwright.compiler.trace.recorder import Recorder

_OF_FINITE = {
    "isfinite": True,
    "isinf": False,
    "isnan": False,
    "isposinf": False,
    "isneginf": False,
}
"""What functions say of every finite number."""
_SAME = {"all", "any", "to", "bool", "reshape", "view", "flatten", "detach"}
_NOT = {"logical_not", "bitwise_not", "__invert__"}
_BOTH = {"logical_and", "bitwise_and", "__and__", "__rand__"}
_EITHER = {"logical_or", "bitwise_or", "__or__", "__ror__"}
_FOLLOWED = _SAME | _NOT | _BOTH | _EITHER


def finite_outcome(recorder: Recorder, tensor: torch.Tensor) -> bool | None:
    """The truth value of ``tensor`` where all that it looks at is finite, which the program checks
    from here on.

    ``None`` if it looks at anything else.
    """
    looked_at: dict[str, IRValue] = {}
    outcome = _outcome(recorder, recorder.value(tensor), looked_at, {})
    if outcome is None:
        return None
    for value in looked_at.values():
        if value.name in recorder.calls and recorder.calls[value.name][0].function is only_finite:
            continue
        recorder.check(only_finite, value)
    return outcome


def _outcome(
    recorder: Recorder,
    value: IRValue,
    looked_at: dict[str, IRValue],
    known: dict[str, bool | None],
) -> bool | None:
    """``known``: the outcomes of the values that were looked at already, by name."""
    if value.name not in known:
        known[value.name] = _outcome_of_call(recorder, value, looked_at, known)
    return known[value.name]


def _outcome_of_call(
    recorder: Recorder,
    value: IRValue,
    looked_at: dict[str, IRValue],
    known: dict[str, bool | None],
) -> bool | None:
    made_by = recorder.calls.get(value.name)
    if made_by is None:
        return None
    call = made_by[0]
    # The leaves of the question: ``isfinite(x)``, of which the answer is known as x is checked to
    # be finite.
    if call.name in _OF_FINITE and isinstance(call.args[0], IRValue):
        looked_at[call.args[0].name] = call.args[0]
        return _OF_FINITE[call.name]
    # Nothing else is followed: whole models lie behind the numbers that branches look at.
    if call.name not in _FOLLOWED:
        return None
    operands: list[Any] = [arg for arg in call.args if isinstance(arg, IRValue)]
    outcomes = [_outcome(recorder, operand, looked_at, known) for operand in operands]
    # One part that is no such question, and the whole cannot be answered.
    if not outcomes or None in outcomes:
        return None
    if call.name in _SAME and len(outcomes) == 1:
        return outcomes[0]
    if call.name in _NOT:
        return not outcomes[0]
    if call.name in _BOTH:
        return all(outcomes)
    return any(outcomes) if call.name in _EITHER else None
