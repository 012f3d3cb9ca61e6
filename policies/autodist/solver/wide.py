"""Networks too wide for elimination: a bound by message passing and row prices, choices by rounding
it, exact on what is left.

1. Nodes that follow another are merged with it (followers.py); those in no row with at most two
   neighbours are taken out exactly (reduce.py).
2. Passes of message passing (message_passing.py) alternate with steps of the rows' multipliers
along the
   excess of the choice that the messages point at (a subgradient, with Polyak's step length). Every
   bound on the way is valid; the choice is repaired and improved by moves (local_search.py).
3. Strategies whose presence alone costs more than the best choice are dropped. When few pairs are
   left, the integer program is given to a library (linear_program.py); else parts of the network
   are solved while the rest stays (neighbourhood.py), and the strategies of nodes that use most are
   split in two until bounds or the library decide.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.followers import merge_followers
from shardwright.policies.autodist.solver.linear_program import solve_program
from shardwright.policies.autodist.solver.local_search import LocalSearch
from shardwright.policies.autodist.solver.message_passing import Messages
from shardwright.policies.autodist.solver.neighbourhood import improve_parts
from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.problem import Array, Infeasible, Problem
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.reduce import Reduced, num_pairs

PROOF = "message passing and Lagrange multipliers"
SPLIT_PROOF = "branch and bound on message passing and Lagrange multipliers"

MAX_PROGRAM_PAIRS = 250_000
"""Pairs of strategies of the largest network that is given to a library."""

SMALL_PROGRAM_PAIRS = 60_000
"""The pairs of strategies of the largest part of a network that is given to a library."""

ASCENT_SHARE, IMPROVEMENT_SHARE = 0.3, 0.3
"""The shares of the time that is left for the bound, then for better choices, before strategies are
dropped with both.
"""

PATIENCE = 40
"""Passes without a better bound after which the steps of the multipliers get shorter."""

SETTLING = 20
"""Passes at the best multipliers before strategies are judged by them."""

MIN_STEP = 1e-4
"""The step length, relative to Polyak's, at which the multipliers are as good as they get."""


def search_wide(network: Network, problem: Problem, progress: Progress) -> None:
    """Bound and choices for a network that elimination cannot take apart."""
    # A bound that costs nothing: the least of everything.
    parts = (*network.costs.values(), *network.edges.values())
    least = {key: float(part.min()) for key, part in {id(part): part for part in parts}.items()}
    progress.raise_bound(
        network.constant + math.fsum(least[id(part)] for part in parts),
        "the least of every cost alone",
    )
    # First smaller by exact means.
    merge_followers(network, progress.is_over)
    reduced = Reduced(network)
    failure = reduced.simplify(problem, progress.is_over)
    if failure is not None:
        progress.prove_infeasible(failure)
        return
    if not reduced.network.costs:
        _propose_the_only(reduced, progress, "elimination")
    prices: dict[int, float] = {}
    # Rounds of: raise the bound, look for choices, drop what cannot be in a better one.
    while not progress.done:
        before = num_pairs(reduced.network)
        ascent = _Ascent(reduced, prices, progress)
        ascent.run(progress.left_s * ASCENT_SHARE)
        _improve(reduced, progress, progress.left_s * IMPROVEMENT_SHARE)
        if progress.done:
            return
        prices = ascent.prices()
        ascent.drop_expensive()
        failure = reduced.simplify(problem, progress.is_over)
        if failure is not None:  # nothing else is as good as the best choice
            progress.raise_bound(progress.cost, PROOF)
            return
        if not reduced.network.costs:
            _propose_the_only(reduced, progress, PROOF)
            return
        # Small enough for a library.
        if num_pairs(reduced.network) <= MAX_PROGRAM_PAIRS:
            _integer_program(reduced, progress)
            return
        # Dropping does not get on: split instead.
        if num_pairs(reduced.network) > 0.9 * before and progress.choice is not None:
            _improve(reduced, progress, progress.left_s * IMPROVEMENT_SHARE)
            _split_and_bound(reduced, prices, problem, progress)
            return


def _improve(reduced: Reduced, progress: Progress, seconds: float) -> None:
    """Improve the best choice part by part."""
    if progress.choice is not None and not progress.done:
        choice = reduced.condense(progress.choice)
        if choice is not None:
            improve_parts(
                reduced.network,
                choice,
                progress,
                expand=reduced.expand,
                until_s=progress.left_s - seconds,
            )


def _propose_the_only(reduced: Reduced, progress: Progress, proof: str) -> None:
    """Every node has one strategy left: that choice, or the best so far."""
    progress.propose(reduced.expand(np.zeros(len(reduced.network.strategies), dtype=np.intp)))
    progress.raise_bound(progress.cost, proof)


