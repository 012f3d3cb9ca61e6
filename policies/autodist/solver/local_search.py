"""Turn any choice into one within the rows, and a choice within the rows into a better one, node by
node.

The marginals of all nodes (what each strategy would cost, neighbours staying as they are) lie in
one flat array, so that all moves are priced at once; then the best are made one after another,
skipping those whose neighbourhood has changed since.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.network import Network, spread
from shardwright.policies.autodist.solver.problem import Array
from shardwright.policies.autodist.solver.progress import Progress

MAX_PASSES = 200
"""Scans over all moves in one repair or one descent."""


def wall_of(network: Network) -> float:
    """More than all allowed costs together can differ."""
    arrays = (*network.edges.values(), *network.costs.values())
    spreads = {
        id(array): spread(array) for array in {id(array): array for array in arrays}.values()
    }
    return 1.0 + sum(spreads[id(array)] for array in arrays)


def walled_edges(network: Network, wall: float) -> dict[int, dict[int, Array]]:
    """Per node and neighbour ``[strategies of the neighbour, of the node]``, the wall where a pair
    is forbidden.
    """
    walled: dict[int, Array] = {}

    def finite(edge: Array) -> Array:
        if id(edge) not in walled:
            walled[id(edge)] = np.where(np.isinf(edge), wall, edge)
        return walled[id(edge)]

    edges: dict[int, dict[int, Array]] = {}
    for node in sorted(network.costs):
        near = sorted(network.neighbours[node])
        edges[node] = {other: finite(network.edge(other, node)) for other in near}
    return edges


class LocalSearch:
    """Moves of single nodes on a network. A forbidden cost counts as ``wall``, more than all
    allowed ones together.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.nodes = sorted(network.costs)
        # All strategies of all nodes lie in one array, node by node.
        sizes = [len(network.costs[node]) for node in self.nodes]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)
        self.start = {node: int(starts[i]) for i, node in enumerate(self.nodes)}
        self._owner = np.repeat(np.array(self.nodes, dtype=np.intp), sizes)
        self._starts = starts[:-1]
        self._sizes = np.array(sizes, dtype=np.intp)
        self._unary = np.concatenate([network.costs[node] for node in self.nodes])
        # A forbidden pair costs a wall: more than any choice, and finite, so that it can be left.
        self.wall = wall_of(network)
        self._unary[np.isinf(self._unary)] = self.wall
        self._others = walled_edges(network, self.wall)
        # For each row: the positions that use something, and how much.
        self._row_positions, self._row_values = [], []
        self._uses: dict[int, list[tuple[int, Array]]] = {}
        for index, row in enumerate(network.rows):
            positions = [
                np.arange(self.start[node], self.start[node] + len(used))
                for node, used in row.usage.items()
            ]
            self._row_positions.append(np.concatenate(positions))
            self._row_values.append(np.concatenate([*row.usage.values()]))
            for node, used in row.usage.items():
                self._uses.setdefault(node, []).append((index, used))
        self.room = np.array([row.room for row in network.rows])

    def load(self, choice: NDArray[np.intp]) -> None:
        """Start from a choice, by node of the problem."""
        self.choice = choice.copy()
        self.marginals = self._unary.copy()
        for node in self.nodes:
            start = self.start[node]
            part = self.marginals[start : start + len(self.network.costs[node])]
            for other, edge in self._others[node].items():
                part += edge[self.choice[other]]
        self.used = self._count()

    def _count(self) -> Array:
        chosen = np.zeros(len(self._unary), dtype=bool)
        chosen[self._starts + self.choice[self.nodes]] = True
        rows = zip(self._row_positions, self._row_values, strict=True)
        return np.array([values[chosen[positions]].sum() for positions, values in rows])

    @property
    def feasible(self) -> bool:
        """Whether the rows hold."""
        return bool((self.used <= self.room).all())

    def move(self, node: int, strategy: int) -> None:
        """Change one node."""
        before = int(self.choice[node])
        self.choice[node] = strategy
        for other in self._others[node]:
            edge = self._others[other][node]
            start = self.start[other]
            self.marginals[start : start + edge.shape[1]] += edge[strategy] - edge[before]
        for index, used in self._uses.get(node, ()):
            self.used[index] += used[strategy] - used[before]

    def _changes(self) -> Array:
        """What every move would cost, ``[strategies of all nodes]``."""
        current = self.marginals[self._starts + self.choice[self.nodes]]
        return np.asarray(self.marginals - np.repeat(current, self._sizes))

    def _usage_changes(self, index: int) -> Array:
        """What the moves of a row's nodes would add to it."""
        positions, values = self._row_positions[index], self._row_values[index]
        dense = np.zeros(len(self._unary))
        dense[positions] = values
        current = dense[self._starts + self.choice[self.nodes]]
        return np.asarray(dense - np.repeat(current, self._sizes))

    def repair(self, progress: Progress) -> bool:
        """Make moves that cost least per excess taken away until every row holds; whether they all
        do.
        """
        for _ in range(MAX_PASSES):
            # The rows that are exceeded.
            over = [index for index in range(len(self.room)) if self.used[index] > self.room[index]]
            if not over:
                return True
            if progress.left_s <= 0:
                return False
            # What each move takes away from excess, in shares of the rows.
            relief = np.zeros(len(self._unary))
            for index in range(len(self.room)):
                changes = self._usage_changes(index)
                excess = self.used[index] - self.room[index]
                unit = abs(self.room[index]) or 1.0
                if excess > 0:
                    relief += np.minimum(-changes, excess) / unit
                else:  # what would exceed another row counts against the move
                    relief -= np.maximum(changes + excess, 0.0) / unit
            moves = np.flatnonzero(relief > 0)
            if not len(moves):
                return False
            # The price of a move: what the cost rises, per excess taken away.
            prices = self._changes()[moves] / relief[moves]
            if not self._make_moves(moves[np.argsort(prices, kind="stable")], until_feasible=True):
                return False
        return False

    def _make_moves(
        self, moves: NDArray[np.intp], *, until_feasible: bool, within: bool = True
    ) -> int:
        """Make the moves in order, at most one in every neighbourhood; returns how many."""
        # A move changes what its neighbours' moves are worth: these wait for the next pass.
        stale: set[int] = set()
        num_made = 0
        for position in moves:
            node = int(self._owner[position])
            # A neighbour has moved since gains were worked out, so that of this node is no longer
            # right.
            if node in stale:
                continue
            strategy = int(position) - self.start[node]
            before = self.choice[node]
            excess = self._worst_excess() if until_feasible else 0.0
            if (
                within
                and not until_feasible
                and any(
                    self.used[index] + used[strategy] - used[before] > self.room[index]
                    for index, used in self._uses.get(node, ())
                )
            ):
                continue
            # A repair must not make the worst row worse.
            self.move(node, strategy)
            if until_feasible and self._worst_excess() > excess:
                self.move(node, int(before))
                continue
            num_made += 1
            stale.add(node)
            stale.update(self._others[node])
            if until_feasible and self.feasible:
                break
        return num_made

    def _worst_excess(self) -> float:
        """How far the worst row is exceeded, relative to its room."""
        return max(
            0.0, float(((self.used - self.room) / np.maximum(np.abs(self.room), 1e-300)).max())
        )

    def descend(self, progress: Progress, *, within: bool = True) -> None:
        """Make moves that lower the cost, within the rows or whatever they say, until there are
        none.
        """
        for _ in range(MAX_PASSES):
            # What the cost changes with each single move.
            changes = self._changes()
            least = 1e-12 * float(
                np.abs(self.marginals[self._starts + self.choice[self.nodes]]).sum()
            )
            moves = np.flatnonzero(changes < -least)
            order = np.argsort(changes[moves], kind="stable")
            if (
                not self._make_moves(moves[order], until_feasible=False, within=within)
                or progress.left_s <= 0
            ):
                return


