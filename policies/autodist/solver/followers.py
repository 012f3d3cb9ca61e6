"""Nodes that follow another: where each strategy of a node leaves one of its neighbour's, the two
are one node.

Most nodes of a real graph are so: an operator that takes its layout from its operand, the parts of
a tuple, a copy that is what its reader wants. The follower's costs, edges and uses become those of
its leader, strategy by strategy. It is exact, makes no node or edge larger, and of the contest's
instances it leaves a fifth of the nodes and no forbidden pair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.moments import WorkRow
from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.problem import Array


def merge_followers(network: Network, out_of_time: Callable[[], bool]) -> int:
    """Merge nodes with their leaders in place, until there are no followers or no time; returns how
    many were merged.
    """
    known: dict[
        int, NDArray[np.intp] | None
    ] = {}  # the pool keeps the tables alive, so ids stay theirs
    # The rows in which each node uses something.
    rows_of: dict[int, list[WorkRow]] = {}
    for row in network.rows:
        for node in row.usage:
            rows_of.setdefault(node, []).append(row)
    # A merge may make further followers: its neighbours are looked at again.
    pending, count = deque(sorted(network.costs)), 0
    queued = set(pending)
    while pending and not out_of_time():
        leader = pending.popleft()
        queued.discard(leader)
        if leader not in network.costs:
            continue
        num_edges = len(network.neighbours[leader])
        for node in sorted(network.neighbours[leader]):
            table = network.edge(leader, node)
            # Many edges share a table, so it is looked at once.
            if id(table) not in known:
                known[id(table)] = _only_choice(table)
            index = known[id(table)]
            # of two nodes that determine each other, the one with fewer edges goes
            if index is None or (
                table.shape[0] == table.shape[1] and len(network.neighbours[node]) > num_edges
            ):
                continue
            count += 1
            for changed in _merge(network, node, leader, index, table, rows_of):
                if changed not in queued:
                    queued.add(changed)
                    pending.append(changed)
    return count


def _only_choice(table: Array) -> NDArray[np.intp] | None:
    """Per strategy of the first node, the one that the second has left; None if one leaves it
    several.
    """
    is_open = np.isfinite(table)
    return is_open.argmax(axis=1) if (is_open.sum(axis=1) == 1).all() else None


def _merge(
    network: Network,
    node: int,
    leader: int,
    index: NDArray[np.intp],
    table: Array,
    rows_of: dict[int, list[WorkRow]],
) -> list[int]:
    """Make a node part of its leader; returns the nodes whose edges have changed."""
    pool = network.pool
    # The leader pays for both, by what its strategies mean for the follower.
    cost = network.costs.pop(node)[index] + table[np.arange(len(index)), index]
    network.costs[leader] = pool.intern(network.costs[leader] + cost)
    changed = [leader]
    # Edges of the follower become edges of the leader.
    for other in sorted(network.neighbours[node]):
        edge = pool.take(network.edge(node, other), (index, slice(None)))
        network.drop_edge(node, other)
        if other != leader:
            network.add_edge(leader, other, edge)
            changed.append(other)
    del network.neighbours[node]
    # So does what it uses of rows.
    for row in rows_of.pop(node, ()):
        used = pool.take(row.usage.pop(node), (index,))
        if leader not in row.usage:
            rows_of.setdefault(leader, []).append(row)
        row.usage[leader] = pool.add(row.usage[leader], used) if leader in row.usage else used
    network.moments.move(node, leader, index, pool)
    # How to read the follower's strategy off the leader's.
    size = int(network.strategies[leader].max()) + 1
    strategies = np.zeros(size, dtype=np.intp)
    strategies[network.strategies[leader]] = network.strategies[node][index]
    network.followers.append((node, leader, strategies))
    return changed
