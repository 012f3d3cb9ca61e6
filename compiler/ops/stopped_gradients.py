"""Operators of users that give some of their operands no gradient.

The backward of an autograd Function may return ``None`` for an operand. The model before it then
gets no gradient through this operator, and nobody may send one: zeros would be a gradient, by which
weight decay and momentum change parameters. Only running the operator shows it, on a small call
like that of the model.

    PhimoeMultiplier(scores, multiplier, selected, gates, mask)      a gradient for scores alone
"""

from __future__ import annotations

from shardwright.compiler.ir.op import IROp, once
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.register import UserOpDef
from shardwright.compiler.ops.sample_calls import Sample, sample_calls


@once
def reached_operands(op: IROp) -> tuple[IRValue, ...]:
    """The operands to which a gradient of the results may come back.

    Of an operator of the tables that is every operand that requires one. So it is of a user's
    operator of which no small call can be made.
    """
    wanted = tuple(value for value in op.operands if value.requires_grad)
    opdef = registry.get(op.target)
    if not wanted or not isinstance(opdef, UserOpDef):
        return wanted
    for sample in sample_calls(op, opdef):
        if isinstance(sample, Sample):
            grads = sample.call.run_whole().outcome.grads
            pairs = zip(op.operands, grads, strict=True)
            return tuple(value for value, grad in pairs if grad is not None)
    return wanted
