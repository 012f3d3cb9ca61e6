"""The working form of a problem: equal arrays stored once, one edge per pair, only strategies that
can matter.

Everything done here is exact: some optimal choice of the problem is a choice of the network, at the
same cost.

1. parallel edges are added up, an edge from a node to itself becomes a node cost, edges ``f(a) +
   g(b)`` become node costs;
2. rows lose what every strategy uses; rows that cannot be exceeded are dropped; a row that cannot
   be kept is reported;
3. strategies are dropped that are forbidden, that fit no strategy of some neighbour (arc
   consistency), that exceed a row alone, or that another strategy of the node replaces at no higher
   cost and usage whatever the neighbours choose (dead-end elimination, Goldstein 1994);
4. a node with one strategy is folded into its neighbours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.moments import Moments, WorkRow
from shardwright.policies.autodist.solver.pool import Pool
from shardwright.policies.autodist.solver.problem import ROW_TOLERANCE, Array, Infeasible, Problem

DOMINANCE_WORK = 1_000_000
DOMINANCE_WORK_IN_ALL = 400_000_000
"""Comparisons spent at most on one pair of a node and an edge, and in one scan of all, when looking
for strategies that others replace.
"""


def spread(array: Array) -> float:
    """Greatest less least of the finite entries."""
    finite = array[np.isfinite(array)]
    return float(np.ptp(finite)) if finite.size else 0.0


class Network:
    """A problem being simplified; nodes keep their numbers.

    Attributes:
        costs: per node ``[strategies left]``; a folded node is not in it.
        strategies: per node of the problem, which of its strategies are left.
        edges: ``(a, b)`` with ``a < b`` to ``[strategies left of a, of b]``.
        neighbours: per node, the nodes it has an edge with.
        rows: those that may bind, without intervals; ``moments``: what those with intervals say.
        followers: ``(node, its leader, its strategy by the leader's, in numbers of the problem)``,
            in the order found; a follower is not in ``costs`` (followers.py).
        constant: the cost of folded nodes.
    """

    def __init__(self, problem: Problem) -> None:
        self.pool = Pool()
        self.constant = 0.0
        # Equal arrays are one object, so that equal tables are computed once.
        self.costs = {node: self.pool.intern(cost) for node, cost in enumerate(problem.node_costs)}
        self.strategies: list[NDArray[np.intp]] = []
        whole: dict[int, NDArray[np.intp]] = {}
        for cost in problem.node_costs:
            self.strategies.append(whole.setdefault(len(cost), np.arange(len(cost))))
        self.edges: dict[tuple[int, int], Array] = {}
        self.neighbours: dict[int, set[int]] = {node: set() for node in self.costs}
        for a, b, cost in problem.edges:
            self.add_edge(a, b, self.pool.intern(cost))
        self.rows = []
        for index, row in enumerate(problem.rows):
            # Rows without a limit forbid nothing; rows over time are kept as moments.
            if row.limit < math.inf and row.intervals is None:
                # Half of the tolerance is left for rounding.
                limit = row.limit * (1 + math.copysign(ROW_TOLERANCE / 2, row.limit))
                self.rows.append(WorkRow(index, limit, self._interned(row.usage.items())))
        self.moments = Moments(problem.rows, self.pool)
        self.followers: list[tuple[int, int, NDArray[np.intp]]] = []

    def _interned(self, items: Iterable[tuple[int, Array]]) -> dict[int, Array]:
        return {node: self.pool.intern(array) for node, array in items}

    def add_edge(self, a: int, b: int, cost: Array) -> None:
        """Add the cost between two nodes to what there is, ``[strategies of a, strategies of
        b]``.
        """
        # An edge from a node to itself: only equal strategies meet, on the diagonal.
        if a == b:
            self.costs[a] = self.pool.add(self.costs[a], self.pool.intern(np.diagonal(cost)))
            return
        if a > b:
            a, b, cost = b, a, self.pool.transpose(cost)
        before = self.edges.get((a, b))
        self.edges[a, b] = cost if before is None else self.pool.add(before, cost)
        self.neighbours[a].add(b)
        self.neighbours[b].add(a)

    def edge(self, a: int, b: int) -> Array:
        """The cost between two neighbours, ``[strategies of a, strategies of b]``."""
        return self.edges[a, b] if a < b else self.pool.transpose(self.edges[b, a])

    def drop_edge(self, a: int, b: int) -> None:
        """Remove an edge."""
        del self.edges[min(a, b), max(a, b)]
        self.neighbours[a].discard(b)
        self.neighbours[b].discard(a)

    def restrict(self, node: int, keep: NDArray[np.bool_]) -> None:
        """Keep only the marked strategies of a node."""
        index = np.flatnonzero(keep)
        self.strategies[node] = self.strategies[node][index]
        self.costs[node] = self.pool.take(self.costs[node], (index,))
        for other in self.neighbours[node]:
            a, b = min(node, other), max(node, other)
            # Tables are kept once, as [strategies of the smaller node, of the larger one].
            both = (index, slice(None)) if a == node else (slice(None), index)
            self.edges[a, b] = self.pool.take(self.edges[a, b], both)
        for row in self.rows:
            if node in row.usage:
                row.usage[node] = self.pool.take(row.usage[node], (index,))
        self.moments.take(node, index, self.pool)

    def duplicate(self) -> Network:
        """A copy that can be changed by itself; arrays and the pool are shared."""
        whole = self.copy_of_nodes(self.costs)
        whole.edges = dict(self.edges)
        whole.neighbours = {node: set(others) for node, others in self.neighbours.items()}
        return whole

    def copy_of_nodes(self, nodes: Iterable[int], rows: list[WorkRow] | None = None) -> Network:
        """A network of some of the nodes, with their costs and without edges; with their part of
        the rows if none are given.
        """
        part = copy.copy(self)
        part.costs = {node: self.costs[node] for node in nodes}
        part.strategies = list(self.strategies)
        part.edges, part.neighbours = {}, {node: set() for node in part.costs}
        if rows is None:
            rows = []
            for row in self.rows:
                usage = {node: used for node, used in row.usage.items() if node in part.costs}
                rows.append(WorkRow(row.index, row.room, usage))
        part.rows, part.moments = rows, self.moments.part(part.costs)
        return part

    def expand(self, choice: dict[int, int]) -> tuple[int, ...]:
        """Choices among strategies left (folded nodes have one) as choices of the problem."""
        found = [int(left[choice.get(node, 0)]) for node, left in enumerate(self.strategies)]
        for node, leader, strategies in reversed(self.followers):
            found[node] = int(strategies[found[leader]])
        return tuple(found)

    def condense(self, choice: Sequence[int]) -> NDArray[np.intp]:
        """A choice of the problem as choices among the strategies left; where it was dropped, the
        first that is left.
        """
        inner = np.zeros(len(choice), dtype=np.intp)
        for node in self.costs:
            found = np.flatnonzero(self.strategies[node] == choice[node])
            inner[node] = found[0] if len(found) else 0
        return inner


FORBIDDEN = 1e300
"""What stands for infinite where a difference is needed; no cost comes near."""


def _never() -> bool:
    return False


def simplify(problem: Problem, out_of_time: Callable[[], bool] = _never) -> Network | Infeasible:
    """Build the network of a problem and make it as small as the rules above can in the time."""
    network = Network(problem)
    return tighten(network, problem, out_of_time) or network


def tighten(
    network: Network, problem: Problem, out_of_time: Callable[[], bool] = _never
) -> Infeasible | None:
    """Make a network of a problem as small as the rules above can in the time, in place."""
    # Each rule may make others apply again.
    changed = set(network.costs)
    while changed:
        failure = _drop_forbidden(network, changed) or _tighten_rows(network, problem)
        if failure is not None:
            return failure
        changed = set()
        # What uses too much, then what another strategy replaces.
        failure = _drop_exceeding(network, changed)
        if failure is not None:
            return failure
        if not changed:
            changed = _drop_dominated(network, out_of_time)
    _fold(network)
    return None


def _drop_forbidden(network: Network, nodes: set[int]) -> Infeasible | None:
    """Arc consistency: drop strategies with cost inf, alone or with every strategy of a
    neighbour.
    """
    walls = _Memo()
    pending: list[int] = []
    queued: set[int] = set()

    def drop(node: int, keep: NDArray[np.bool_]) -> Infeasible | None:
        if not keep.any():
            reason = "every strategy of one node is forbidden, by itself or by its neighbours"
            return Infeasible(True, reason, nodes=(node,))
        network.restrict(node, keep)
        if node not in queued:
            pending.append(node)
            queued.add(node)
        return None

    # Strategies that are forbidden by themselves.
    for node in sorted(nodes):
        keep = walls.finite(network.costs[node])
        if not keep.all() and (failure := drop(node, keep)) is not None:
            return failure
    pending = sorted(nodes, reverse=True)
    queued = set(pending)
    # A node that lost strategies may leave a neighbour's strategy without a partner.
    while pending:
        node = pending.pop()
        queued.discard(node)
        for other in sorted(network.neighbours[node]):
            a, b = min(node, other), max(node, other)
            keep = walls.open(network.edges[a, b], 1 if a == other else 0)
            if not keep.all() and (failure := drop(other, keep)) is not None:
                return failure
    return None


class _Memo:
    """Where arrays are finite, computed once per array (the pool keeps them alive)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], NDArray[np.bool_]] = {}

    def finite(self, array: Array) -> NDArray[np.bool_]:
        return self._get(array, -1)

    def open(self, array: Array, dim: int) -> NDArray[np.bool_]:
        return self._get(array, dim)

    def _get(self, array: Array, dim: int) -> NDArray[np.bool_]:
        key = (id(array), dim)
        if key not in self._known:
            self._known[key] = np.isfinite(array if dim < 0 else array.min(axis=dim))
        return self._known[key]


