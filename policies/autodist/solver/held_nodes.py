"""Prices of moments again, with choices that are nearly the best at these prices: hold a few nodes
as they are, and elimination solves all others exactly.

Example: a ring of 100 nodes is too wide for elimination by chance of its order alone, but with any
one node held it is a chain, and the other 99 are solved at once. Networks of models are chains with
branches and some hubs that are read everywhere: with a twentieth of the nodes held, the tables of
the others stay small (cutset conditioning, Dechter 1990).

Several such sets are drawn, and take turns, so that most nodes are free in most turns. No turn
raises the priced cost. Between turns the prices move along the excess of the choice (a subgradient,
with Polyak's step length), which is far closer to that of the best choice than what messages point
at (priced.py). From time to time the choice is brought within the limits by moves and proposed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.eliminate import Elimination
from shardwright.policies.autodist.solver.local_search import cost_of
from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.priced import PricedMessages
from shardwright.policies.autodist.solver.problem import Array
from shardwright.policies.autodist.solver.progress import Progress

MAX_JOIN = 1 << 14
"""Entries of the largest join while the nodes to hold are chosen. Larger ones hold fewer nodes, and
take longer: twice as long with eight times as many.
"""

NUM_STARTS, PASSES = 2, 20
"""How many choices the messages point at are tried whenever steps get shorter, and the passes
before each.
"""

NUM_SETS = 6
"""Sets of held nodes that take turns."""

AVOIDANCE = 0.3
"""How much less likely a node is held that an earlier set holds."""

FIRST_STEP, MIN_STEP = 0.3, 2e-3
"""The step lengths, relative to Polyak's, at the beginning and at the end."""

PATIENCE = 40
"""Turns after which the steps get shorter by half."""

BETWEEN_PROPOSALS = 10
"""Turns from one proposal to the next."""


def search_held(
    network: Network, progress: Progress, priced: PricedMessages, seconds: float
) -> Array:
    """Improve prices and the best choice until steps are short or the seconds are over.

    Args:
        network: with moments and without rows.
        progress: has a choice, to begin with; better ones are proposed to it.
        priced: at the prices to begin with.
        seconds: to take at most.

    Returns the last prices, by moment.
    """
    assert progress.choice is not None
    end_s = progress.left_s - seconds
    moves, room = priced.moves, network.moments.room
    sets = _sets(network, progress)
    choice, prices = network.condense(progress.choice), priced.prices
    direction: Array | None = None
    step, turn = FIRST_STEP, 0
    while step >= MIN_STEP and not progress.done and progress.left_s > end_s:
        if turn % PATIENCE == 0:
            choice = _restarted(network, priced, sets, choice, prices)
            step, direction = step / (2 if turn else 1), None
            moves.propose(choice, progress, prices)
        # What is used beyond the room says where prices should rise. It is smoothed, as it jumps.
        excess = moves.used(choice) - room
        direction = excess if direction is None else 0.7 * direction + 0.3 * excess
        useful = np.where((prices <= 0) & (direction < 0), 0.0, direction)
        length = float(useful @ useful)
        if length > 0:
            value = cost_of(network, choice) + float(prices @ excess)
            distance = max(progress.cost - value, 1e-3 * abs(value))
            prices = np.maximum(0.0, prices + step * distance / length * useful)
        choice = sets[turn % len(sets)].solve(choice, moves.costs(prices))
        turn += 1
        if turn % BETWEEN_PROPOSALS == 0:
            moves.propose(choice, progress, prices)
    return prices


def _sets(network: Network, progress: Progress) -> list[HeldNodes]:
    """The sets of held nodes that take turns; fewer if time ends."""
    rng = np.random.default_rng(0)
    sets: list[HeldNodes] = []
    avoided: set[int] = set()
    while not sets or (len(sets) < NUM_SETS and not progress.done):
        sets.append(HeldNodes(network, nodes_to_hold(network, MAX_JOIN, avoided, rng)))
        avoided.update(sets[-1].held)
    return sets


