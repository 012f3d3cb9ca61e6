"""Routers that choose groups of experts first, and then experts of these groups, as DeepSeek-V3's.

A token goes to fewer ranks then: to at most as many nodes as groups, where each node has one. The
choice of a group is a ``topk`` whose indices are scattered into zeros, which widen to a mask of the
scores that the ``topk`` of experts sees.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue

_KEEPING = frozenset(
    ("view", "reshape", "flatten", "contiguous", "to", "masked_fill", "where", "mul", "bitwise_not")
    + ("logical_not", "eq", "ne", "gt", "unsqueeze", "expand", "repeat_interleave")
)
"""Operators between a mask of groups and the scores that it leaves."""

_WIDENING = frozenset(("expand", "repeat_interleave"))
"""Operators that make a group's number one of each of its experts."""


def groups_of(chosen: IRValue, num_experts: int, makers: Mapping[str, IROp]) -> tuple[int, int]:
    """How many equal groups of experts there are, side by side, and how many of them each token has
    chosen before it chose ``chosen`` [tokens, top_k]; (1, 1) if it chose of all experts.
    ``makers``: the operators by the names of their results.
    """
    op = makers.get(chosen.name)
    if op is None or op.target != "topk":
        return 1, 1
    waiting, seen = [(op.operands[0], False)], set[str]()
    while waiting:
        value, widened = waiting.pop()
        op = makers.get(value.name)
        if op is None or value.name in seen:
            continue
        seen.add(value.name)
        if op.target == "scatter" and widened:
            index = op.arg("index")
            maker = makers.get(index.name)
            num_groups, num_chosen = value.shape[-1], index.shape[-1]
            if maker is not None and maker.target == "topk" and num_experts % num_groups == 0:
                return num_groups, num_chosen
        if op.target in _KEEPING:
            widened = widened or _widens(op, num_experts)
            waiting.extend((operand, widened) for operand in op.operands)
    return 1, 1


def _widens(op: IROp, num_experts: int) -> bool:
    """Whether an operator gives each group's number to all of its experts, which lie side by
    side.
    """
    if op.target not in _WIDENING:
        return False
    before, after = op.operands[0].shape, op.results[0].shape
    if op.target == "expand":
        return len(after) > 1 and before[-1] == 1 and after[-2] * after[-1] == num_experts
    return len(before) == len(after) and after[-1] == num_experts
