"""What no split into stages can avoid on a schedule, whose actions wait for one another and share
the positions.

Actions that wait for one another form chains; a chain and what its last position does once per step
take as long as they take, whatever else there is. So a step takes no less than any average of
chains. And at every moment a position holds no more than its memory: so it costs nothing to add to
an average, for some moments, a price times what its stages hold too much together, which is never
more than 0. What an average takes with these prices is a sum over stages, each with the best for it
of what it may compute again: the split for which it is least is a shortest path, and no split that
fits takes less.

The average and the prices that say most are one side of a game, whose other side averages splits,
within the memory: to the chains the longest ones for the average of splits are added, to the splits
the best one against the average of chains, until neither side gains.

**Stages left out.** A bound is only wanted up to some seconds. No split below that has a stage with
which all splits take longer by some average with its prices: the best of them is a shortest path to
where the stage begins, the stage, and one from its end. Such stages are left out, and so of
averages of splits, too. That matters most where stages may differ: an average may give every stage
the most devices in turn, with nearly all blocks, and none of these splits is any good.

**Memory.** Of each stage alone what it has to compute again is a knapsack, as if all of the
position were its own (``frontier.py``). Of the stages of one position together it is relaxed by the
prices: of a stage then counts the convex hull of what its blocks can save for some time, from where
that knapsack lets it begin. What a position holds is taken at the moments at which its stages have
all gradients (``held_together``, in any case).

**What is known.** An average of chains with its prices says something of every placement, not only
of the one that it was found for. Meshes that differ little have nearly the same best average. So a
game begins with those of the games before it on the same schedule (:class:`Known`), and is often
over at once.

Between this bound and the best split lies what an average of splits takes less than each of them
(blocks do not come in fractions), and messages, which count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver.python import model_builder

from shardwright.policies.autodist.stages.action_chains import Chains
from shardwright.policies.autodist.stages.cheapest_splits import Path, Splits
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.stage_minima import HELD, KEPT, NUM_PARTS, Least

MAX_ROUNDS = 120
"""How many splits are looked at for one bound."""

ADDED = 4
"""How many chains are added in a round, the longest of those that end at different positions."""

OVER = 1e-9
"""The share of its memory by which a position may be over for an average to fit."""

PENALTY = 10.0
"""The price of not fitting, for averages: how many times the longest chain it costs to need as much
memory again as a position has.
"""


NEAR = 1e-3
"""The game is over once the bound is that near to what is left to gain, relative to it."""

WORTH = 0.2
"""Stages to be left out are looked for in every round as long as that share of them is; else in
half as many rounds as before.
"""


@dataclass
class _Game:
    """The chains and the splits so far, as paths too, and in which shares they are ``mixed``.
    ``moments``: that must fit. ``counted``: the chains in the latest average.
    """

    moments: list[Array]
    chains: list[Array] = field(default_factory=list)
    splits: list[Array] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    mixed: Array = field(default_factory=lambda: np.zeros(0))
    counted: list[Array] = field(default_factory=list)

    def add(self, path: Path, split: Array) -> None:
        """A split, of which the average has nothing yet, if it is not the only one."""
        self.paths.append(path)
        self.splits.append(split)
        self.mixed = np.append(self.mixed, 0.0 if self.mixed.any() else 1.0)

    def keep(self, splits: Splits) -> bool:
        """Only the splits that are looked for still; whether there were others."""
        kept = [index for index, path in enumerate(self.paths) if splits.has(path)]
        if len(kept) == len(self.paths):
            return False
        self.paths, self.splits = (
            [self.paths[index] for index in kept],
            [self.splits[index] for index in kept],
        )
        mixed = self.mixed[kept]
        # Shares of a mixture add up to one.
        self.mixed = mixed / mixed.sum() if mixed.any() else mixed
        return True

    def average(self) -> Array:
        """``[stage, part]``: of the splits."""
        return np.tensordot(self.mixed, np.array(self.splits), axes=1)

    def _with_each_split(self, rows: Sequence[Array]) -> Array:
        """``[rows, splits]``: the parts of each row, weighted with those of each split."""
        if not rows:
            return np.zeros((0, 0))
        return np.tensordot(np.array(rows), np.array(self.splits), axes=((1, 2), (1, 2)))

    def solve(self) -> tuple[Array, float, bool] | None:
        """Mix what is there so that neither side can better it: what the parts of each stage count
        in the average of chains with the prices of memory, and these prices together; and whether
        the average of splits fits. There always is such a pair; None where rounding keeps the
        solver from it.
        """
        # ``[chains, splits]``: the seconds of each chain with each split; ``[moments, splits]``:
        # what is held.
        table, held = self._with_each_split(self.chains), self._with_each_split(self.moments)
        scale = float(table.max()) or 1.0
        # What rounding left of all that is saved would lead the solver astray.
        held[np.abs(held) < OVER] = 0.0
        # The shares of splits are variables; the longest chain is minimised.
        model, sum_of = model_builder.Model(), model_builder.LinearExpr.weighted_sum
        shares = [model.new_var(0.0, 1.0, False, f"s{index}") for index in range(len(self.splits))]
        longest, over = (
            model.new_var(0.0, 1.0, False, "longest"),
            model.new_var(0.0, np.inf, False, "over"),
        )
        # No chain of the average is longer, and no moment holds more but at a penalty.
        waits = [
            model.add(sum_of([longest, *shares], [1.0, *(-row / scale)]) >= 0.0) for row in table
        ]
        limits = [model.add(sum_of([over, *shares], [1.0, *(-row)]) >= -1.0) for row in held]
        model.add(model_builder.LinearExpr.sum(shares) == 1.0)
        model.minimize(longest + PENALTY * over)
        solver = model_builder.Solver("glop")
        if solver.solve(model) != model_builder.SolveStatus.OPTIMAL:
            return None
        # Duals say how the other side mixes: chains by weight, memory by price.
        weights = np.maximum([solver.dual_value(row) for row in waits], 0.0)
        prices = scale * np.maximum([solver.dual_value(row) for row in limits], 0.0) / weights.sum()
        counts = np.tensordot(weights / weights.sum(), np.array(self.chains), axes=1)
        self.counted = [
            chain for chain, weight in zip(self.chains, weights, strict=True) if weight > 0
        ]
        if len(prices):
            counts = counts + np.tensordot(prices, np.array(self.moments), axes=1)
        mixed = np.maximum([solver.value(share) for share in shares], 0.0)
        self.mixed = mixed / mixed.sum()
        return counts, float(prices.sum()), solver.value(over) <= OVER


MOST_KNOWN = 6
"""How many of the latest averages are kept for later games."""


@dataclass
class Known:
    """What games on one schedule have found. ``averages``: of chains, with the prices of memory in
    them, and these prices together, the latest last; ``chains``: those in the latest.
    """

    averages: list[tuple[Array, float]] = field(default_factory=list)
    chains: list[Array] = field(default_factory=list)

    def add(self, average: Array, prices: float, chains: Sequence[Array]) -> None:
        """Keep an average that has said the most of a placement."""
        self.averages = [*self.averages, (average, prices)][-MOST_KNOWN:]
        self.chains = list(chains)


def least_step_s(
    chains: Chains,
    placements: Sequence[Least],
    num_devices: int,
    enough_s: float,
    is_over: Callable[[], bool] = lambda: False,
    known: Known | None = None,
) -> float:
    """Seconds that no split takes less than whose stages have some of the placements and take so
    many devices; infinite if none fits. No better bound is looked for than ``enough_s``, or once
    time is over. ``known``: of earlier games on the same schedule; this one is added.
    """
    splits = Splits(placements, num_devices, chains.num_stages)
    counts = np.ones((chains.num_stages, NUM_PARTS))
    counts[:, [HELD, KEPT]] = 0.0
    paths = splits.priced(counts)
    if paths.least_s == float("inf"):
        return float("inf")
    game, bound = _Game(chains.moments), 0.0
    game.add(paths.best, splits.amounts(paths.best, counts))
    # What is known of other placements holds for these, too.
    best: tuple[Array, float, list[Array]] | None = None
    for counts, prices in reversed(known.averages if known else ()):
        paths = splits.priced(counts)
        if paths.least_s - prices > bound:
            bound, best = paths.least_s - prices, (counts, prices, [])
        if bound >= enough_s:
            return bound
        game.add(paths.best, splits.amounts(paths.best, counts))
    game.chains += known.chains if known else []
    least, fits = float("inf"), not chains.moments  # of the averages that fit, the longest chain
    pause, left = 1, 1  # rounds between those that leave out stages, and until the next
    most_s = float("inf")  # of splits that take less, none is left out
    for _ in range(MAX_ROUNDS):
        found = chains.longest(game.average())
        if fits:
            least = min(least, max(length for length, _ in found))
        if is_over():
            break
        if least <= bound * (1 + NEAR):
            # No average says more of these splits. Of fewer it may: those that could still be
            # below what is enough.
            if best is None or enough_s == float("inf"):
                break
            counts, prices, _ = best
            most_s = enough_s
            splits.leave_out(splits.priced(counts), enough_s * (1 + OVER) + prices)
            if not game.keep(splits):
                break  # the average of splits has lost none, and takes as long as before
            least, fits = float("inf"), not chains.moments
            paths = splits.priced(counts)
            bound = max(bound, paths.least_s - prices)
            if bound >= enough_s:
                break
            game.add(paths.best, splits.amounts(paths.best, counts))
            continue
        longest = sorted(found, key=lambda item: -item[0])[:ADDED]
        game.chains += [counts for _, counts in longest]
        solved = game.solve()
        if solved is None:
            break
        counts, prices, fits = solved
        paths = splits.priced(counts)
        if paths.least_s - prices > bound:
            bound, best = paths.least_s - prices, (counts, prices, game.counted)
        if bound >= enough_s:
            break
        left -= 1
        if left == 0 and enough_s < float("inf"):
            most_s = enough_s
            pause = (
                1 if splits.leave_out(paths, enough_s * (1 + OVER) + prices) >= WORTH else 2 * pause
            )
            left = pause
            if game.keep(splits):
                least, fits = float("inf"), not chains.moments
        game.add(paths.best, splits.amounts(paths.best, counts))
    if known is not None and best is not None and best[2]:
        known.add(*best)
    return min(bound, most_s)