def _tighten_rows(network: Network, problem: Problem) -> Infeasible | None:
    """Take what every strategy of a node uses out of the rows; drop rows that cannot bind; find
    rows that cannot hold.
    """
    kept = []
    ranges: dict[int, tuple[float, float, Array]] = {}
    for row in network.rows:
        # Many nodes share an array of usage, so its range is computed once.
        for used in row.usage.values():
            if id(used) not in ranges:
                least, most = float(used.min()), float(used.max())
                ranges[id(used)] = (
                    least,
                    most - least,
                    used if least == 0 else network.pool.intern(used - least),
                )
        # What is left beyond the least of every node.
        room = row.room - math.fsum(ranges[id(used)][0] for used in row.usage.values())
        if room < 0:
            return row_exceeded(network, problem, row.index)
        usage = {
            node: ranges[id(used)][2] for node, used in row.usage.items() if ranges[id(used)][1] > 0
        }
        # Even the largest uses fit: the row never binds.
        if math.fsum(ranges[id(used)][1] for used in row.usage.values()) > room:
            kept.append(WorkRow(row.index, room, usage))
    network.rows = kept
    exceeded = network.moments.tighten(network.pool)
    return None if exceeded is None else row_exceeded(network, problem, exceeded)


def row_exceeded(network: Network, problem: Problem, index: int) -> Infeasible:
    """The certificate that a row cannot be kept: even with the least usage of every node it is
    exceeded.
    """
    row = problem.rows[index]
    # The choice that uses least of the row.
    least_of = {
        node: int(used[network.strategies[node]].argmin()) for node, used in row.usage.items()
    }
    choice = [int(left[least_of.get(node, 0)]) for node, left in enumerate(network.strategies)]
    least = {node: float(used[choice[node]]) for node, used in row.usage.items()}
    total = row.used(choice)
    most = tuple(
        sorted((node for node in least if least[node] > 0), key=lambda node: (-least[node], node))[
            :10
        ]
    )
    reason = (
        f"row {index}: its limit is {row.limit:.6g}, and the least that any allowed choice uses "
        f"is {total:.6g}"
    )
    return Infeasible(True, reason, index, total, most)


