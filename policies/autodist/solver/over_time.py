"""Rows over time: only the moments that matter become rows, those at which the last choice exceeds
the limit.

A bound with some of the moments is a bound with all of them, and a choice that is best with some of
them and respects all is best. Every round solves the network with the moments found so far; of
those that its choice exceeds, the worst of every stretch of time is added; the choice itself is
brought within the limit by moves (node_moves.py). Networks that are too large for so many rounds
begin with prices of all moments at once (priced.py); at these, choices are looked for with a few
nodes held (held_nodes.py), then with all nodes held but those of a part (neighbourhood.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.followers import merge_followers
from shardwright.policies.autodist.solver.held_nodes import search_held
from shardwright.policies.autodist.solver.moments import Moments, WorkRow
from shardwright.policies.autodist.solver.neighbourhood import improve_parts
from shardwright.policies.autodist.solver.network import Network, tighten
from shardwright.policies.autodist.solver.node_moves import Moves
from shardwright.policies.autodist.solver.priced import search_priced
from shardwright.policies.autodist.solver.problem import Array, Infeasible, Problem, Row
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.reduce import num_pairs

MAX_AT_ONCE = 100
"""Moments up to which all are made rows at once."""

MAX_PAIRS = 1_000_000
"""Pairs of strategies up to which moments are added one after another; above, all are priced at
once (priced.py).
"""

NUM_STRETCHES = 40
"""Stretches of time of which the worst moment is added in each round."""

PRICED_SHARE, HELD_SHARE = 0.3, 0.4
"""The shares of the time that is left for prices of all moments, then for choices with a few nodes
held. The rest is for parts of the best choice, solved while all else stays.
"""

SHARE = 0.5
"""The share of the time that is left which one round takes at most."""

Search = Callable[[Network, Problem, Sequence[int] | None, Progress], None]


def reduce_over_time(network: Network, problem: Problem, progress: Progress) -> Infeasible | None:
    """Make a network with rows over time smaller before moments are chosen, in place."""
    merge_followers(network, progress.is_over)
    failure = tighten(network, problem, progress.is_over)
    network.moments.merge()
    return failure


def search_over_time(
    network: Network, problem: Problem, progress: Progress, search: Search
) -> None:
    """Search with more and more moments.

    Args:
        network: of the problem; it is not changed.
        problem: as given, with its rows over time.
        progress: what is found.
        search: searches a network whose rows are all at one moment.
    """
    moments = network.moments
    # A large problem without other rows: prices for all moments first.
    if num_pairs(network) > MAX_PAIRS and not network.rows and len(moments) > MAX_AT_ONCE:
        priced = search_priced(network, progress, PRICED_SHARE * progress.left_s)
        if progress.choice is not None and not progress.done:
            prices = search_held(network, progress, priced, HELD_SHARE * progress.left_s)
            choice = network.condense(progress.choice)
            improve_parts(network, choice, progress, prices=prices)
    # Few moments are taken at once. Of many, only those that turn out to be exceeded.
    chosen = set(range(len(moments))) if len(moments) <= MAX_AT_ONCE else set()
    start = progress.choice
    while not progress.done:
        # A problem with rows at the chosen moments instead of rows over time.
        whole = len(chosen) == len(moments)
        part = _with_rows(network, problem, sorted(chosen))
        inner = Progress(
            part.problem,
            progress.left_s * (1 if whole else SHARE),
            target_gap=progress.target_gap,
            urgent=progress.choice is not None,
        )
        failure = tighten(part.network, part.problem, lambda: progress.left_s <= 0)
        if failure is not None:
            progress.prove_infeasible(replace(failure, row=part.row_of(failure.row)))
            return
        # It has fewer rows, so its bound is a bound of the whole.
        search(part.network, part.problem, start, inner)
        if inner.infeasible is not None:
            progress.prove_infeasible(
                replace(inner.infeasible, row=part.row_of(inner.infeasible.row))
            )
            return
        progress.raise_bound(inner.bound, inner.proof)
        if inner.choice is None:
            if whole:
                return
            # Nothing found: the tightest moments come in.
            more = _worst(moments, -moments.room, sorted(set(range(len(moments))) - chosen))
        else:
            start = inner.choice
            progress.propose(start)
            # The choice may exceed other moments: these come in next.
            over = over_limit(network, start)
            more = _worst(moments, over, np.flatnonzero(over > 0)) - chosen
            if more:
                Moves(network).propose(network.condense(start), progress, np.zeros(len(moments)))
        if not more:
            return
        chosen |= more


def over_limit(network: Network, choice: Sequence[int]) -> Array:
    """How far a choice of the problem is above the limit of each moment."""
    inner = network.condense(choice)
    used = network.moments.over_time(
        (span, float(span.used[inner[node]]))
        for node, spans in network.moments.spans.items()
        for span in spans
    )
    return np.asarray(used - network.moments.room)


@dataclass(frozen=True)
class _Part:
    """The problem and the network with rows of some moments, and which row of the problem each row
    is of.
    """

    problem: Problem
    network: Network
    rows: tuple[int, ...]

    def row_of(self, index: int | None) -> int | None:
        return None if index is None else self.rows[index]


def _with_rows(network: Network, problem: Problem, chosen: list[int]) -> _Part:
    moments = network.moments
    plain = [index for index, row in enumerate(problem.rows) if row.intervals is None]
    rows = [problem.rows[index] for index in plain]
    # The row at a moment has the nodes whose interval holds it.
    for moment in chosen:
        row, time = problem.rows[moments.rows[moment]], moments.times[moment]
        assert row.intervals is not None
        live = [node for node, (start, end) in row.intervals.items() if start <= time < end]
        rows.append(Row(row.limit, {node: row.usage[node] for node in live}))
    part = network.duplicate()
    place = {index: i for i, index in enumerate(plain)}
    for work_row in part.rows:
        work_row.index = place[work_row.index]
    usages = moments.usage_at(chosen, network.pool)
    part.rows += [
        WorkRow(len(plain) + i, float(moments.room[moment]), usages[i])
        for i, moment in enumerate(chosen)
    ]
    part.moments = Moments((), network.pool)
    # Which row of the problem each row of the part is a moment of.
    whose = (*plain, *(int(moments.rows[moment]) for moment in chosen))
    return _Part(replace(problem, rows=tuple(rows)), part, whose)


def _worst(moments: Moments, over: Array, among: Sequence[int] | NDArray[np.intp]) -> set[int]:
    """The most exceeded moment of every stretch, of those given."""
    found: dict[int, int] = {}
    for moment in among:
        stretch = int(moment) * NUM_STRETCHES // len(moments)
        if stretch not in found or over[moment] > over[found[stretch]]:
            found[stretch] = int(moment)
    return set(found.values())
