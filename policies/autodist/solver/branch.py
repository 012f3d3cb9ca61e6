"""Branch and bound: close the gap that multipliers leave, by restricting nodes one by one.

The subproblem with the least bound is taken next. It is split at a node on which the pieces that
meet at its best multipliers disagree: the strategy of one of them, and all others. Every subproblem
starts from its parent's multipliers, and every piece is proposed as a choice. It is exact:
subproblems are only dropped when their bound reaches the best cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.local_search import LocalSearch
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.solver.progress import CLOSED, Progress
from shardwright.policies.autodist.solver.relaxation import Maximum, Piece, Relaxation, maximise

PROOF = "branch and bound on Lagrange multipliers with exact elimination"

STEPS = 25
"""Evaluations of L per subproblem."""

Allowed = Mapping[int, NDArray[np.bool_]]


def branch(relaxation: Relaxation, root: Maximum, ceiling: float, progress: Progress) -> None:
    """Search until the best choice is proved optimal, or it is proved that there is none, or time
    is over.

    Args:
        relaxation: exact and not shared.
        root: the best multipliers without restrictions.
        ceiling: no feasible choice costs more; a higher bound means that there is none.
        progress: what is known, and what is found.
    """
    local = LocalSearch(relaxation.network)
    count = 0
    # Best first: the least bound is the bound of all that is left.
    heap: list[tuple[float, int, dict[int, NDArray[np.bool_]], Maximum]] = [
        (root.bound, count, {}, root)
    ]
    # Each round decides one strategy of one node: taken, or left out.
    while heap:
        bound, _, allowed, maximum = heapq.heappop(heap)
        progress.raise_bound(min(bound, progress.cost), PROOF)
        if progress.done:
            return
        node, mask = _split(relaxation, allowed, maximum)
        before = allowed.get(node, np.ones(len(mask), dtype=bool))
        for part in (before & mask, before & ~mask):
            child = {**allowed, node: part}
            # A child is worth no more work once its bound is above the best choice.
            stop = min(ceiling * (1 + CLOSED) + CLOSED, progress.cost)
            found = maximise(
                relaxation,
                maximum.multipliers,
                allowed=child,
                stop_above=stop,
                max_steps=STEPS,
                out_of_time=progress.is_over,
            )
            for piece in found.pieces:
                offer_piece(relaxation, piece, local, progress)
            bound = max(maximum.bound, found.bound)
            # The child may have a better choice: it waits.
            if bound < progress.cost - CLOSED * abs(
                progress.cost
            ) and bound <= ceiling + CLOSED * abs(ceiling):
                count += 1
                heapq.heappush(
                    heap, (bound, count, child, Maximum(found.multipliers, bound, found.pieces))
                )
        if progress.left_s <= 0 and heap:
            # the children just pushed have bounds no lower than what is left in the heap or than
            # their parent's
            progress.raise_bound(min(heap[0][0], progress.cost), PROOF)
            return
    if progress.choice is None:
        progress.prove_infeasible(
            Infeasible(True, f"the rows cannot be kept together: proved by {PROOF}")
        )
    else:
        progress.raise_bound(progress.cost, PROOF)


def offer_piece(
    relaxation: Relaxation, piece: Piece, local: LocalSearch, progress: Progress
) -> None:
    """Propose a piece's choice if it is within the rows; repair it first if there is no choice
    yet.
    """
    network = relaxation.network
    if (piece.excess <= 0).all():
        if piece.cost < progress.cost:
            progress.propose(network.expand(dict(enumerate(piece.choice.tolist()))))
    # A choice that breaks a row is only worth repairing while there is none at all.
    elif progress.choice is None:
        local.load(piece.choice)
        if local.repair(progress):
            local.descend(progress)
            progress.propose(network.expand(dict(enumerate(local.choice.tolist()))))


def _split(
    relaxation: Relaxation, allowed: Allowed, maximum: Maximum
) -> tuple[int, NDArray[np.bool_]]:
    """A node that is not decided, and the strategy to decide on."""
    network = relaxation.network
    # The best few solutions of the relaxation.
    pieces = sorted(maximum.pieces, key=lambda piece: piece.value(maximum.multipliers))[:6]
    best = pieces[0]
    usages = relaxation.network.rows
    chosen: tuple[float, int] = (-math.inf, -1)
    weights = maximum.multipliers + 1e-9 / np.maximum(relaxation.room, 1e-300) * (
        1 + abs(maximum.bound)
    )
    # The node over which these differ most, in what they use of tight rows.
    spread: dict[int, float] = {}
    for weight, row in zip(weights, usages, strict=True):
        for node, used in row.usage.items():
            spread[node] = spread.get(node, 0.0) + weight * float(
                np.ptp(used[[int(piece.choice[node]) for piece in pieces]])
            )
    for node, score in spread.items():
        if score > chosen[0] and len({int(piece.choice[node]) for piece in pieces}) > 1:
            chosen = score, node
    if chosen[1] < 0:  # the pieces agree: decide on what could still change most
        for node in network.costs:
            open_size = int(allowed[node].sum()) if node in allowed else len(network.costs[node])
            if open_size > 1:
                rows = [
                    (weight, row.usage[node])
                    for weight, row in zip(weights, usages, strict=True)
                    if node in row.usage
                ]
                score = sum(weight * float(np.ptp(used)) for weight, used in rows)
                chosen = max(chosen, (score, node))
    node = chosen[1]
    assert node >= 0, "everything is decided, yet bound and cost differ"
    return node, np.arange(len(network.costs[node])) == best.choice[node]
