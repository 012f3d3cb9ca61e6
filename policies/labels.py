"""Choose R or G for every operator that an axis does not split, so that the least is communicated: an exact minimum cut.

Along one axis, some operators split a dim; the others are computed on every rank, either with whole gradients (R) or with
summands of gradients (G). Between neighbours, R -> G costs an all-reduce of the gradient, G -> R nothing; a value that a split
operator made costs twice as much gathered for G as for R; a slice of an R value costs a gather of its gradient. All of that is
pairwise between two-valued choices and never prefers unlike neighbours, so the best choice for the whole graph is a minimum
cut: operators on the source side are R, on the sink side G. Fewer key/value heads than ranks come out of it as G, as Megatron
users know them; layer norms between row- and column-parallel products as R. (Not pairwise, and priced as if they were: a value
that a split operator cuts along one dim and others read cut along another, and one that is read in three or more cuts.)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from ortools.graph.python import max_flow

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import product
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.strategy import layouts, placements
from shardwright.compiler.plan.conversion import canonical
from shardwright.runtime.layout import Mesh

_FOREVER = 1 << 52
_UNIT = 16  # an element; the tie-breaker below is less than that


class _Cut:
    """A cut problem: node 0 is R, node 1 is G. ``cost(a, b, c)``: pay c if a is R and b is G."""

    def __init__(self) -> None:
        self.arcs: list[tuple[int, int, int]] = []
        self.num_nodes = 2

    def node(self) -> int:
        self.num_nodes += 1
        return self.num_nodes - 1

    def pay(self, r_side: int, g_side: int, cost: float) -> None:
        """Pay ``cost`` where the first is R and the second G."""
        if r_side != g_side and cost > 0:
            self.arcs.append((r_side, g_side, min(_FOREVER, round(cost * _UNIT))))

    def solve(self) -> set[int]:
        """The nodes that are G."""
        flow = max_flow.SimpleMaxFlow()
        if not self.arcs:
            return {1}
        tails, heads, capacities = (np.array(column) for column in zip(*self.arcs, strict=True))
        flow.add_arcs_with_capacity(tails, heads, capacities)
        status = flow.solve(0, 1)
        assert status == flow.OPTIMAL, status
        return set(range(self.num_nodes)) - set(flow.get_source_side_min_cut())


def label(graph: IRGraph, splits: Mapping[str, str], axis_size: int) -> dict[str, str]:
    """Operator name to ``R`` or ``G`` for the operators not in ``splits`` (operator name to its ``split:<factor>``)."""
    cut = _Cut()
    nodes: dict[str, int] = {}
    for op in graph.ops:
        assert op.rule is not None
        if op.name not in splits:
            differentiable = any(v.takes_gradient for v in (*op.operands, *op.results))
            nodes[op.name] = cut.node() if differentiable and op.rule.grad_linear else 0
            if nodes[op.name]:
                cut.arcs.append((0, nodes[op.name], 1))  # a tie goes to R
    uses: dict[str, list[tuple[IROp, int]]] = graph.uses()
    producers = graph.producers()
    for value in (*graph.sources, *(result for op in graph.ops for result in op.results)):
        if value.takes_gradient:
            _price_value(
                cut,
                nodes,
                splits,
                value,
                producers.get(value.name),
                uses.get(value.name, []),
                value in graph.outputs,
                axis_size,
            )
    gradient_partial = cut.solve()
    return {name: "G" if node in gradient_partial else "R" for name, node in nodes.items()}


def _price_value(
    cut: _Cut,
    nodes: Mapping[str, int],
    splits: Mapping[str, str],
    value: IRValue,
    producer: tuple[IROp, int] | None,
    uses: list[tuple[IROp, int]],
    is_output: bool,
    axis_size: int,
) -> None:
    """The costs between what makes a value and what reads it. ``copy`` is G if any reader wants the value as G."""
    moved = estimate(product(value.shape)) * (axis_size - 1) / axis_size
    copy = cut.node()
    slices: set[str] = set()
    num_whole = int(is_output)
    for op, position in uses:
        if op.name in nodes:
            cut.pay(copy, nodes[op.name], _FOREVER)  # a G reader needs the G copy
            num_whole += 1
            continue
        assert op.rule is not None
        wanted = placements(op.rule, splits[op.name])[0][position]
        if wanted == "S":
            slices.add(_cut_of(op, position, splits[op.name], axis_size))
        if wanted == "G":
            cut.pay(copy, 1, _FOREVER)
    if producer is not None and producer[0].name in splits:
        op, index = producer
        assert op.rule is not None
        made = placements(op.rule, splits[op.name])[1][index]
        if made == "S":  # gather; for G also reduce-scatter the gradient
            cut.pay(0, copy, moved)
        elif made == "P" or made == "R":  # all-reduce; for G also of the gradient
            cut.pay(0, copy, 2 * moved)
        return
    if producer is not None:
        source = nodes[producer[0].name]
    elif value.kind is ValueKind.PARAMETER:
        if not num_whole and slices:
            return  # stored as its slices
        source = cut.node()
        cut.pay(0, source, 1.98 * moved)  # the reducer sums a G parameter's gradient, in buckets
    else:
        source = 0
    # R -> G all-reduces the gradient, and slices of the G copy are free; without a G copy each slice's gradient is gathered
    gathers = min(len(slices), 2)
    cut.pay(source, copy, (2 - gathers) * moved)
    cut.pay(source, 1, gathers * moved)


def _cut_of(op: IROp, position: int, strategy: str, axis_size: int) -> str:
    """How a split operator wants one of its operands cut."""
    assert op.rule is not None
    mesh = Mesh((("axis", axis_size),))
    return str(canonical(layouts(op.rule, {"axis": strategy}, mesh)[0][position], mesh))
