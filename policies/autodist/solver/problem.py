"""What the solver is asked and what it answers: costs of strategies and between them, memory rows;
a choice with its proof.

Nothing here knows what a node is. To the planner it is an operator, its strategies are ways to
split it, an edge is a value that one makes and another reads, a row is the memory of one rank at
one moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

ROW_TOLERANCE = 1e-12
"""How far above its limit a row may be, relative to the limit: the rounding of a sum of ten
thousand terms, and no more.
"""


@dataclass(frozen=True, eq=False)
class Row:
    """``sum of usage[node][choice of node] <= limit``; a node that is not in ``usage`` uses
    nothing.

    With intervals it is a limit over time: at every moment, the nodes whose interval covers it use
    no more than the limit.

    Attributes:
        limit: the most that may be used; ``inf`` for a row that never binds.
        usage: per node, what each of its strategies uses, ``[strategies]``; finite.
        intervals: None if all uses are at one moment; else per node of ``usage`` the moments
            ``(start, end)`` at which it uses, ``start`` included and ``end`` not.
    """

    limit: float
    usage: Mapping[int, Array]
    intervals: Mapping[int, tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        # Frozen, with arrays of float64.
        object.__setattr__(self, "limit", float(self.limit))
        usage = {int(node): np.asarray(used, dtype=np.float64) for node, used in self.usage.items()}
        object.__setattr__(self, "usage", MappingProxyType(usage))
        assert not math.isnan(self.limit), "a row with limit nan"
        if self.intervals is not None:
            assert self.intervals.keys() == usage.keys(), (
                "a row whose intervals are not of the nodes it limits"
            )
            intervals = {
                node: (int(self.intervals[node][0]), int(self.intervals[node][1])) for node in usage
            }
            object.__setattr__(self, "intervals", MappingProxyType(intervals))

    def used(self, choice: Sequence[int]) -> float:
        """What a choice uses, with intervals at the moment it uses most; exactly rounded."""
        if self.intervals is None:
            return math.fsum(float(used[choice[node]]) for node, used in self.usage.items())
        # What comes and goes at each moment; the largest running sum is the peak.
        changes: dict[int, list[float]] = {}
        for node, (start, end) in self.intervals.items():
            if start < end:
                used = float(self.usage[node][choice[node]])
                changes.setdefault(start, []).append(used)
                changes.setdefault(end, []).append(-used)
        moments = sorted(changes)
        over_time = np.cumsum([math.fsum(changes[moment]) for moment in moments])
        if not len(over_time):
            return 0.0
        peak = moments[int(over_time.argmax())]
        # The peak once more without the rounding of the running sum.
        live = (node for node, (start, end) in self.intervals.items() if start <= peak < end)
        return math.fsum(float(self.usage[node][choice[node]]) for node in live)

    def holds(self, used: float) -> bool:
        """Whether that usage is within the limit, up to the rounding of its sum."""
        return used <= self.limit + ROW_TOLERANCE * abs(self.limit)


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one strategy per node so that node costs plus edge costs are least and no row exceeds
    its limit.

    Arrays that are the same object, or equal, may be given many times: repeated blocks are
    recognised by that.

    Attributes:
        node_costs: per node ``[strategies of the node]``; ``inf`` is not allowed to be chosen.
        edges: ``(node a, node b, [strategies of a, strategies of b])``; parallel edges add up, in
            either direction.
        rows: what must stay within limits.
        blocks: optional hint: the nodes of repeated blocks, in the order of the chain. It never
            changes the answer.
    """

    node_costs: tuple[Array, ...]
    edges: tuple[tuple[int, int, Array], ...] = ()
    rows: tuple[Row, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        nodes = tuple(np.asarray(cost, dtype=np.float64) for cost in self.node_costs)
        edges = tuple(
            (int(a), int(b), np.asarray(cost, dtype=np.float64)) for a, b, cost in self.edges
        )
        object.__setattr__(self, "node_costs", nodes)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "blocks", tuple(tuple(block) for block in self.blocks))
        # Shapes that do not belong together are a fault of the caller.
        sizes = [cost.shape for cost in nodes]
        for node, cost in enumerate(nodes):
            assert cost.ndim == 1 and cost.size, (
                f"node {node}: costs of shape {cost.shape}, not [strategies]"
            )
        for a, b, cost in edges:
            assert cost.shape == sizes[a] + sizes[b], (
                f"edge {a} - {b}: {cost.shape} for {sizes[a]} and {sizes[b]} strategies"
            )
        for index, row in enumerate(self.rows):
            for node, used in row.usage.items():
                assert used.shape == sizes[node], (
                    f"row {index}, node {node}: {used.shape} for {sizes[node]} strategies"
                )
        # Repeated layers share their arrays; each is looked at once.
        seen: dict[int, Array] = {}
        for cost in (*nodes, *(cost for _, _, cost in edges)):
            seen.setdefault(id(cost), cost)
        assert all((cost > -math.inf).all() for cost in seen.values()), "a cost is nan or -inf"
        used_arrays = {id(used): used for row in self.rows for used in row.usage.values()}
        assert all(np.isfinite(used).all() for used in used_arrays.values()), (
            "a usage is not finite"
        )

    @property
    def num_nodes(self) -> int:
        """How many nodes choose."""
        return len(self.node_costs)


@dataclass(frozen=True)
class Solution:
    """A choice that respects every row.

    Attributes:
        choice: the strategy of each node.
        cost: ``evaluate(problem, choice)``.
        bound: no feasible choice costs less.
        proof: where the bound comes from, in words.
        interrupted: whether the search for it was interrupted from the keyboard.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    proof: str
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """How far above the bound the cost is, relative to the cost: 0 is proved optimal."""
        if self.cost <= self.bound:
            return 0.0
        return (self.cost - self.bound) / max(abs(self.cost), abs(self.bound))


@dataclass(frozen=True)
class Infeasible:
    """No choice respects all rows, or none was found.

    Attributes:
        proven: whether it is certain that there is none; otherwise time ended first.
        reason: in words, with the numbers.
        row: index of the row that cannot be kept, where it is a single one.
        least_usage: the least that any allowed choice uses of that row (a lower bound of it).
        nodes: the nodes that use most of that row in such a choice, most first.
    """

    proven: bool
    reason: str
    row: int | None = None
    least_usage: float | None = None
    nodes: tuple[int, ...] = ()


def evaluate(problem: Problem, choice: Sequence[int]) -> float:
    """Node costs plus edge costs of a choice, exactly rounded; ``inf`` where forbidden. Rows are
    not looked at.
    """
    nodes = (float(cost[choice[node]]) for node, cost in enumerate(problem.node_costs))
    edges = (float(cost[choice[a], choice[b]]) for a, b, cost in problem.edges)
    return math.fsum((*nodes, *edges))


def is_feasible(problem: Problem, choice: Sequence[int]) -> bool:
    """Whether nothing forbidden is chosen and every row stays within its limit."""
    return evaluate(problem, choice) < math.inf and all(
        row.holds(row.used(choice)) for row in problem.rows
    )
