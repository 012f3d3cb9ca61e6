"""Routers that choose groups of experts first, and then experts of these groups, as DeepSeek-V3's.

A token goes to fewer ranks then: to at most as many nodes as groups, where each node has one. The
choice of a group is a ``topk`` whose indices are scattered: ones into zeros, or zeros into ones.
What comes of it masks the scores that the ``topk`` of experts sees.
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

_FILLED = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), False),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), True),
}
"""Operators that make what is scattered into, and whether its elements are true."""


def groups_of(chosen: IRValue, num_experts: int, makers: Mapping[str, IROp]) -> tuple[int, int]:
    """How many equal groups of experts there are, side by side, and how many of them each token has
    chosen before it chose ``chosen`` [tokens, top_k]; (1, 1) if it chose of all experts.
    ``makers``: the operators by the names of their results.
    """
    op = makers.get(chosen.name)
    if op is None or op.target != "topk":
        return 1, 1
    # Values on the way to a mask: whether a group's element is that of all its experts by then, and
    # whether experts stay where it is true.
    waiting, seen = [(op.operands[0], False, True)], set[str]()
    while waiting:
        value, widened, stays = waiting.pop()
        op = makers.get(value.name)
        if op is None or value.name in seen:
            continue
        seen.add(value.name)
        if op.target == "scatter" and widened:
            found = _scattered(op, num_experts, makers, stays=stays)
            if found is not None:
                return found
        if op.target in _KEEPING:
            for operand in op.operands:
                wide = widened or _widens(op, operand, num_experts)
                waiting.append((operand, wide, stays != _turns(op, operand)))
    return 1, 1


def _scattered(
    op: IROp, num_experts: int, makers: Mapping[str, IROp], *, stays: bool
) -> tuple[int, int] | None:
    """The groups of a mask, and how many of them stay; nothing if the operator makes none.
    ``stays``: whether groups stay whose elements are true.
    """
    index, filled = makers.get(op.arg("index").name), makers.get(op.operands[0].name)
    num_groups, num_scattered = op.results[0].shape[-1], op.arg("index").shape[-1]
    number = op.arg("src", None)
    if index is None or index.target != "topk" or filled is None or filled.target not in _FILLED:
        return None
    if isinstance(number, IRValue) or bool(number) == _FILLED[filled.target]:
        return None
    if num_experts % num_groups:
        return None
    return num_groups, num_scattered if bool(number) == stays else num_groups - num_scattered


def _turns(op: IROp, operand: IRValue) -> bool:
    """Whether experts go where an operand is true, if they stay where the result is."""
    if op.target == "masked_fill":
        return operand is op.arg("mask")
    is_zero = op.target == "eq" and op.arg("other", None) == 0
    return is_zero or op.target in ("bitwise_not", "logical_not")


def _widens(op: IROp, operand: IRValue, num_experts: int) -> bool:
    """Whether an operator gives each group's element to all of its experts, which lie side by
    side.
    """
    before, after = operand.shape, op.results[0].shape
    if op.target == "repeat_interleave":
        return len(before) == len(after) and after[-1] == num_experts
    is_column = len(before) == len(after) > 1 and before[-1] == 1 and before[-2] == after[-2]
    return bool(is_column and after[-2] * after[-1] == num_experts)