def _drop_exceeding(network: Network, changed: set[int]) -> Infeasible | None:
    """Drop strategies that use more than a row has; the nodes that lost some are added to
    ``changed``.
    """
    for row in network.rows:
        # Look at each array of usage once, and only at the nodes of those that are too large.
        top = {id(used): used for used in row.usage.values()}
        large = {key for key, used in top.items() if used.max() > row.room}
        for node in (
            [node for node, used in row.usage.items() if id(used) in large] if large else ()
        ):
            keep = row.usage[node] <= row.room
            if not keep.any():
                reason = (
                    f"row {row.index}: each strategy left of one node exceeds it, whatever the "
                    "others use"
                )
                return Infeasible(True, reason, row.index, nodes=(node,))
            if not keep.all():
                network.restrict(node, keep)
                changed.add(node)
    # The least room between any two moments, by powers of two.
    rooms = network.moments.least_room()
    for node, spans in list(network.moments.spans.items()):
        keep = np.ones(len(network.costs[node]), dtype=bool)
        # The span is covered by two such ranges, which may overlap.
        for first, last, used in spans:
            level = (last - first).bit_length() - 1
            keep &= used <= min(rooms[level][first], rooms[level][last - (1 << level)])
        if not keep.any():
            reason = (
                "each strategy left of one node exceeds the limit at some moment, whatever the "
                "others use"
            )
            return Infeasible(
                True, reason, int(network.moments.rows[spans[0].first]), nodes=(node,)
            )
        if not keep.all():
            network.restrict(node, keep)
            changed.add(node)
    return None


