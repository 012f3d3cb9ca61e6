"""Choose one strategy per node at least cost, within the rows, with a proof.

Variables: ``x[n]``, the strategy of node ``n`` (problem.py).

Objective: ``sum_n cost[n][x[n]] + sum_(a, b) cost[a, b][x[a], x[b]]`` (`evaluate`).

Constraints:

- forbidden strategies and pairs: costs of inf, dropped by arc consistency (network.py);
- rows: ``sum_n usage[r][n][x[n]] <= limit[r]``; priced by multipliers (relaxation.py), kept by
  repair and moves (local_search.py).

How it is solved, each step only if the one before left a gap and time is left:

0. A hint of repeated blocks only orders the nodes, so that equal blocks are seen to be equal
   (renumbering.py).
1. `simplify` drops what cannot matter, and finds rows that cannot be kept (network.py).
2. No row can bind: elimination is exact, repeated blocks included (eliminate.py).
3. Rows: the best multipliers give a bound, the choices met on the way are proposed; crossing two of
   them, repair and local search give better ones (relaxation.py, crossing.py, local_search.py).
4. Small problems: branch and bound closes what is left (branch.py). Larger ones: parts are solved
   exactly while the rest stays (neighbourhood.py), until many parts in a row bring nothing.

Where nodes have too many neighbours for elimination, wide.py takes the place of steps 2 to 4. Rows
over time are first made rows of moments, those that turn out to matter (over_time.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shardwright.policies.autodist.solver.branch import branch
from shardwright.policies.autodist.solver.crossing import choices_of
from shardwright.policies.autodist.solver.eliminate import MAX_JOIN
from shardwright.policies.autodist.solver.local_search import LocalSearch
from shardwright.policies.autodist.solver.neighbourhood import improve_parts
from shardwright.policies.autodist.solver.network import Network, simplify
from shardwright.policies.autodist.solver.over_time import reduce_over_time, search_over_time
from shardwright.policies.autodist.solver.problem import Array, Infeasible, Problem, Solution
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.relaxation import Maximum, Relaxation, maximise
from shardwright.policies.autodist.solver.renumbering import Renumbering
from shardwright.policies.autodist.solver.wide import search_wide

MAX_BRANCHED = 2000
"""Nodes of the largest network that branch and bound is tried on."""


def solve(
    problem: Problem,
    *,
    time_limit_s: float,
    on_improvement: Callable[[float, float], None] | None = None,
    target_gap: float = 0.0,
    start: Sequence[int] | None = None,
) -> Solution | Infeasible:
    """The best choice that can be found and proved in the time.

    Deterministic for equal problems unless time ends the search.

    Args:
        problem: what to choose.
        time_limit_s: seconds; the answer is there at most about a tenth later, or later by one step
            that cannot be cut short. On a busy machine a search without a choice goes on until it
            has worked as long, at most four times the limit.
        on_improvement: called with ``(cost, bound)`` whenever one of them gets better.
        target_gap: stop once cost and bound are that near, relative to the cost.
        start: a choice to begin with, say of a problem that differs a little; it need not respect
            the rows.

    Raises:
        KeyboardInterrupt: only before any choice is found; later the best so far is returned, and
            says so.
    """
    # Nodes in the order of blocks, so that neighbours have near numbers.
    renumbering = Renumbering(problem)
    progress = Progress(renumbering.problem, time_limit_s, on_improvement, target_gap)
    interrupted = False
    try:
        _search(renumbering.problem, renumbering.forth(start), progress)
    except KeyboardInterrupt:
        if progress.choice is None:
            raise
        interrupted = True
    found = renumbering.back(progress.result())
    return (
        replace(found, interrupted=True) if interrupted and isinstance(found, Solution) else found
    )


def lower_bound(problem: Problem, *, time_limit_s: float) -> float:
    """What no choice within the rows costs less than: the best multipliers with exact elimination,
    and nothing more. ``inf`` where no choice keeps the rows, ``-inf`` where the problem is too wide
    for elimination.
    """
    ends = time.monotonic() + time_limit_s

    def is_over() -> bool:
        return time.monotonic() > ends

    # Make it small, then maximise; no choice is looked for.
    network = simplify(Renumbering(problem).problem, is_over)
    if isinstance(network, Infeasible):
        return math.inf
    relaxation = Relaxation(network, shared=True, max_join=MAX_JOIN, out_of_time=is_over)
    if not relaxation.exact:
        return -math.inf
    # A bound beyond all costs proves that the rows cannot be kept.
    beyond = _beyond(network)
    maximum = maximise(
        relaxation, np.zeros(len(network.rows)), stop_above=beyond, out_of_time=is_over
    )
    return math.inf if maximum.bound >= beyond else maximum.bound


def _search(problem: Problem, start: Sequence[int] | None, progress: Progress) -> None:
    network = simplify(problem, progress.is_over)
    if isinstance(network, Infeasible):
        progress.prove_infeasible(network)
        return
    # Rows over time have a search of their own around this one.
    if not len(network.moments):
        _search_network(network, problem, start, progress)
        return
    failure = reduce_over_time(network, problem, progress)
    if failure is not None:
        progress.prove_infeasible(failure)
        return
    if start is not None:
        progress.propose(start)
    search_over_time(network, problem, progress, _search_network)


def _search_network(
    network: Network, problem: Problem, start: Sequence[int] | None, progress: Progress
) -> None:
    """Search a network whose rows are all at one moment."""
    # A start is repaired, and improved, before anything else.
    if start is not None and network.costs:
        local = LocalSearch(network)
        local.load(network.condense(start))
        if local.repair(progress):
            local.descend(progress)
            progress.propose(network.expand(dict(enumerate(local.choice.tolist()))))
    # Chains of blocks have small joins: exact tables. Nets that are too wide are searched
    # otherwise.
    relaxation = Relaxation(network, shared=True, max_join=MAX_JOIN, out_of_time=progress.is_over)
    if not relaxation.exact:
        search_wide(network, problem, progress)
        return
    # Without rows elimination is the answer.
    if not network.rows:
        _eliminate(relaxation, progress)
        return
    ceiling, beyond = _ceiling(network), _beyond(network)
    zeros = np.zeros(len(network.rows))
    maximum = maximise(relaxation, zeros, stop_above=beyond, out_of_time=progress.is_over)
    if maximum.bound >= beyond:
        progress.prove_infeasible(_rows_exceeded(problem, network, maximum, ceiling))
        return
    progress.raise_bound(maximum.bound, "Lagrange multipliers with exact elimination")
    # Choices near the best multipliers; if the gap stays, branch or look around the best.
    for choice in choices_of(relaxation, maximum, progress):
        progress.propose(network.expand(dict(enumerate(choice.tolist()))))
    if progress.done:
        return
    if len(network.costs) <= MAX_BRANCHED:
        branch(Relaxation(network, shared=False, max_join=MAX_JOIN), maximum, ceiling, progress)
    elif progress.choice is not None:
        improve_parts(network, network.condense(progress.choice), progress)


def _eliminate(relaxation: Relaxation, progress: Progress) -> None:
    """No rows: the best choice at once."""
    best = relaxation.evaluate(np.zeros(0))
    if best is None:
        progress.prove_infeasible(
            Infeasible(True, "no choice avoids all forbidden pairs: proved by elimination")
        )
        return
    progress.propose(relaxation.network.expand(dict(enumerate(best.choice.tolist()))))
    # the same sum in another order: what it differs by from the cost is rounding
    progress.raise_bound(progress.cost, "elimination")


def _ceiling(network: Network) -> float:
    """A cost that no allowed choice exceeds."""

    def top(array: Array) -> float:
        return float(array[np.isfinite(array)].max(initial=-math.inf))

    tops = {id(array): top(array) for array in (*network.costs.values(), *network.edges.values())}
    return network.constant + math.fsum(
        tops[id(array)] for array in (*network.costs.values(), *network.edges.values())
    )


def _beyond(network: Network) -> float:
    """A bound above which no choice is allowed, whatever the rounding."""
    ceiling = _ceiling(network)
    return ceiling + 1e-6 * abs(ceiling) + 1e-9


def _rows_exceeded(
    problem: Problem, network: Network, maximum: Maximum, ceiling: float
) -> Infeasible:
    """The certificate that the rows cannot be kept: L exceeds every cost that a choice can have."""
    multipliers = maximum.multipliers
    pressed = np.flatnonzero(multipliers > 0)
    # The rows that matter have multipliers.
    if not len(pressed):
        return Infeasible(True, "no choice avoids all forbidden pairs: proved by elimination")
    last = min(maximum.pieces, key=lambda piece: piece.value(multipliers)).choice
    choice = network.expand(dict(enumerate(last.tolist())))
    worst = max(pressed, key=lambda index: float(multipliers[index] * network.rows[index].room))
    index = network.rows[worst].index
    row = problem.rows[index]
    used = {node: float(usage[choice[node]]) for node, usage in row.usage.items()}
    most = tuple(
        sorted((node for node in used if used[node] > 0), key=lambda node: (-used[node], node))[:10]
    )
    if len(pressed) > 1:
        names = ", ".join(str(network.rows[i].index) for i in pressed)
        return Infeasible(
            True,
            f"rows {names} cannot be kept together: proved by Lagrange multipliers",
            index,
            None,
            most,
        )
    # every choice costs at most the ceiling, so L <= ceiling + multiplier * (least usage - limit)
    least = row.limit + (maximum.bound - ceiling) / float(multipliers[worst])
    reason = (
        f"row {index}: its limit is {row.limit:.6g}, and any allowed choice uses at least "
        f"{least:.6g}"
    )
    return Infeasible(True, reason, index, least, most)
