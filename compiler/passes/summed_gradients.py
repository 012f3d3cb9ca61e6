"""Finds which gradients are added to others: those of values that several operators read.

Backward goes from the last operator to the first. What the last reader of a value gives is its
gradient so far; what every other reader gives is added to it, by a kernel that reads both and
writes the sum. Example: of ``x + mlp(norm(x))`` the addition gives the first gradient of ``x``,
and that of ``norm`` is added.
"""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp


def mark_summed_gradients(graph: IRGraph) -> IRGraph:
    """Set ``summed`` on every operator of a graph."""
    has_gradient: set[str] = set()
    ops: list[IROp] = []
    for op in reversed(graph.ops):
        summed = []
        if op.grad_enabled and any(result.takes_gradient for result in op.results):
            for position, value in enumerate(op.operands):
                if value.takes_gradient:
                    if value.name in has_gradient:
                        summed.append(position)
                    has_gradient.add(value.name)
        ops.append(op.changed(summed=tuple(summed)))
    return graph.with_ops(tuple(reversed(ops)))