def _integer_program(reduced: Reduced, progress: Progress) -> None:
    """The rest exactly, by a library."""
    answer = solve_program(reduced.network, integer=True, time_limit_s=progress.left_wall_s)
    if answer.choice is not None:
        progress.propose(reduced.expand(answer.choice))
    # Infeasible means: nothing within the rows, or nothing better than what is known.
    if answer.infeasible:
        if progress.choice is None:
            progress.prove_infeasible(
                Infeasible(
                    True, "the rows cannot be kept together: proved by an integer program (HiGHS)"
                )
            )
        else:
            progress.raise_bound(progress.cost, "an integer program (HiGHS)")
        return
    if answer.bound > -math.inf:
        # the library proves to a relative tolerance of about 1e-9
        near = progress.choice is not None and abs(progress.cost - answer.bound) <= 1e-9 * abs(
            progress.cost
        )
        progress.raise_bound(
            progress.cost if near else min(progress.cost, answer.bound),
            "an integer program (HiGHS)",
        )


def _split_and_bound(
    reduced: Reduced, prices: dict[int, float], problem: Problem, progress: Progress
) -> None:
    """Branch and bound with these bounds: halves of a node's strategies, until each part is dropped
    or given to a library.
    """
    heap: list[tuple[float, int, Reduced, dict[int, float]]] = [
        (progress.bound, 0, reduced, prices)
    ]
    count = 0
    # Best first. A part that is not closed by its bound waits in the heap.
    while heap:
        bound, _, whole, prices = heapq.heappop(heap)
        progress.raise_bound(min(bound, progress.cost), SPLIT_PROOF)
        if progress.done:
            return
        for part in _halves(whole, prices):
            # The half has no choice within the rows.
            if part.simplify(problem, progress.is_over) is not None:
                continue
            found, part_prices = bound, prices
            if part.network.costs:
                ascent = _Ascent(part, prices, progress, whole=False)
                found = max(bound, ascent.run(progress.left_s))
                part_prices = ascent.prices()
                ascent.drop_expensive()
                if found >= progress.cost or part.simplify(problem, progress.is_over) is not None:
                    continue
            # One choice is left.
            if not part.network.costs:
                progress.propose(part.expand(np.zeros(len(part.network.strategies), dtype=np.intp)))
                continue
            # A small part is given to a library.
            if num_pairs(part.network) <= SMALL_PROGRAM_PAIRS and found < progress.cost:
                answer = solve_program(
                    part.network, integer=True, time_limit_s=progress.left_wall_s
                )
                if answer.choice is not None:
                    progress.propose(part.expand(answer.choice))
                if answer.infeasible or answer.bound >= progress.cost * (1 - 1e-9):
                    continue
                found = max(found, answer.bound)
            if found < progress.cost:
                count += 1
                heapq.heappush(heap, (found, count, part, part_prices))
            if progress.left_s <= 0:
                return
    progress.raise_bound(progress.cost, SPLIT_PROOF)


def _halves(reduced: Reduced, prices: dict[int, float]) -> tuple[Reduced, Reduced]:
    """Split at the node whose priced usage varies most, at the widest gap of it."""
    # What each strategy uses, at the prices of the rows.
    network = reduced.network
    usages: dict[int, Array] = {}
    for row in network.rows:
        for node, used in row.usage.items():
            priced = prices.get(row.index, 0.0) * used
            usages[node] = usages[node] + priced if node in usages else priced
    ranges = {node: float(np.ptp(priced)) for node, priced in usages.items()}
    node = max(network.costs, key=lambda node: (ranges.get(node, 0.0), len(network.costs[node])))
    key = usages[node] if ranges.get(node, 0.0) > 0 else network.costs[node]
    # Sort, and cut at the widest gap.
    levels = np.sort(key)
    widest = int(np.argmax(np.diff(levels)))
    low = key <= levels[widest]
    if low.all():  # all equal
        low = np.arange(len(key)) < len(key) // 2
    return reduced.restricted(node, low), reduced.restricted(node, ~low)


@dataclass
class _Best:
    bound: float
    multipliers: Array


