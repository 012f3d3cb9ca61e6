"""The rows relaxed: each row's usage is priced by a multiplier, and elimination solves the rest
exactly.

For multipliers ``m >= 0``, ``L(m) = min over choices of cost + sum_r m_r (used_r - room_r)`` is at
most the cost of any choice within all rows. L is concave and piecewise linear; the choice found at
``m`` gives one of its linear pieces. With one row the maximum is found by intersecting the pieces
on both sides of it (Handler and Zang 1980), with several by a cutting plane model in a trust region
(a bundle method, Lemaréchal 1977; the model is a small linear program, solved by GLOP).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder

from shardwright.policies.autodist.solver.eliminate import Elimination
from shardwright.policies.autodist.solver.network import Network, spread
from shardwright.policies.autodist.solver.problem import Array

MAX_STEPS = 200
"""Evaluations of L in one maximisation."""

CONVERGED = 1e-10
"""Relative to L: how much more the model may promise when the maximisation ends."""


@dataclass(frozen=True)
class Piece:
    """A choice found for some multipliers: ``L(m) <= cost + m @ excess`` for all ``m``.

    Attributes:
        choice: by node of the problem, among the strategies left.
        cost: without the multipliers.
        excess: used less room, ``[rows]``.
    """

    choice: NDArray[np.intp]
    cost: float
    excess: Array

    def value(self, multipliers: Array) -> float:
        """The piece at these multipliers."""
        return self.cost + float(multipliers @ self.excess)


class Relaxation:
    """L and its pieces.

    Args:
        network: with its rows.
        shared: whether equal nodes are computed once; not when they will be restricted one by one.
        max_join: as of the elimination; ``out_of_time`` too.
    """

    def __init__(
        self,
        network: Network,
        *,
        shared: bool,
        max_join: int,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self.network = network
        self.num_choices = len(network.strategies)
        # Which rows each node uses, and how much.
        usages: dict[int, list[tuple[int, Array]]] = {node: [] for node in network.costs}
        for index, row in enumerate(network.rows):
            for node, used in row.usage.items():
                usages[node].append((index, used))
        self._usages = usages
        kinds: dict[int, object] = {}
        self._examples: dict[object, int] = {}
        # Nodes of one kind have the same costs and uses: one of them stands for all.
        for node, cost in network.costs.items():
            kind = (
                (id(cost), *((index, id(used)) for index, used in usages[node])) if shared else node
            )
            kinds[node] = kind
            self._examples.setdefault(kind, node)
        # Tables that no multiplier changes are computed once.
        dynamic = {kinds[node] for node in network.costs if usages[node]} if shared else None
        sizes = {node: len(cost) for node, cost in network.costs.items()}
        self.elimination = Elimination(
            kinds, sizes, network.edges, dynamic=dynamic, max_join=max_join, out_of_time=out_of_time
        )
        self.room = np.array([row.room for row in network.rows])
        self._row_nodes = [np.fromiter(row.usage, dtype=np.intp) for row in network.rows]
        self._row_flat = [np.concatenate([*row.usage.values()]) for row in network.rows]
        self._row_starts = [
            np.cumsum([0, *(len(used) for used in row.usage.values())])[:-1] for row in network.rows
        ]

    @property
    def exact(self) -> bool:
        """Whether elimination takes out every node, so that L can be computed."""
        return not self.elimination.core

    def used(self, choice: NDArray[np.intp]) -> Array:
        """The usage of each row, ``[rows]``."""
        rows = zip(self._row_flat, self._row_starts, self._row_nodes, strict=True)
        return np.array([flat[starts + choice[nodes]].sum() for flat, starts, nodes in rows])

    def evaluate(
        self, multipliers: Array, allowed: Mapping[int, NDArray[np.bool_]] | None = None
    ) -> Piece | None:
        """The best choice for these multipliers, among the allowed strategies; None if there is
        none.
        """
        # The price of a row is added to the cost of every strategy that uses it.
        costs = {}
        for node in self._examples.values():
            cost = self.network.costs[node]
            for index, used in self._usages[node]:
                if multipliers[index] > 0:
                    cost = cost + multipliers[index] * used
            costs[node] = cost
        # In branch and bound, some strategies are left out.
        for node, mask in (allowed or {}).items():
            costs[node] = np.where(mask, costs[node], np.inf)
        value = self.elimination.run(costs) + self.network.constant
        if value == math.inf:
            return None
        choice = np.zeros(self.num_choices, dtype=np.intp)
        self.elimination.trace(choice)
        # A linear function of the multipliers: the cost, and the slope of each row.
        used = self.used(choice)
        return Piece(choice, value - float(multipliers @ used), used - self.room)


@dataclass
class Maximum:
    """The best multipliers found.

    Attributes:
        bound: L at them; inf where no choice is left, or L grows without end (then no choice is
            feasible).
        pieces: those found on the way, the last ones first to matter.
    """

    multipliers: Array
    bound: float
    pieces: list[Piece]


def maximise(
    relaxation: Relaxation,
    start: Array,
    *,
    allowed: Mapping[int, NDArray[np.bool_]] | None = None,
    stop_above: float = math.inf,
    max_steps: int = MAX_STEPS,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Maximum:
    """Maximise L.

    Args:
        relaxation: exact.
        start: multipliers to start from, ``[rows]``.
        allowed: strategies of restricted nodes.
        stop_above: a bound that is as good as infinity.
        max_steps: evaluations of L.
        out_of_time: asked before every step.
    """
    first = relaxation.evaluate(start, allowed)
    if first is None:
        return Maximum(start, math.inf, [])
    best = Maximum(start, first.value(start), [first])
    if len(start) == 1:
        return _intersect(relaxation, best, allowed, stop_above, max_steps, out_of_time)
    return _bundle(relaxation, best, allowed, stop_above, max_steps, out_of_time)


def _scale(relaxation: Relaxation, index: int) -> float:
    """A multiplier of the order that matters: the spread of node costs per spread of usage."""
    network = relaxation.network
    nodes = network.rows[index].usage
    of_costs = (
        sum(spread(network.costs[node]) for node in nodes)
        or abs(relaxation.network.constant)
        or 1.0
    )
    return of_costs / sum(float(used.max()) for used in nodes.values())


def _met(
    relaxation: Relaxation,
    best: Maximum,
    point: Array,
    allowed: Mapping[int, NDArray[np.bool_]] | None,
) -> tuple[Piece, float]:
    """The piece at these multipliers, kept with the others, and L at them."""
    found = relaxation.evaluate(point, allowed)
    assert found is not None, "a choice that was allowed at other multipliers is not at these"
    best.pieces.append(found)
    return found, found.value(point)


def _intersect(
    relaxation: Relaxation,
    best: Maximum,
    allowed: Mapping[int, NDArray[np.bool_]] | None,
    stop_above: float,
    max_steps: int,
    out_of_time: Callable[[], bool],
) -> Maximum:
    """One row: keep a piece that falls and one that rises, evaluate where they meet."""
    point = float(best.multipliers[0])
    rising = falling = (
        # Rising: exceeds the row, to the left of the maximum; falling: within it, to the right
        None
    )
    latest = best.pieces[0]
    step = point or _scale(relaxation, 0)
    # The function is a minimum of lines: follow the slope to where it changes sign.
    for _ in range(max_steps):
        slope = float(latest.excess[0])
        if slope > 0:
            rising = latest
        else:
            falling = latest
            if point == 0 or slope == 0:
                break
        if best.bound >= stop_above or out_of_time():
            break
        # No line falls yet: go further up.
        if falling is None:
            step *= 4
            point = point + step
        elif rising is None:
            point = point / 4 if point > 1e-9 * step else 0.0
        else:
            # Where the two lines meet is the most that can be hoped for.
            meet = (falling.cost - rising.cost) / float(rising.excess[0] - falling.excess[0])
            promised = rising.value(np.array([meet]))
            if promised - best.bound <= CONVERGED * abs(promised):
                break
            point = meet
        latest, value = _met(relaxation, best, np.array([point]), allowed)
        if value > best.bound:
            best.multipliers, best.bound = np.array([point]), value
        elif any(
            latest.cost == known.cost and latest.excess[0] == known.excess[0]
            for known in (rising, falling)
            if known
        ):
            break  # rounding: the model promises more, yet its own pieces are the answer
    return best


def _bundle(
    relaxation: Relaxation,
    best: Maximum,
    allowed: Mapping[int, NDArray[np.bool_]] | None,
    stop_above: float,
    max_steps: int,
    out_of_time: Callable[[], bool],
) -> Maximum:
    """Several rows: maximise the minimum of the pieces within a box around the best point; widen or
    narrow the box.
    """
    radius = np.array([_scale(relaxation, index) for index in range(len(best.multipliers))])
    # Each round: the highest point of what is known, within a box; then look there.
    for _ in range(max_steps):
        if best.bound >= stop_above or out_of_time():
            break
        lower, upper = np.maximum(best.multipliers - radius, 0.0), best.multipliers + radius
        point, promised = _model_maximum(best.pieces, lower, upper)
        if promised - best.bound <= CONVERGED * max(abs(promised), abs(best.bound)):
            # The model promises nothing more, unless the box is in the way.
            at_edge = (point >= upper * (1 - 1e-9)) | ((point <= lower) & (lower > 0))
            if not at_edge.any() or (point == best.multipliers).all():
                break
        _, value = _met(relaxation, best, point, allowed)
        gained = value - best.bound
        # The promise was kept: trust the model further. It was not: less far.
        if gained >= 0.3 * (promised - best.bound):
            radius = radius * 2
        elif gained <= 0:
            radius = radius / 2
        if gained > 0:
            best.multipliers, best.bound = point, value
    return best


def _model_maximum(pieces: list[Piece], lower: Array, upper: Array) -> tuple[Array, float]:
    """Where the minimum of the pieces is greatest within a box, and how great."""
    model = model_builder.Model()
    # Scaled to the box, so that the numbers are about 1.
    width = upper - lower
    offset = max(piece.value(lower) for piece in pieces)
    unit = (
        max(
            max(abs(piece.value(lower) - offset) for piece in pieces),
            float(np.abs(pieces[-1].excess) @ width),
        )
        or 1.0
    )
    top = model.new_var(-math.inf, math.inf, False, "top")
    parts = [model.new_var(0.0, 1.0, False, f"m{index}") for index in range(len(lower))]
    # ``top`` is below every piece.
    for piece in pieces:
        slopes = piece.excess * width / unit
        terms = [top, *parts]
        weights = [1.0, *(-slopes)]
        model.add(
            model_builder.LinearExpr.weighted_sum(terms, weights)
            <= (piece.value(lower) - offset) / unit
        )
    model.maximize(top)
    solver = model_builder.Solver("glop")
    status = solver.solve(model)
    if status != model_builder.SolveStatus.OPTIMAL:
        return lower, -math.inf
    point = lower + width * np.clip([solver.value(part) for part in parts], 0.0, 1.0)
    return point, min(piece.value(point) for piece in pieces)
