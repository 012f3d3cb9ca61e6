"""Choices within the rows from the pieces that meet at the best multipliers: as they are, repaired
and improved, crossed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.local_search import LocalSearch, cost_of, cross
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.relaxation import Maximum, Relaxation

MAX_REPAIRED = 6
"""Pieces that are repaired and crossed."""


def choices_of(
    relaxation: Relaxation,
    maximum: Maximum,
    progress: Progress,
    *,
    max_repaired: int = MAX_REPAIRED,
) -> Iterator[NDArray[np.intp]]:
    """Choices within the rows, by node of the problem among the strategies left; stops when the
    progress is done.
    """
    network = relaxation.network
    # Solutions of the relaxation, the best first, and those within the rows.
    pieces = sorted(maximum.pieces, key=lambda piece: piece.value(maximum.multipliers))
    within = sorted(
        (piece for piece in pieces if (piece.excess <= 0).all()), key=lambda piece: piece.cost
    )
    for piece in within[:1]:
        yield piece.choice
    if progress.done or not pieces:
        return
    local = LocalSearch(network)
    found = [piece.choice for piece in within[:1]]
    # Those that break a row are repaired, then improved.
    for piece in pieces[:max_repaired]:
        local.load(piece.choice)
        if local.repair(progress):
            local.descend(progress)
            found.append(local.choice)
            yield local.choice
    inside = min(found, key=lambda choice: cost_of(network, choice), default=None)
    # A choice that breaks a row, and one within it, are cut and joined.
    for piece in pieces[:max_repaired]:
        if inside is None or progress.done:
            return
        if (piece.excess > 0).any() and (
            crossed := cross(network, inside, piece.choice)
        ) is not None:
            local.load(crossed)
            if local.repair(progress):
                local.descend(progress)
                yield local.choice
