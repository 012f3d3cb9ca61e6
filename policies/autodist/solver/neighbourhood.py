"""Large neighbourhood search: solve a part of the network as well as it can be while all other
nodes stay as they are.

A part is a ball around a random node. Nodes of it that are too wide for elimination stay as well.
Within the part everything else of the solver is used: multipliers on what the rest leaves of the
rows, exact elimination, repair and moves.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.crossing import choices_of
from shardwright.policies.autodist.solver.local_search import cost_of
from shardwright.policies.autodist.solver.moments import Moments, WorkRow
from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.problem import Array
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.relaxation import Relaxation, maximise

MAX_JOIN = 1 << 18
"""Entries of the largest join in a part."""

MAX_STEPS = 25
"""Evaluations of the relaxation per part."""

SMALLEST, LARGEST = 30, 4000
"""Nodes of a part: sizes double from the one to the other."""

MAX_FAILURES = 12
"""How many parts of each size in a row bring nothing before a round is over."""


@dataclass
class _State:
    network: Network
    choice: NDArray[np.intp]
    used: Array  # of each row
    rows_of: dict[int, list[int]]
    used_over_time: Array  # at each moment
    prices: Array  # of each moment, about


MAX_MOMENTS = 48
"""Moments of a part that become its rows, those with the least room for what it may use. What
exceeds another one is not taken.
"""


def improve_parts(
    network: Network,
    choice: NDArray[np.intp],
    progress: Progress,
    *,
    expand: Callable[[NDArray[np.intp]], Sequence[int]] | None = None,
    rounds: int = 2,
    until_s: float = 0.0,
    prices: Array | None = None,
) -> NDArray[np.intp]:
    """Improve a choice within the rows until time is over or nothing improves any more; every
    better one is proposed.

    Args:
        network: with all rows.
        choice: among the strategies left, by node of the problem.
        progress: better choices are proposed to it.
        expand: how to make a choice of the problem; that of the network if None.
        rounds: how many rounds without an improvement end it.
        until_s: end when no more seconds than these are left.
        prices: what room costs at each moment, as far as that is known: parts begin with these.
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
    used_over_time = _over_time(network, network.costs, choice)
    if prices is None:
        prices = np.zeros(len(network.moments))
    state = _State(network, choice.copy(), used, rows_of, used_over_time, prices)
    rng = np.random.default_rng(0)
    nodes = sorted(network.costs)
    # All sizes in turn: small parts take little time, and large ones find what needs many changes.
    sizes = [SMALLEST]
    while 2 * sizes[-1] <= min(LARGEST, 2 * len(nodes)):
        sizes.append(2 * sizes[-1])
    failures = 0
    for size in itertools.cycle(sizes):
        if progress.done or failures >= rounds * MAX_FAILURES * len(sizes):
            break
        if progress.left_s <= until_s:
            break
        if _improve(state, _part_of(state, nodes, size, rng), progress):
            failures = 0
            progress.propose(
                expand(state.choice)
                if expand
                else network.expand(dict(enumerate(state.choice.tolist())))
            )
        else:
            failures += 1
    return state.choice


NUM_BALLS = 4
"""How many balls a part has whose nodes are to exchange room at one moment."""

FULL = 0.99
"""The share of its room from which a moment is full."""


def _part_of(state: _State, nodes: Sequence[int], size: int, rng: np.random.Generator) -> set[int]:
    """The nodes of the next part: a ball, whose nodes may change together; or several around nodes
    that are live at one full moment, so that one may use there what another gives up.
    """
    network = state.network
    full = np.flatnonzero(state.used_over_time > FULL * network.moments.room)
    if len(full) and rng.random() < 0.5:
        moment = int(rng.choice(full))
        live = [
            node
            for node, spans in network.moments.spans.items()
            if any(span.first <= moment < span.last for span in spans)
        ]
        centres = rng.choice(live, min(NUM_BALLS, len(live)), replace=False).tolist()
        return set().union(*(_ball(network, centre, size // NUM_BALLS) for centre in centres))
    return _ball(network, int(rng.choice(nodes)), size)


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
    part, multipliers = _part(state, free)
    # Too wide to be exact: leave out what elimination could not take out.
    relaxation = Relaxation(part, shared=False, max_join=MAX_JOIN)
    if not relaxation.exact:
        free = free - set(relaxation.elimination.core)
        part, multipliers = _part(state, free)
        relaxation = Relaxation(part, shared=False, max_join=MAX_JOIN)
    if not free or not relaxation.exact:
        return False
    before = cost_of(part, state.choice)
    maximum = maximise(
        relaxation,
        multipliers,
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
    used_over_time = (
        state.used_over_time
        - _over_time(state.network, free, state.choice)
        + _over_time(state.network, free, best)
    )
    room = state.network.moments.room
    if (used_over_time > np.maximum(room + 1e-13 * np.abs(room), state.used_over_time)).any():
        return False
    state.used_over_time = used_over_time
    # Take over the choice, and what it uses of the rows.
    for node in free:
        for index in state.rows_of.get(node, ()):
            usage = state.network.rows[index].usage[node]
            state.used[index] += usage[best[node]] - usage[state.choice[node]]
        state.choice[node] = best[node]
    return True


def _part(state: _State, free: set[int]) -> tuple[Network, Array]:
    """The network of some nodes, the others being constants: in the nodes' costs and in the rows'
    room; and the multipliers of its rows to begin with.
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
    of_moments, prices = _rows_of_moments(state, free, len(whole.rows))
    multipliers = np.concatenate([np.zeros(len(part.rows)), prices])
    part.rows += of_moments
    part.moments = Moments((), whole.pool)
    return part, multipliers


def _over_time(network: Network, nodes: Iterable[int], choice: NDArray[np.intp]) -> Array:
    """What some nodes use at each moment."""
    spans = network.moments.spans
    return network.moments.over_time(
        (span, float(span.used[choice[node]])) for node in nodes for span in spans.get(node, ())
    )


def _rows_of_moments(
    state: _State, free: set[int], first_index: int
) -> tuple[list[WorkRow], Array]:
    """The moments that a part may exceed as rows, with the room that the others leave, and with
    about the prices of the moments that each stands for.
    """
    whole = state.network.moments
    if not len(whole):
        return [], np.zeros(0)
    part = whole.part(free)
    others = state.used_over_time - _over_time(state.network, free, state.choice)
    # The choice is within the limits, so that what is above them is rounding.
    least = part.over_time((span, float(span.used.min())) for span in part.all_spans())
    part.room = np.maximum(whole.room - others, least)
    part.tighten(state.network.pool)
    part.merge()
    most = part.over_time((span, float(span.used.max())) for span in part.all_spans())
    tight = np.argsort(part.room / np.maximum(most, 1e-300), kind="stable")[:MAX_MOMENTS]
    chosen = np.sort(tight)
    if not len(chosen):
        return [], np.zeros(0)
    usages = part.usage_at(chosen.tolist(), state.network.pool)
    rows = [
        WorkRow(first_index + number, float(part.room[moment]), usage)
        for number, (moment, usage) in enumerate(zip(chosen.tolist(), usages, strict=True))
    ]
    # A moment that is no row is priced at the last one before it.
    place = whole.rows.astype(np.float64) * (whole.times.max() + 1) + whole.times
    kept = part.rows.astype(np.float64) * (whole.times.max() + 1) + part.times
    stands_for = np.searchsorted(kept[chosen], place, side="right") - 1
    prices = np.bincount(np.maximum(stands_for, 0), state.prices, len(chosen))
    return rows, np.asarray(prices, dtype=np.float64)