def cross(
    network: Network, inside: NDArray[np.intp], outside: NDArray[np.intp]
) -> NDArray[np.intp] | None:
    """The best choice within the rows that takes ``outside`` up to some node and ``inside`` after
    it, or the other way round.

    ``inside`` respects the rows and ``outside`` costs less but exceeds one: near the best
    multipliers both are optimal for the relaxation, and in a chain of blocks a cut between two of
    them costs little and leaves little room unused.
    """
    num_nodes = len(inside)
    best: tuple[float, NDArray[np.intp]] | None = None
    for first, second in ((outside, inside), (inside, outside)):
        # steps[p]: what the cost changes when the first p nodes are of `first`, not p - 1.
        steps = np.zeros(num_nodes + 1)
        for node, cost in network.costs.items():
            steps[node + 1] += cost[first[node]] - cost[second[node]]
        for (a, b), edge in network.edges.items():
            same, mixed, other = (
                edge[second[a], second[b]],
                edge[first[a], second[b]],
                edge[first[a], first[b]],
            )
            if mixed == math.inf:
                mixed = 1e300  # no cut between these two
            steps[a + 1] += mixed - same
            steps[b + 1] += other - mixed
        # The best cut is where the sum is least, among those that fit.
        costs = np.cumsum(steps)
        fits = np.ones(num_nodes + 1, dtype=bool)
        for row in network.rows:
            used = np.zeros(num_nodes + 1)
            for node, usage in row.usage.items():
                used[node + 1] = usage[first[node]] - usage[second[node]]
            total = sum(float(usage[second[node]]) for node, usage in row.usage.items())
            fits &= total + np.cumsum(used) <= row.room
        if not fits.any():
            continue
        cut = int(np.argmin(np.where(fits, costs, np.inf)))
        change = float(costs[cut]) + (
            0.0 if second is inside else _difference(network, outside, inside)
        )
        if best is None or change < best[0]:
            best = change, np.concatenate([first[:cut], second[cut:]])
    return None if best is None else best[1]


def _difference(network: Network, a: NDArray[np.intp], b: NDArray[np.intp]) -> float:
    """Cost of ``a`` less cost of ``b``."""
    return cost_of(network, a) - cost_of(network, b)


def cost_of(network: Network, choice: NDArray[np.intp]) -> float:
    """The cost of a choice among the strategies left."""
    nodes = (float(cost[choice[node]]) for node, cost in network.costs.items())
    edges = (float(edge[choice[a], choice[b]]) for (a, b), edge in network.edges.items())
    return network.constant + math.fsum((*nodes, *edges))