def _drop_dominated(network: Network, out_of_time: Callable[[], bool]) -> set[int]:
    """Drop strategies that another strategy of the node replaces; returns the nodes that lost
    some.
    """
    # A strategy may only replace another if it uses no more anywhere.
    usages: dict[int, list[Array]] = {}
    for row in network.rows:
        for node, used in row.usage.items():
            usages.setdefault(node, []).append(used)
    for node, spans in network.moments.spans.items():
        usages.setdefault(node, []).extend(span.used for span in spans)
    known: dict[tuple[int, ...], NDArray[np.bool_]] = {}
    worst: dict[int, Array] = {}
    changed = set()
    work = 0
    for node in sorted(network.costs):
        size = len(network.costs[node])
        if size == 1:
            continue
        # Wide tables would take longer than they gain.
        edges = [network.edge(node, other) for other in network.neighbours[node]]
        if any(size * edge.size > DOMINANCE_WORK for edge in edges) or len(edges) > 64:
            continue
        uses = list({id(array): array for array in usages.get(node, ())}.values())
        # Nodes with equal costs, edges and uses lose the same strategies.
        key = (id(network.costs[node]), *sorted(map(id, edges)), -1, *sorted(map(id, uses)))
        if key not in known:
            work += sum(size * edge.size for edge in edges if id(edge) not in worst)
            if work > DOMINANCE_WORK_IN_ALL or out_of_time():
                break
            known[key] = _undominated(network.costs[node], edges, uses, worst)
        if not known[key].all():
            network.restrict(node, known[key])
            changed.add(node)
    return changed


def _undominated(
    cost: Array, edges: list[Array], usages: list[Array], worst: dict[int, Array]
) -> NDArray[np.bool_]:
    """Which strategies no other replaces. ``excess[s, t]``: the most that t costs above s."""
    excess = cost[None, :] - cost[:, None]
    for edge in edges:
        if id(edge) not in worst:
            worst[id(edge)] = _most_above(edge)
        with np.errstate(invalid="ignore"):
            excess = excess + worst[id(edge)]
    # -inf + inf: s is forbidden with one neighbour's strategies, t with another's; neither replaces
    # the other
    replaces = np.nan_to_num(excess, nan=np.inf, posinf=np.inf, neginf=-np.inf) <= 0
    for used in usages:
        replaces &= used[None, :] <= used[:, None]
    np.fill_diagonal(replaces, False)
    left = np.ones(len(cost), dtype=bool)
    for strategy in range(len(cost)):  # one after another: what replaces it must still be there
        left[strategy] = not (replaces[strategy] & left).any()
    return left


def _most_above(edge: Array) -> Array:
    """``[s, t]``: the most that row t is above row s, where s is allowed.

    Strategies that ask for the same layouts have the same rows and columns: each is compared once.
    """
    rows, row_of = _distinct(edge)
    columns, _ = _distinct(rows.T)
    own = columns.T
    # Of forbidden pairs alone the difference has no value: a strategy that is forbidden itself is
    # as far below as can be.
    above = np.where(np.isinf(own), FORBIDDEN, own)
    found = (above[None, :, :] - own[:, None, :]).max(axis=2)  # of [s, t, other]
    found[found > FORBIDDEN / 2] = np.inf
    most: Array = found[np.ix_(row_of, row_of)]
    return most


def _distinct(table: Array) -> tuple[Array, list[int]]:
    """The rows of a table that differ, and which of these each row is."""
    numbers: dict[bytes, int] = {}
    row_of = [numbers.setdefault(row.tobytes(), len(numbers)) for row in table]
    first = np.zeros(len(numbers), dtype=np.intp)
    first[row_of[::-1]] = np.arange(len(row_of))[::-1]
    return table[first], row_of


def _fold(network: Network) -> None:
    """Fold nodes with one strategy, and edges that are sums of node costs, into node costs."""
    parts: dict[int, tuple[Array, Array] | None] = {}
    for a, b in sorted(network.edges):
        edge = network.edges[a, b]
        if id(edge) not in parts:
            parts[id(edge)] = _separate(edge)
        found = parts[id(edge)]
        if found is not None:
            network.costs[a] = network.pool.add(network.costs[a], network.pool.intern(found[0]))
            network.costs[b] = network.pool.add(network.costs[b], network.pool.intern(found[1]))
            network.drop_edge(a, b)
    for node in [node for node, cost in network.costs.items() if len(cost) == 1]:
        network.constant += float(network.costs.pop(node)[0])
        # An edge with one strategy at an end is a sum of node costs.
        assert not network.neighbours[node]


def _separate(edge: Array) -> tuple[Array, Array] | None:
    """``f, g`` with ``edge = f[:, None] + g[None, :]``, if there are such."""
    if not np.isfinite(edge).all():
        return None
    f, g = edge[:, 0], edge[0] - edge[0, 0]
    if 1 in edge.shape or (f[:, None] + g[None, :] == edge).all():
        return f, g
    return None
