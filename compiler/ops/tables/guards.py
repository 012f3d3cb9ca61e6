"""Operators that check what a traced branch took for granted, and give back what they are given."""

from __future__ import annotations

from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.stand_ins import all_chosen, only_finite, unclamped
from shardwright.compiler.ops.tables.pointwise import NONLINEAR
from shardwright.compiler.ops.terms import RUNTIME

define("only_finite", "input", f"{RUNTIME}.only_finite", NONLINEAR, only_finite)
define("all_chosen", "input, mask", f"{RUNTIME}.all_chosen", NONLINEAR, all_chosen)
define("unclamped", "input, min=None, max=None", f"{RUNTIME}.unclamped", NONLINEAR, unclamped)
