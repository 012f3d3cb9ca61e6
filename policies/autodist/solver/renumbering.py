"""The hint of repeated blocks: number the nodes block by block, so that equal blocks look equal.

Repetition is found by equal tables that meet in an equal order of nodes (eliminate.py). Where
blocks are numbered alike, one after another, that needs no hint. Where they are not, say all first
nodes before all second ones, the hint says which nodes correspond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.policies.autodist.solver.problem import Infeasible, Problem, Row, Solution


class Renumbering:
    """A problem with its nodes in the order of its blocks, the others behind them; and the way
    back.
    """

    def __init__(self, problem: Problem) -> None:
        hinted = [node for block in problem.blocks for node in block]
        assert len(set(hinted)) == len(hinted), "a node is in two blocks"
        self.order = hinted + sorted(set(range(problem.num_nodes)) - set(hinted))
        self._is_needed = self.order != list(range(problem.num_nodes))
        self.problem = self._renumbered(problem) if self._is_needed else problem

    def _renumbered(self, problem: Problem) -> Problem:
        new = {node: index for index, node in enumerate(self.order)}
        return Problem(
            tuple(problem.node_costs[node] for node in self.order),
            tuple((new[a], new[b], cost) for a, b, cost in problem.edges),
            tuple(_renamed(row, new) for row in problem.rows),
        )

    def forth(self, choice: Sequence[int] | None) -> Sequence[int] | None:
        """A choice of the problem as given, in the new order."""
        return (
            choice
            if choice is None or not self._is_needed
            else [choice[node] for node in self.order]
        )

    def back(self, answer: Solution | Infeasible) -> Solution | Infeasible:
        """An answer in the numbers of the problem as given."""
        if not self._is_needed:
            return answer
        if isinstance(answer, Infeasible):
            return replace(answer, nodes=tuple(self.order[node] for node in answer.nodes))
        choice = [0] * len(self.order)
        for node, strategy in zip(self.order, answer.choice, strict=True):
            choice[node] = strategy
        return replace(answer, choice=tuple(choice))


def _renamed(row: Row, new: Mapping[int, int]) -> Row:
    intervals = (
        None
        if row.intervals is None
        else {new[node]: interval for node, interval in row.intervals.items()}
    )
    return Row(row.limit, {new[node]: used for node, used in row.usage.items()}, intervals)
