"""Moves of single nodes under limits over time: bring a choice within them, and make one within
them cheaper.

As in local_search.py all moves are priced at once and the best made one after another; what the
moments' limits say of a move is asked over the spans of its node only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.local_search import wall_of, walled_edges
from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.problem import Array
from shardwright.policies.autodist.solver.progress import Progress

MAX_PASSES = 300
"""Scans over all moves in one repair or one descent."""


class Moves:
    """A choice on a network with moments; its rows are not looked at. A forbidden cost counts as a
    wall, as in local_search.py.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.nodes = np.array(sorted(network.costs), dtype=np.intp)
        # All strategies of all nodes lie in one array, node by node.
        self._sizes = np.array([len(network.costs[node]) for node in self.nodes.tolist()])
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])[:-1]
        self.start = dict(zip(self.nodes.tolist(), self._starts.tolist(), strict=True))
        self._owner = np.repeat(self.nodes, self._sizes)
        self._unary = np.concatenate([network.costs[node] for node in self.nodes.tolist()])
        self._others = walled_edges(network, wall_of(network))
        self._spans = network.moments.spans
        # For every span: its node, the moments it lies over, and what each strategy uses.
        pairs = [(node, span) for node, spans in self._spans.items() for span in spans]
        self.span_nodes = [node for node, _ in pairs]
        self._first = np.array([span.first for _, span in pairs], dtype=np.intp)
        self._last = np.array([span.last for _, span in pairs], dtype=np.intp)
        self._lengths = np.array([len(span.used) for _, span in pairs], dtype=np.intp)
        self._values = np.concatenate([span.used for _, span in pairs])
        self._offsets = np.concatenate([[0], np.cumsum(self._lengths)])[:-1]
        self._places = self.spread(
            np.array([self.start[node] for node in self.span_nodes], dtype=np.intp)
        )
        self.room = network.moments.room
        self._slack = 1e-13 * np.abs(self.room)  # what adding and taking away leaves

    def spread(self, firsts: NDArray[np.intp]) -> NDArray[np.intp]:
        """Per span and strategy, a place ``first + strategy``."""
        strategies = np.arange(len(self._values)) - np.repeat(self._offsets, self._lengths)
        return np.asarray(np.repeat(firsts, self._lengths) + strategies)

    def span_costs(self, prices: Array) -> Array:
        """Per span and strategy, what its use costs at these prices of moments."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        return np.asarray(
            np.repeat(total[self._last] - total[self._first], self._lengths) * self._values
        )

    def costs(self, prices: Array) -> dict[int, Array]:
        """The cost of every node's strategies with what their uses cost at these prices."""
        priced = self._unary + self._priced(prices)
        parts = np.split(priced, self._starts[1:])
        return dict(zip(self.nodes.tolist(), parts, strict=True))

    def used(self, choice: NDArray[np.intp]) -> Array:
        """What a choice uses at each moment."""
        amounts = self._values[self._offsets + choice[self.span_nodes]]
        changes = np.zeros(len(self.room) + 1)
        np.add.at(changes, self._first, amounts)
        np.subtract.at(changes, self._last, amounts)
        return np.asarray(np.cumsum(changes)[:-1])

    def propose(self, choice: NDArray[np.intp], progress: Progress, prices: Array) -> None:
        """Bring a choice within the limits, make it cheaper and propose it."""
        self.load(choice)
        if prices.any():
            self.descend(progress, prices=prices)
        if self.repair(progress, prices):
            self.descend(progress)
            progress.propose(self.network.expand(dict(enumerate(self.choice.tolist()))))

    def load(self, choice: NDArray[np.intp]) -> None:
        """Start from a choice, by node of the problem."""
        self.choice = choice.copy()
        self.marginals = self._unary.copy()
        # The marginal of a strategy: what the whole choice would cost with it, beside a constant.
        for node, others in self._others.items():
            part = self.marginals[
                self.start[node] : self.start[node] + len(self.network.costs[node])
            ]
            for other, edge in others.items():
                part += edge[self.choice[other]]
        self.over = self.used(choice) - self.room - self._slack

    def _costs(self, prices: Array | None) -> Array:
        """What every move would cost, with the prices of what it uses."""
        costs = self.marginals if prices is None else self.marginals + self._priced(prices)
        return self._against_current(costs)

    def _priced(self, prices: Array) -> Array:
        return np.asarray(
            np.bincount(self._places, self.span_costs(prices), len(self._unary)), dtype=np.float64
        )

    def _against_current(self, values: Array) -> Array:
        return np.asarray(
            values - np.repeat(values[self._starts + self.choice[self.nodes]], self._sizes)
        )

    def _use(self, node: int, before: int, after: int) -> None:
        for first, last, used in self._spans.get(node, ()):
            self.over[first:last] += used[after] - used[before]

    def _reaches(self, node: int, before: int, after: int) -> list[tuple[int, int]]:
        return [
            (first, last)
            for first, last, used in self._spans.get(node, ())
            if used[after] != used[before]
        ]

    def _excess(self, reaches: list[tuple[int, int]]) -> float:
        return sum(float(np.maximum(self.over[first:last], 0.0).sum()) for first, last in reaches)

    def _move(self, node: int, after: int) -> None:
        before = int(self.choice[node])
        self.choice[node] = after
        for other in self._others[node]:
            edge = self._others[other][node]
            start = self.start[other]
            self.marginals[start : start + edge.shape[1]] += edge[after] - edge[before]

    def _make(self, moves: NDArray[np.intp], *, relieve: bool, within: bool) -> int:
        """Make moves in order, at most one in every neighbourhood; returns how many.

        Args:
            moves: places of strategies.
            relieve: only those that lower the excess of the moments they touch.
            within: only those that exceed no moment.
        """
        stale: set[int] = set()
        count = 0
        for place in moves.tolist():
            node = int(self._owner[place])
            if node in stale:
                continue
            before, after = int(self.choice[node]), place - self.start[node]
            # The stretches of moments that the move changes.
            reaches = self._reaches(node, before, after)
            excess = self._excess(reaches) if relieve else 0.0
            # Try it, look, and take it back if it does not help.
            self._use(node, before, after)
            if (relieve and self._excess(reaches) >= excess) or (
                within and any(self.over[first:last].max() > 0 for first, last in reaches)
            ):
                self._use(node, after, before)
                continue
            self._move(node, after)
            count += 1
            stale.add(node)
            stale.update(self._others[node])
        return count

    def repair(self, progress: Progress, prices: Array) -> bool:
        """Make moves that cost least per excess they take away until no moment is exceeded; whether
        none is.
        """
        for _ in range(MAX_PASSES):
            # Excess in shares of the room, so that moments count alike.
            exceeded = self.over > 0
            if not exceeded.any():
                return True
            if progress.left_s <= 0:
                return False
            relief = -self._against_current(
                self._priced(exceeded / np.maximum(np.abs(self.room), 1e-300))
            )
            # The cheapest per relief; first a few of them, as each changes the prices of the
            # others.
            moves = np.flatnonzero(relief > 0)
            order = np.argsort(self._costs(prices)[moves] / relief[moves], kind="stable")
            if not self._make(
                moves[order[: max(50, len(order) // 20)]], relieve=True, within=False
            ) and not self._make(moves[order], relieve=True, within=False):
                return False
        return False

    def descend(self, progress: Progress, *, prices: Array | None = None) -> None:
        """Make moves that lower the cost: with prices whatever the limits say, without prices
        within them.
        """
        for _ in range(MAX_PASSES):
            costs = self._costs(prices)
            moves = np.flatnonzero(costs < -1e-12 * float(np.abs(self.marginals).max()))
            order = np.argsort(costs[moves], kind="stable")
            if (
                not self._make(moves[order], relieve=False, within=prices is None)
                or progress.left_s <= 0
            ):
                return
