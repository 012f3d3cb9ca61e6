"""A network made smaller by exact elimination where it stays pairwise: nodes in no row, with at
most two neighbours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.eliminate import Elimination
from shardwright.policies.autodist.solver.network import Network, tighten
from shardwright.policies.autodist.solver.problem import Infeasible, Problem

MAX_TABLE = 1 << 22
"""Entries of the largest join of a node that is taken out."""


class Reduced:
    """The network of the nodes that stay, and the way back.

    Attributes:
        network: pairwise, with the same rows; its choices are among the strategies left in it.
    """

    def __init__(self, whole: Network) -> None:
        self._whole = whole
        # Nodes with one or two neighbours and without rows are eliminated; others stay.
        in_rows = {node for row in whole.rows for node in row.usage}
        kinds = {node: id(cost) for node, cost in whole.costs.items()}
        sizes = {node: len(cost) for node, cost in whole.costs.items()}
        self._elimination = Elimination(
            kinds, sizes, whole.edges, keep=in_rows, max_join=MAX_TABLE, max_others=2
        )
        constant = self._elimination.run(whole.costs)
        self.network = whole.copy_of_nodes(self._elimination.core)
        self.network.constant += constant
        # The costs of the nodes that stay come back with the tables that elimination left.
        zeros = {
            len(cost): self.network.pool.intern(np.zeros(len(cost)))
            for cost in self.network.costs.values()
        }
        self.network.costs = {node: zeros[len(cost)] for node, cost in self.network.costs.items()}
        for factor, count in self._elimination.core_factors:  # the nodes' own costs are factors too
            table = self._elimination.core_table(factor) * count
            # A table over two nodes is an edge, over one it is a cost.
            if len(factor.scope) == 2:
                self.network.add_edge(*factor.scope, self.network.pool.intern(table))
            else:
                (node,) = factor.scope
                self.network.costs[node] = self.network.pool.add(
                    self.network.costs[node], self.network.pool.intern(table)
                )

    def restricted(self, node: int, keep: NDArray[np.bool_]) -> Reduced:
        """A copy in which a node has only the marked strategies."""
        part = copy.copy(self)
        part.network = self.network.duplicate()
        part.network.restrict(node, keep)
        return part

    def simplify(
        self, problem: Problem, out_of_time: Callable[[], bool] = lambda: False
    ) -> Infeasible | None:
        """Simplify what stays once more: taking nodes out shows more strategies that others
        replace.
        """
        return tighten(self.network, problem, out_of_time)

    def condense(self, choice: Sequence[int]) -> NDArray[np.intp] | None:
        """A choice of the problem as one among the strategies left; None if one of its strategies
        was dropped.
        """
        if any(choice[node] not in self.network.strategies[node] for node in self.network.costs):
            return None
        inner = np.zeros(len(choice), dtype=np.intp)
        for node in self.network.costs:
            inner[node] = np.searchsorted(self.network.strategies[node], choice[node])
        return inner

    def expand(self, choice: NDArray[np.intp]) -> tuple[int, ...]:
        """A choice among the strategies left as a choice of the problem, the nodes taken out at
        their best.
        """
        problem_choice = self.network.expand(dict(enumerate(choice.tolist())))
        inner = np.zeros(len(choice), dtype=np.intp)
        for node in self._elimination.core:
            inner[node] = np.searchsorted(self._whole.strategies[node], problem_choice[node])
        self._elimination.trace(inner)
        return self._whole.expand(dict(enumerate(inner.tolist())))


def num_pairs(network: Network) -> int:
    """Pairs of strategies of all edges: the size of the linear program."""
    return sum(math.prod(edge.shape) for edge in network.edges.values())
