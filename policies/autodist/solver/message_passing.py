"""A bound where elimination is too wide: sequential tree-reweighted message passing (TRW-S,
Kolmogorov 2006) in whole arrays.

A message ``m[a -> b]`` moves cost between the ends of an edge without changing the cost of any
choice. With ``own[n] = cost[n] + all messages to n``::

    cost(x) = sum_n own[n][x_n] + sum_(a, b) (edge[x_a, x_b] - m[a -> b][x_b] - m[b -> a][x_a])

so the sum of the minima of all terms is a bound, for any messages. A pass visits the nodes in
order, each sending to its later neighbours the minimum over its own strategies of a share of its
cost plus the edge; the bound never falls, and ends near that of the linear program with edge
marginals (linear_program.py) at a fraction of its time. The order is by colours of a colouring:
nodes of one colour are no neighbours and are visited at once. Edges lie in arrays by (colours,
sizes); sizes are rounded up, padding is inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.problem import Array

_SIZES = np.array([size for power in range(1, 14) for size in (1 << power, 3 << (power - 1))])


@dataclass
class Group:
    """Edges from nodes of one colour to nodes of one later colour, of about equal sizes.

    Attributes:
        a, b: indices of the earlier and the later node, ``[edges]``.
        at_a, at_b: the places of their strategies, ``[edges, size]``.
        table: ``[edges, size a, size b]``; ``to_a``, ``to_b``: the messages.
        open_a, open_b: where a strategy exists and is not padding.
    """

    a: NDArray[np.intp]
    b: NDArray[np.intp]
    at_a: NDArray[np.intp]
    at_b: NDArray[np.intp]
    table: Array
    to_a: Array
    to_b: Array
    open_a: NDArray[np.bool_]
    open_b: NDArray[np.bool_]


class Messages:
    """The state of message passing on a network without rows; prices of rows are added to the
    nodes' costs by ``price``.

    The strategies of all nodes lie in one array, node by node, each node's padded to the next size
    of ``_SIZES`` with inf. ``start``: the place of each node's first.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.nodes = sorted(network.costs)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        sizes = np.array([len(network.costs[node]) for node in self.nodes])
        padded = _SIZES[np.searchsorted(_SIZES, sizes)]
        self._starts = np.cumsum(padded) - padded
        self._owner = np.repeat(np.arange(len(self.nodes)), padded)
        self.start = dict(zip(self.nodes, self._starts.tolist(), strict=True))
        self._unary = np.full(int(padded.sum()), np.inf)
        for node, start in self.start.items():
            self._unary[start : start + len(network.costs[node])] = network.costs[node]
        # Each strategy's cost with the messages of all neighbours, ``own`` of the formula above.
        self.own = self._unary.copy()
        # Nodes of one colour have no edge between them, so they are updated together.
        colours = self._colours()
        self.num_colours = max(colours, default=0) + 1
        self.order = np.array(colours)
        self.groups: dict[tuple[int, int], list[Group]] = {}
        self._make_groups(colours, sizes)
        later, earlier = np.zeros(len(self.nodes)), np.zeros(len(self.nodes))
        # Of edges to later and to earlier colours a node has at most so many, and shares its cost
        # out evenly.
        for groups in self.groups.values():
            for group in groups:
                np.add.at(later, group.a, 1.0)
                np.add.at(earlier, group.b, 1.0)
        self.share = 1.0 / np.maximum(np.maximum(later, earlier), 1.0)
        self._rest = 1.0 - later * self.share, 1.0 - earlier * self.share

    def _colours(self) -> list[int]:
        """A greedy colouring, nodes with most neighbours first."""
        colours: dict[int, int] = {}
        for node in sorted(
            self.nodes, key=lambda node: (-len(self.network.neighbours[node]), node)
        ):
            taken = {colours[other] for other in self.network.neighbours[node] if other in colours}
            colours[node] = next(colour for colour in range(len(taken) + 1) if colour not in taken)
        return [colours[node] for node in self.nodes]

    def _make_groups(self, colours: list[int], sizes: NDArray[np.intp]) -> None:
        members: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
        # Edges between two colours with tables of about one size are one array.
        rounded = _SIZES[np.searchsorted(_SIZES, sizes)]
        for a, b in self.network.edges:
            i, j = self.index[a], self.index[b]
            # The earlier colour comes first.
            if colours[i] > colours[j]:
                a, b, i, j = b, a, j, i
            members.setdefault(
                (colours[i], colours[j], int(rounded[i]), int(rounded[j])), []
            ).append((a, b))
        for (first, second, size_a, size_b), edges in sorted(members.items()):
            # ``[edges, width, width]``: what is padded is infinite.
            table = np.full((len(edges), size_a, size_b), np.inf)
            for e, (a, b) in enumerate(edges):
                edge = self.network.edge(a, b)
                table[e, : edge.shape[0], : edge.shape[1]] = edge
            ends_a = np.array([self.index[a] for a, _ in edges])
            ends_b = np.array([self.index[b] for _, b in edges])
            group = Group(
                ends_a,
                ends_b,
                self._starts[ends_a, None] + np.arange(size_a),
                self._starts[ends_b, None] + np.arange(size_b),
                table,
                np.zeros((len(edges), size_a)),
                np.zeros((len(edges), size_b)),
                np.arange(size_a) < sizes[ends_a, None],
                np.arange(size_b) < sizes[ends_b, None],
            )
            self.groups.setdefault((first, second), []).append(group)

    def price(self, places: NDArray[np.intp], changes: Array) -> None:
        """Add to the costs at some places, ``start of node + strategy``."""
        np.add.at(self._unary, places, changes)
        np.add.at(self.own, places, changes)

    def refresh(self) -> None:
        """Add up every node's cost anew: what rounding has left by many small changes goes."""
        self.own = self._unary.copy()
        for groups in self.groups.values():
            for group in groups:
                np.add.at(self.own, group.at_a, group.to_a)
                np.add.at(self.own, group.at_b, group.to_b)

    def forward(self) -> float:
        """Visit all nodes in order; the bound (without the network's constant)."""
        for first in range(self.num_colours):
            for second in range(first + 1, self.num_colours):
                for group in self.groups.get((first, second), ()):
                    sent = self.share[group.a, None] * self.own[group.at_a] - group.to_a
                    found = (sent[:, :, None] + group.table).min(axis=1)
                    self._deliver(group.at_b, group.to_b, np.where(group.open_b, found, 0.0))
        return self._bound(self._rest[0])

    def backward(self) -> float:
        """Visit all nodes in reverse order; the bound (without the network's constant)."""
        for second in reversed(range(self.num_colours)):
            for first in reversed(range(second)):
                for group in self.groups.get((first, second), ()):
                    sent = self.share[group.b, None] * self.own[group.at_b] - group.to_b
                    found = (sent[:, None, :] + group.table).min(axis=2)
                    self._deliver(group.at_a, group.to_a, np.where(group.open_a, found, 0.0))
        return self._bound(self._rest[1])

    def _deliver(self, places: NDArray[np.intp], messages: Array, found: Array) -> None:
        np.add.at(self.own, places, found - messages)
        messages[:] = found

    def _bound(self, rest: Array) -> float:
        # with a share of its sender's cost, every edge has minimum 0: that is what the message was
        # computed for
        return float((rest * np.minimum.reduceat(self.own, self._starts)).sum())

    def _cheapest(self, own: Array) -> NDArray[np.intp]:
        """Every node's cheapest strategy, the first of several, ``[nodes]``."""
        least = np.minimum.reduceat(own, self._starts)
        places = np.flatnonzero(own == least[self._owner])
        _, first = np.unique(self._owner[places], return_index=True)
        return np.asarray(places[first] - self._starts)

    def choice(self) -> NDArray[np.intp]:
        """Every node's cheapest strategy, by node of the problem."""
        found = np.zeros(len(self.network.strategies), dtype=np.intp)
        found[self.nodes] = self._cheapest(self.own)
        return found

    def rounded(self) -> NDArray[np.intp]:
        """After `backward`: a choice, by node of the problem, made colour by colour: each node at
        its best for those before.
        """
        # What a strategy costs, given the nodes that are chosen already.
        own, chosen = self.own.copy(), np.zeros(len(self.nodes), dtype=np.intp)
        for colour in range(self.num_colours):
            chosen = np.where(self.order == colour, self._cheapest(own), chosen)
            for second in range(colour + 1, self.num_colours):
                for group in self.groups.get((colour, second), ()):
                    # The row of the table for what was chosen, less the message that it replaces.
                    told = group.table[np.arange(len(group.a)), chosen[group.a]] - group.to_b
                    np.add.at(own, group.at_b, np.where(group.open_b, told, 0.0))
        found = np.zeros(len(self.network.strategies), dtype=np.intp)
        found[self.nodes] = chosen
        return found

    def excess(self) -> Array:
        """After a forward pass: how much more than the bound any choice costs that has this
        strategy, by place.
        """
        # A lower bound with this strategy: what the node adds, and what each edge adds at its best.
        least = np.minimum.reduceat(self.own, self._starts)[self._owner]
        total = self._rest[0][self._owner] * np.where(np.isinf(self.own), 0.0, self.own - least)
        for groups in self.groups.values():
            for group in groups:
                share = self.share[group.a, None] * self.own[group.at_a]
                left = group.table + (share - group.to_a)[:, :, None] - group.to_b[:, None, :]
                np.add.at(total, group.at_a, np.where(group.open_a, left.min(axis=2), 0.0))
                np.add.at(total, group.at_b, np.where(group.open_b, left.min(axis=1), 0.0))
        return total