def _restarted(
    network: Network,
    priced: PricedMessages,
    sets: Sequence[HeldNodes],
    choice: NDArray[np.intp],
    prices: Array,
) -> NDArray[np.intp]:
    """The cheapest at these prices of the choice and those that messages point at, after a turn of
    every set.

    Hubs are in most sets, so that turns alone seldom change them: messages see them from afar.
    """
    costs, room = priced.moves.costs(prices), network.moments.room
    priced.move_to(prices)
    starts = [choice]
    for _ in range(NUM_STARTS):
        for _ in range(PASSES):
            priced.messages.forward()
            priced.messages.backward()
        starts.append(priced.messages.rounded())
    best, least = choice, math.inf
    for start in starts:
        for held in sets:
            start = held.solve(start, costs)
        value = cost_of(network, start) + float(prices @ (priced.moves.used(start) - room))
        if value < least:
            best, least = start, value
    return best


def nodes_to_hold(
    network: Network, max_join: int, avoided: Collection[int], rng: np.random.Generator
) -> list[int]:
    """Nodes without which elimination makes no join of more entries than ``max_join``.

    Nodes are taken out by the size of their joins, the smallest first. When none is small enough, a
    node with many neighbours is held, at random, rather none of those ``avoided``.
    """
    log_size = {node: math.log2(len(cost)) for node, cost in network.costs.items()}
    others = {node: set(network.neighbours[node]) for node in network.costs}
    joins: dict[int, float] = {}
    heap: list[tuple[float, int]] = []

    def rank(node: int) -> None:
        joins[node] = log_size[node] + sum(log_size[other] for other in others[node])
        heapq.heappush(heap, (joins[node], node))

    def weight(node: int) -> float:
        likely = AVOIDANCE if node in avoided else 1.0
        return len(others[node]) * log_size[node] * (0.4 + rng.random()) * likely

    for node in others:
        rank(node)
    held = []
    while others:
        join, node = heap[0]
        # An entry of the heap that is no longer so.
        if node not in others or join != joins[node]:
            heapq.heappop(heap)
            continue
        is_held = join > math.log2(max_join)
        if is_held:
            node = max(others, key=weight)
            held.append(node)
        near = others.pop(node)
        for other in near:
            others[other].discard(node)
            if not is_held:
                # Its neighbours become neighbours of each other.
                others[other] |= near
                others[other].discard(other)
        for other in near:
            rank(other)
    return held


class HeldNodes:
    """What it takes to solve all nodes but the held ones, for any costs, again and again."""

    def __init__(self, network: Network, held: Collection[int]) -> None:
        self.held = set(held)
        while True:
            self._free = [node for node in network.costs if node not in self.held]
            free = set(self._free)
            inside = {ends: edge for ends, edge in network.edges.items() if free.issuperset(ends)}
            sizes = {node: len(network.costs[node]) for node in self._free}
            # Its order is not quite that in which the held nodes were chosen.
            self._elimination = Elimination(
                {node: node for node in self._free}, sizes, inside, max_join=4 * MAX_JOIN
            )
            if not self._elimination.core:
                break
            self.held.update(self._elimination.core)
        # Per edge between a held and a free node ``(held, free, [strategies of both])``.
        self._borders: list[tuple[int, int, Array]] = []
        for a, b in network.edges:
            if (a in free) != (b in free):
                node, other = (b, a) if a in free else (a, b)
                self._borders.append((node, other, network.edge(node, other)))

    def solve(self, choice: NDArray[np.intp], costs: dict[int, Array]) -> NDArray[np.intp]:
        """The best choice at these costs of nodes in which the held ones are as in ``choice``."""
        costs = {node: costs[node].copy() for node in self._free}
        for node, other, edge in self._borders:
            costs[other] += edge[choice[node]]
        self._elimination.run(costs)
        found = choice.copy()
        self._elimination.trace(found)
        return found
