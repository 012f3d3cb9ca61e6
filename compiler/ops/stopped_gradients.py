"""Operators of users that give some of their operands no gradient.

The backward of an autograd Function may return ``None`` for an operand. The model before it then
gets no gradient through this operator, and nobody may send one: zeros would be a gradient, by which
weight decay and momentum change parameters. Only running the operator shows it, on a small call
like that of the model.

    PhimoeMultiplier(scores, multiplier, selected, gates, mask)      a gradient for scores alone
"""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.compiler.ir.op import IROp, call_form, once
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.register import UserOpDef
from shardwright.compiler.ops.sample_calls import Sample, sample_calls

_Reached = tuple[bool, ...]
"""Which operands of a call a gradient comes back to."""

_known: dict[Hashable, tuple[UserOpDef, _Reached]] = {}
"""What calls of each form have shown, with the operator as it was registered then."""


@once
def reached_operands(op: IROp) -> tuple[IRValue, ...]:
    """The operands to which a gradient of the results may come back.

    Of an operator of the tables that is every operand that requires one. So it is of a user's
    operator of which no small call can be made. Calls that differ in names alone are tried once: a
    search lowers all layers many times.
    """
    opdef = registry.get(op.target)
    if not any(value.requires_grad for value in op.operands) or not isinstance(opdef, UserOpDef):
        return tuple(value for value in op.operands if value.requires_grad)
    form = call_form(op)
    registered, reached = _known.get(form, (None, ()))
    # Another function may have been registered under the name since.
    if registered is not opdef:
        reached = _tried(op, opdef)
        _known[form] = opdef, reached
    return tuple(value for value, comes in zip(op.operands, reached, strict=True) if comes)


def _tried(op: IROp, opdef: UserOpDef) -> _Reached:
    """What a small call shows."""
    for sample in sample_calls(op, opdef):
        if isinstance(sample, Sample):
            return tuple(grad is not None for grad in sample.call.run_whole().outcome.grads)
    return tuple(value.requires_grad for value in op.operands)
