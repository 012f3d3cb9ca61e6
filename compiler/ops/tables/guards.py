"""Operators that check what a traced branch took for granted, and give back what they are given."""

from __future__ import annotations

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.stand_ins import all_chosen, any_chosen, only_finite, unclamped
from shardwright.compiler.ops.tables.pointwise import NONLINEAR
from shardwright.compiler.ops.terms import RUNTIME


def _any_chosen(op: IROp) -> OpRule:
    # A rank has to see all keys of its samples.
    return parse_rule("* k^ -> * k^", op)


define("any_chosen", "mask", f"{RUNTIME}.any_chosen", _any_chosen, any_chosen)
define("only_finite", "input", f"{RUNTIME}.only_finite", NONLINEAR, only_finite)
define("all_chosen", "input, mask", f"{RUNTIME}.all_chosen", NONLINEAR, all_chosen)
define("unclamped", "input, min=None, max=None", f"{RUNTIME}.unclamped", NONLINEAR, unclamped)
