"""A minimum cut as a choice between two for every node: what policies with neighbours that want to
be alike are solved by.

Example: an operator may be computed whole (low) or cut (high), which saves 3; its reader needs it
whole, which costs 5 to gather. ``pay(node, HIGH, 3)`` and ``pay(LOW, node, 5)`` make it low.
"""

from __future__ import annotations

import numpy as np
from ortools.graph.python import max_flow

LOW, HIGH = 0, 1
"""The two nodes that have no choice."""

UNIT = 16
"""What a cost of 1, as a byte, counts for: costs are rounded to a sixteenth."""

_FOREVER = 1 << 52


class MinimumCut:
    """A cut problem. A node is low, on the side of node 0, or high, on that of node 1."""

    def __init__(self) -> None:
        self.arcs: list[tuple[int, int, int]] = []
        self.num_nodes = 2

    def node(self) -> int:
        self.num_nodes += 1
        return self.num_nodes - 1

    def pay(self, low: int, high: int, cost: float) -> None:
        """Pay ``cost`` where the first is low and the second high."""
        if low != HIGH and high != LOW and cost > 0:
            self.arcs.append((low, high, min(_FOREVER, round(cost * UNIT))))

    def forbid(self, low: int, high: int) -> None:
        """The first is not low where the second is high."""
        self.pay(low, high, _FOREVER)

    def solve(self) -> set[int]:
        """The nodes that are high: between equal solutions, in that with the fewest low nodes."""
        flow = max_flow.SimpleMaxFlow()
        if not self.arcs:
            return {HIGH}
        tails, heads, capacities = (np.array(column) for column in zip(*self.arcs, strict=True))
        flow.add_arcs_with_capacity(tails, heads, capacities)
        status = flow.solve(LOW, HIGH)
        assert status == flow.OPTIMAL, status
        return set(range(self.num_nodes)) - set(flow.get_source_side_min_cut())
