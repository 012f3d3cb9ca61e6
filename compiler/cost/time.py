"""How long an operator takes, by a roofline over its shapes, before any machine is measured.

The numbers are those of one A100 in 16-bit (312 Tflop/s, 2 TB/s). Only ratios between operators matter here: they balance
stages.
"""

from __future__ import annotations

import math

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import product
from shardwright.compiler.ops.rule import FactorKind

FLOPS_PER_S = 312e12
BYTES_PER_S = 2e12

VIEWS = frozenset(
    ("view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "getitem", "split", "chunk", "unbind")
    + ("contiguous", "detach", "flatten", "t", "movedim", "swapaxes", "unflatten", "select", "narrow", "alias")
)
"""Operators that move no data (or rarely)."""


def forward_s(op: IROp) -> float:
    """Seconds of one forward: the time of its arithmetic or of its memory traffic, whichever is longer."""
    if op.target in VIEWS or op.rule is None:
        return 0.0
    tensors = (*op.operands, *op.results)
    if op.target == "embedding":  # reads the rows it needs, not the table
        tensors = (*op.results, *op.results)
    num_bytes = sum(estimate(product(value.shape)) * value.dtype.itemsize for value in tensors)
    contracted = any(f.kind is FactorKind.SUMMED for f in op.rule.factors) or op.target == "scaled_dot_product_attention"
    work = math.prod(estimate(f.size) for f in op.rule.factors) if contracted and op.target != "embedding" else 0.0
    flops = 2 * work * (2 if op.target == "scaled_dot_product_attention" else 1)
    return max(flops / FLOPS_PER_S, num_bytes / BYTES_PER_S)