class _Ascent:
    """Passes and multiplier steps on one network, and the choices met on the way."""

    def __init__(
        self, reduced: Reduced, prices: dict[int, float], progress: Progress, *, whole: bool = True
    ) -> None:
        self.reduced, self.progress, self.whole = reduced, progress, whole
        self.network = network = reduced.network
        self.messages = Messages(network)
        self.local = LocalSearch(network)
        self.places, self.values = [], []
        # Where each strategy lies in the array of the messages.
        for row in network.rows:
            places = [
                self.messages.start[node] + np.arange(len(used)) for node, used in row.usage.items()
            ]
            self.places.append(np.concatenate(places))
            # In units of the room, so that multipliers of bytes and of anything else are alike in
            # size.
            self.values.append(np.concatenate([*row.usage.values()]) / (row.room or 1.0))
        self.multipliers = np.zeros(len(network.rows))
        self.unit_room = np.array([1.0 if row.room else 0.0 for row in network.rows])
        if prices:
            self._move_to(
                np.array([prices.get(row.index, 0.0) * (row.room or 1.0) for row in network.rows])
            )

    def prices(self) -> dict[int, float]:
        """The multipliers per unit of usage, by index of the row in the problem."""
        rows = zip(self.network.rows, self.multipliers, strict=True)
        return {row.index: float(multiplier) / (row.room or 1.0) for row, multiplier in rows}

    def run(self, seconds: float) -> float:
        """Raise the bound until steps are short, the gap is closed, or the seconds are over; ends
        at the best multipliers.

        Returns the bound.
        """
        best = _Best(-math.inf, self.multipliers)
        direction: Array | None = None
        step, since, next_proposal = 0.1, 0, 1
        end_s = self.progress.left_s - seconds
        # Subgradient ascent, as in ``priced.py``, with one multiplier for each row.
        for count in range(1, 1_000_000):
            self.messages.forward()
            bound = self.messages.backward() - float(self.multipliers @ self.unit_room)
            # Patience counts steps without a clear gain.
            since = 0 if bound > best.bound + 1e-5 * abs(best.bound) else since + 1
            if bound > best.bound:
                best = _Best(bound, self.multipliers.copy())
                if self.whole:
                    self.progress.raise_bound(bound + self.network.constant, PROOF)
                elif bound + self.network.constant >= self.progress.cost:
                    break
            # Choices are proposed less and less often.
            choice = self.messages.choice()
            if count == next_proposal or since == PATIENCE:
                self._propose(choice)
                next_proposal = max(next_proposal, count) * 5 // 4 + 1
            if self.progress.done or self.progress.left_s <= end_s:
                break
            if since >= PATIENCE:
                step, since, direction = step / 2, 0, None
                self._move_to(best.multipliers)
                if step < MIN_STEP or not len(self.multipliers):
                    break
                continue
            # Which rows the choice exceeds says where multipliers should rise.
            if len(self.multipliers):
                excess = self._used(choice) - self.unit_room
                direction = excess if direction is None else 0.7 * direction + 0.3 * excess
                self._step(direction, step, bound)
            if count % 100 == 0:
                self.messages.refresh()
        self._move_to(best.multipliers)
        return best.bound + self.network.constant

    def _step(self, direction: Array, step: float, bound: float) -> None:
        # A multiplier is not negative: a direction below 0 is of no use there.
        useful = np.where((self.multipliers <= 0) & (direction < 0), 0.0, direction)
        length = float(useful @ useful)
        if length > 0:
            # Polyak's step.
            target = (
                self.progress.cost - self.network.constant
                if self.progress.choice is not None
                else bound + 0.1 * abs(bound)
            )
            self._move_to(
                np.maximum(
                    0.0,
                    self.multipliers
                    + step * max(target - bound, 1e-4 * abs(bound)) / length * useful,
                )
            )

    def _move_to(self, multipliers: Array) -> None:
        for index in np.flatnonzero(multipliers != self.multipliers):
            change = multipliers[index] - self.multipliers[index]
            self.messages.price(self.places[index], change * self.values[index])
        self.multipliers = multipliers.copy()

    def _used(self, choice: NDArray[np.intp]) -> Array:
        """What a choice uses of each row, in units of its room."""
        chosen = np.zeros(len(self.messages.own), dtype=bool)
        chosen[[start + choice[node] for node, start in self.messages.start.items()]] = True
        return np.array(
            [
                values[chosen[places]].sum()
                for places, values in zip(self.places, self.values, strict=True)
            ]
        )

    def _propose(self, choice: NDArray[np.intp]) -> None:
        self.local.load(choice)
        self.local.descend(self.progress, within=False)
        if self.local.repair(self.progress):
            self.local.descend(self.progress)
            self.progress.propose(self.reduced.expand(self.local.choice))

    def drop_expensive(self) -> None:
        """Drop the strategies that no choice as cheap as the best has."""
        if self.progress.choice is None:
            return
        self.messages.refresh()
        # Messages settle, so that the excess below is as large as it can be.
        for _ in range(SETTLING):
            self.messages.backward()
            self.messages.forward()
        bound = (
            self.messages.forward()
            - float(self.multipliers @ self.unit_room)
            + self.network.constant
        )
        room = self.progress.cost - bound
        # Any choice with a strategy above that costs more than the best.
        keep = self.messages.excess() <= room + 1e-9 * abs(self.progress.cost)
        for node, start in self.messages.start.items():
            part = keep[start : start + len(self.network.costs[node])]
            if part.any() and not part.all():
                self.network.restrict(node, part)
