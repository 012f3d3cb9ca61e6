"""Large neighbourhood search: solve a part of the network as well as it can be while all other
nodes stay as they are.

A part is a ball around a random node. Nodes of it that are too wide for elimination stay as well.
Within the part everything else of the solver is used: multipliers on what the rest leaves of the
rows, exact elimination, repair and moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.crossing import choices_of
from shardwright.policies.autodist.solver.local_search import cost_of
from shardwright.policies.autodist.solver.moments import WorkRow
from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.problem import Array
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.relaxation import Relaxation, maximise

MAX_JOIN = 1 << 18
"""Entries of the largest join in a part."""

MAX_STEPS = 25
"""Evaluations of the relaxation per part."""

SMALLEST, LARGEST = 30, 1000
"""Nodes of a part: it grows when parts of a size bring nothing, and starts small again at the
end.
"""

MAX_FAILURES = 12
"""Parts of one size in a row that bring nothing before the size doubles."""


@dataclass
class _State:
    network: Network
    choice: NDArray[np.intp]
    used: Array  # of each row
    rows_of: dict[int, list[int]]


def improve_parts(
    network: Network,
    choice: NDArray[np.intp],
    progress: Progress,
    *,
    expand: Callable[[NDArray[np.intp]], Sequence[int]] | None = None,
    rounds: int = 2,
    until_s: float = 0.0,
) -> NDArray[np.intp]:
    """Improve a choice within the rows until time is over or nothing improves any more; every
    better one is proposed.

    Args:
        network: with all rows.
        choice: among the strategies left, by node of the problem.
        progress: better choices are proposed to it.
        expand: how to make a choice of the problem; that of the network if None.
        rounds: how often all sizes of parts are gone through without an improvement before it ends.
        until_s: end when no more seconds than these are left.
    """
    # The rows in which a node uses something, and what the choice uses of each row now.
    rows_of: dict[int, list[int]] = {}
    for index, row in enumerate(network.rows):
        for node in row.usage:
            rows_of.setdefault(node, []).append(index)
    used = np.array(
        [
            sum(float(usage[choice[node]]) for node, usage in row.usage.items())
            for row in network.rows
        ]
    )
    state = _State(network, choice.copy(), used, rows_of)
    rng = np.random.default_rng(0)
    nodes = sorted(network.costs)
    # Parts begin small. A size that brings nothing for a while is doubled; after the largest,
    # again.
    size, failures, idle = SMALLEST, 0, 0
    while not progress.done and idle < rounds and progress.left_s > until_s:
        # A ball: a node and those near to it, which may change together.
        if _improve(state, _ball(network, int(rng.choice(nodes)), size), progress):
            failures = idle = 0
            progress.propose(
                expand(state.choice)
                if expand
                else network.expand(dict(enumerate(state.choice.tolist())))
            )
            continue
        failures += 1
        if failures >= MAX_FAILURES:
            failures, size = 0, size * 2
            if size > min(LARGEST, 2 * len(nodes)):
                size, idle = SMALLEST, idle + 1
    return state.choice


def _ball(network: Network, centre: int, size: int) -> set[int]:
    """The nodes nearest to one; neighbours of nodes with very many neighbours are not entered
    through them.
    """
    found, queue = {centre}, deque([centre])
    while queue and len(found) < size:
        node = queue.popleft()
        # A hub, such as a table that all layers read, joins everything: through it the ball would
        # be of nodes that have nothing else to do with the centre.
        if len(network.neighbours[node]) > size and node != centre:
            continue
        for other in sorted(network.neighbours[node]):
            if other not in found and len(found) < size:
                found.add(other)
                queue.append(other)
    return found


def _improve(state: _State, free: set[int], progress: Progress) -> bool:
    """Solve the part of these nodes; whether that made the choice cheaper."""
    part = _part(state, free)
    # Too wide to be exact: leave out what elimination could not take out.
    relaxation = Relaxation(part, shared=False, max_join=MAX_JOIN)
    if not relaxation.exact:
        free = free - set(relaxation.elimination.core)
        part = _part(state, free)
        relaxation = Relaxation(part, shared=False, max_join=MAX_JOIN)
    if not free or not relaxation.exact:
        return False
    before = cost_of(part, state.choice)
    maximum = maximise(
        relaxation,
        np.zeros(len(part.rows)),
        max_steps=MAX_STEPS,
        stop_above=before,
        out_of_time=progress.is_over,
    )
    # No choice of this part is cheaper.
    if maximum.bound >= before - 1e-12 * abs(before):
        return False
    best = min(
        choices_of(relaxation, maximum, progress, max_repaired=2),
        key=lambda c: cost_of(part, c),
        default=None,
    )
    if best is None or cost_of(part, best) >= before - 1e-12 * abs(before):
        return False
    # Take over the choice, and what it uses of the rows.
    for node in free:
        for index in state.rows_of.get(node, ()):
            usage = state.network.rows[index].usage[node]
            state.used[index] += usage[best[node]] - usage[state.choice[node]]
        state.choice[node] = best[node]
    return True


def _part(state: _State, free: set[int]) -> Network:
    """The network of some nodes, the others being constants: in the nodes' costs and in the rows'
    room.
    """
    whole = state.network
    part = whole.copy_of_nodes(sorted(free), rows=[])
    part.constant = 0.0
    for node in sorted(free):
        cost = whole.costs[node]
        # An edge to a node that stays is a cost of this one.
        for other in sorted(whole.neighbours[node]):
            if other not in free:
                cost = cost + whole.edge(node, other)[:, state.choice[other]]
            elif node < other:
                part.edges[node, other] = whole.edges[node, other]
                part.neighbours[node].add(other)
                part.neighbours[other].add(node)
        part.costs[node] = cost
    for index in sorted({index for node in free for index in state.rows_of.get(node, ())}):
        usage = {node: used for node, used in whole.rows[index].usage.items() if node in free}
        # The room of a row is what the others leave.
        room = (
            whole.rows[index].room
            - state.used[index]
            + sum(float(used[state.choice[node]]) for node, used in usage.items())
        )
        if sum(float(used.max()) for used in usage.values()) > room:
            part.rows.append(WorkRow(index, room, usage))
    return part
