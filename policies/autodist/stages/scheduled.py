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

**The first average** needs no game: for each position the chain of all that it does, all of them
counted alike, and one price for the memory of all positions.

**Smoothing.** With few splits known, the average of chains that is best against them says little of
others. So the next split is looked for against a point between it and the best average so far, most
of the way back to that one (Wentges 1997, Pessoa et al. 2018).

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
game begins with those of other games on the same schedule, too (:class:`Known`), and is often over
at once.

**Played in turns.** The least bound of a search is the only one that counts, so games are played a
few rounds at a time, always the one that has the least (``search/certificate.py``).

**Messages.** An action that waits for another rank waits for a message, too. Of stages with one
placement a chain has those of what the stage before has made in its last block. What may have been
made still earlier, and messages of stages that differ, count nothing.

Between this bound and the best split lies what an average of splits takes less than each of them:
blocks do not come in fractions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver.python import model_builder

from shardwright.policies.autodist.stages.action_chains import Chains
from shardwright.policies.autodist.stages.cheapest_splits import Path, PricedPaths, Splits
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.stage_minima import (
    BACK,
    HELD,
    KEPT,
    NUM_PARTS,
    THERE,
    Least,
)

MAX_ROUNDS = 160
"""How many splits are looked at for one bound."""

ADDED = 4
"""How many chains are added in a round, the longest of those that end at different positions; and
how many moments, the fullest.
"""

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

FORGOTTEN = 12
"""How many averages in a row have nothing of a chain that is left out."""

WAY_BACK = 0.8
"""How far on the way back to the best average of chains the next split is looked for."""

FIRST_PRICE = 1 / 64
"""The least price of memory that a game begins with, as a share of a step; others are twice the one
before, as long as they say more.
"""

MOST_KNOWN = 6
"""How many of the latest averages are kept for other games."""


@dataclass(frozen=True)
class Average:
    """An average of chains with the prices of memory in it: ``counts``: ``[stage, part]``;
    ``price_s``: all prices together; ``chains``: those in it, where it was found in a game.
    """

    counts: Array
    price_s: float
    chains: Sequence[Array] = ()

    def towards(self, other: Average, share: float) -> Average:
        """An average between two, ``share`` of the way to the other, with this one's chains."""
        return Average(
            (1 - share) * self.counts + share * other.counts,
            (1 - share) * self.price_s + share * other.price_s,
            self.chains,
        )


@dataclass
class Known:
    """What games on one schedule have found: the average of each that has said the most of its
    placement, the latest last.
    """

    averages: dict[object, Average] = field(default_factory=dict)

    def keep(self, game: object, average: Average) -> None:
        """Keep the best average of a game in the place of those that it had before."""
        self.averages.pop(game, None)
        self.averages[game] = average
        if len(self.averages) > MOST_KNOWN:
            del self.averages[next(iter(self.averages))]


class _Averages:
    """The chains, the moments and the splits so far, as a linear program that grows: its variables
    are the shares of splits in an average, its duals those of chains, and prices of moments.
    """

    def __init__(self, moments: Array, scale_s: float) -> None:
        self._all_moments, self._scale_s = moments, scale_s
        self.chains: list[Array] = []
        self.splits: list[Array] = []
        self.paths: list[Path] = []
        self.mixed: Array = np.zeros(0)
        model = model_builder.Model()
        self._model, self._solver = model, model_builder.Solver("glop")
        # The longest chain is minimised. No moment holds more than there is but at a penalty.
        self._longest, self._over = (
            model.new_var(0.0, np.inf, False, "longest"),
            model.new_var(0.0, np.inf, False, "over"),
        )
        model.minimize(self._longest + PENALTY * self._over)
        self._shares: list[model_builder.Variable] = []
        self._all = model.add_linear_constraint(0.0, 1.0, 1.0)  # shares add up to one
        self._waits: list[model_builder.LinearConstraint] = []  # by chain
        self._idle: list[int] = []  # by chain, the latest averages in a row that had nothing of it
        self._limits: dict[int, model_builder.LinearConstraint] = {}  # by number of a moment

    def add_split(self, path: Path, split: Array) -> None:
        """A split, of which the average has nothing yet, if it is not the only one."""
        self.paths.append(path)
        self.splits.append(split)
        self.mixed = np.append(self.mixed, 0.0 if self.mixed.any() else 1.0)
        share = self._model.new_var(0.0, 1.0, False, f"s{len(self._shares)}")
        self._shares.append(share)
        self._all.add_term(share, 1.0)
        for chain, row in zip(self.chains, self._waits, strict=True):
            row.add_term(share, -float((chain * split).sum()) / self._scale_s)
        for number, row in self._limits.items():
            row.add_term(share, -self._held(number, split))

    def add_chain(self, chain: Array) -> None:
        """A chain: no average takes less than it has of it."""
        row = self._model.add_linear_constraint(0.0, 0.0)
        row.add_term(self._longest, 1.0)
        for share, split in zip(self._shares, self.splits, strict=True):
            row.add_term(share, -float((chain * split).sum()) / self._scale_s)
        self.chains.append(chain)
        self._waits.append(row)
        self._idle.append(0)

    def add_moments(self) -> bool:
        """Add the fullest moments of those where the average holds too much; whether it does
        nowhere.
        """
        if not len(self._all_moments):
            return True
        held = np.tensordot(self._all_moments, self.average(), axes=2)
        fullest = np.argsort(-held)
        missing = [n for n in fullest.tolist() if held[n] > 1 + OVER and n not in self._limits]
        for number in missing[:ADDED]:
            row = self._model.add_linear_constraint(0.0, -1.0)
            row.add_term(self._over, 1.0)
            for share, split in zip(self._shares, self.splits, strict=True):
                row.add_term(share, -self._held(number, split))
            self._limits[number] = row
        return bool(held[fullest[0]] <= 1 + OVER)

    def _held(self, number: int, split: Array) -> float:
        """What a position holds at a moment. What rounding left of all that is saved would lead the
        solver astray.
        """
        held = float((self._all_moments[number] * split).sum())
        return 0.0 if abs(held) < OVER else held

    def keep(self, splits: Splits) -> bool:
        """Only the splits that are looked for still; whether there were others."""
        kept = [index for index, path in enumerate(self.paths) if splits.has(path)]
        if len(kept) == len(self.paths):
            return False
        for index in set(range(len(self.paths))).difference(kept):
            self._shares[index].upper_bound = 0.0
        self.paths = [self.paths[index] for index in kept]
        self.splits = [self.splits[index] for index in kept]
        self._shares = [self._shares[index] for index in kept]
        mixed = self.mixed[kept]
        # Shares of a mixture add up to one.
        self.mixed = mixed / mixed.sum() if mixed.any() else mixed
        return True

    def average(self) -> Array:
        """``[stage, part]``: of the splits."""
        return np.tensordot(self.mixed, np.array(self.splits), axes=1)

    def solve(self) -> Average | None:
        """Mix what is there so that neither side can better it: the average of splits is kept, that
        of chains returned. There always is such a pair; None where rounding keeps the solver from
        it.
        """
        solver = self._solver
        if solver.solve(self._model) != model_builder.SolveStatus.OPTIMAL:
            return None
        # Duals say how the other side mixes: chains by weight, memory by price.
        weights = np.maximum([solver.dual_value(row) for row in self._waits], 0.0)
        total = float(weights.sum())
        used = np.flatnonzero(weights > 0).tolist()
        if not used:
            return None
        chains = [self.chains[index] for index in used]
        counts = np.tensordot(weights[used] / total, np.array(chains), axes=1)
        prices_s = 0.0
        for number, row in self._limits.items():
            price_s = self._scale_s * max(solver.dual_value(row), 0.0) / total
            counts = counts + price_s * self._all_moments[number]
            prices_s += price_s
        mixed = np.maximum([solver.value(share) for share in self._shares], 0.0)
        self.mixed = mixed / mixed.sum()
        self._forget(weights)
        return Average(counts, prices_s, chains)

    def _forget(self, weights: Array) -> None:
        """Leave out chains that no average has needed for long: where one is the longest again, it
        is found again.
        """
        self._idle = [
            0 if weight > 0 else idle + 1
            for idle, weight in zip(self._idle, weights.tolist(), strict=True)
        ]
        for row, idle in zip(self._waits, self._idle, strict=True):
            if idle > FORGOTTEN:
                row.lower_bound = -np.inf
        kept = [index for index, idle in enumerate(self._idle) if idle <= FORGOTTEN]
        self.chains = [self.chains[index] for index in kept]
        self._waits = [self._waits[index] for index in kept]
        self._idle = [self._idle[index] for index in kept]


class Game:
    """The game for one schedule and some placements.

    ``bound_s``: seconds that no split takes less than whose stages have some of the placements and
    take ``num_devices``, so far; infinite if none fits. ``is_over``: whether it can get no better.

    ``known``: of other games on the same schedule; this one is added.
    """

    def __init__(
        self,
        chains: Chains,
        placements: Sequence[Least],
        num_devices: int,
        known: Known | None = None,
    ) -> None:
        self.bound_s, self.is_over = 0.0, False
        self._chains, self._known = chains, known or Known()
        self._splits = Splits(placements, num_devices, chains.num_stages)
        self._moments = np.array(chains.moments)
        self._averages: _Averages | None = None  # before it begins
        self._best: Average | None = None
        self._seen: Average | None = None  # the latest of another game
        self._found_s = 0.0  # what the best average says
        self._most_s = float("inf")  # of splits that take less, none is left out
        self._least_s = float("inf")  # of averages that fit, the longest chain
        self._rounds = 0
        self._pause, self._left = 1, 1  # rounds between those that leave out stages; until the next

    def play(
        self,
        enough_s: float,
        rounds: int = MAX_ROUNDS,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        """Play some more rounds. No better bound is looked for than ``enough_s``, which is no more
        than in the turn before, or once time is over.
        """
        if self._averages is None:
            self._begin(enough_s)
        elif not self.is_over:
            self._look_around()
        for _ in range(rounds):
            if self.is_over or self.bound_s >= enough_s or is_late():
                break
            self._play_round(enough_s)
            self._rounds += 1
            self.is_over = self.is_over or self._rounds >= MAX_ROUNDS
        if self._best is not None and self._best.chains:
            self._known.keep(self, self._best)

    def _begin(self, enough_s: float) -> None:
        """Look at what is known of other placements, which holds for these, too, and at the average
        of what the positions do.
        """
        # All work and nothing held: where there is no split, none fits.
        counts = np.ones((self._chains.num_stages, NUM_PARTS))
        counts[:, [HELD, KEPT, THERE, BACK]] = 0.0
        paths = self._splits.priced(counts)
        if paths.least_s == float("inf"):
            self.bound_s, self.is_over = float("inf"), True
            return
        first = self._splits.amounts(paths.best, counts)
        own = self._chains.by_position
        scale_s = max(float((chain * first).sum()) for chain in own) or 1.0
        self._averages = _Averages(self._moments, scale_s)
        # No position takes longer than is enough for what it does itself.
        if enough_s < float("inf"):
            self._most_s = enough_s
            # Of messages a stage's own chain may have fewer than another one.
            counts = np.max(own, axis=0)
            counts[:, [THERE, BACK]] = 0.0
            self._splits.leave_out_alone(counts, enough_s * (1 + OVER))
        if self._splits.has(paths.best):
            self._averages.add_split(paths.best, first)
        for chain in own:
            self._averages.add_chain(chain)
        known = list(self._known.averages.values())
        for average in reversed(known):
            if self._says_more(average) and self.bound_s >= enough_s:
                return
        for chain in known[-1].chains if known else ():
            self._averages.add_chain(chain)
        plain = Average(np.mean(own, axis=0), 0.0)
        self._says_more(plain)
        if not len(self._moments):
            return
        # One price for all moments of all positions.
        moment, price_s = self._moments.mean(axis=0), FIRST_PRICE * scale_s
        while self.bound_s < enough_s and price_s < scale_s:
            if not self._says_more(Average(plain.counts + price_s * moment, price_s)):
                break
            price_s *= 2

    def _look_around(self) -> None:
        """Look at the latest that another game has found: where placements are alike, it is as if
        one game were played for all of them.
        """
        assert self._averages is not None
        others = [game for game in self._known.averages if game is not self]
        if others and (average := self._known.averages[others[-1]]) is not self._seen:
            self._seen = average
            if self._says_more(average):
                for chain in average.chains:
                    self._averages.add_chain(chain)

    def _says_more(self, average: Average) -> bool:
        """Look for the best split against an average, which is added; whether it says more than
        the best so far.
        """
        return self._heed(average, self._splits.priced(average.counts))

    def _heed(self, average: Average, paths: PricedPaths) -> bool:
        assert self._averages is not None
        found_s = paths.least_s - average.price_s
        says_more = self._best is None or found_s > self._found_s
        if says_more:
            self._best, self._found_s = average, found_s
            self.bound_s = max(self.bound_s, min(found_s, self._most_s))
        if np.isfinite(paths.least_s):
            split = self._splits.amounts(paths.best, average.counts)
            self._averages.add_split(paths.best, split)
        return says_more

    def _play_round(self, enough_s: float) -> None:
        averages = self._averages
        assert averages is not None and self._best is not None
        fits, found = averages.add_moments(), self._chains.longest(averages.average())
        if fits:
            self._least_s = min(self._least_s, max(length for length, _ in found))
        if self._least_s <= self._found_s * (1 + NEAR):
            # No average says more of these splits. Of fewer it may: those that could still be below
            # what is enough.
            if enough_s == float("inf") or not self._leave_out(
                self._best, self._splits.priced(self._best.counts), enough_s
            ):
                self.is_over = True  # the average of splits has lost none, and takes as long
            else:
                self._says_more(self._best)
            return
        for _, chain in sorted(found, key=lambda item: -item[0])[:ADDED]:
            averages.add_chain(chain)
        against = averages.solve()
        if against is None:
            self.is_over = True
            return
        self._left -= 1
        leaves_out = self._left == 0 and enough_s < float("inf")
        # Averages that differ leave out more than those near the best.
        average = against if leaves_out else against.towards(self._best, WAY_BACK)
        paths = self._splits.priced(average.counts)
        if leaves_out:
            self._leave_out(average, paths, enough_s)
        self._heed(average, paths)

    def _leave_out(self, average: Average, paths: PricedPaths, enough_s: float) -> bool:
        """Leave out the stages with which all splits take more than what is enough; whether any of
        the splits so far has one.
        """
        assert self._averages is not None
        self._most_s = min(self._most_s, enough_s)
        share = self._splits.leave_out(paths, enough_s * (1 + OVER) + average.price_s)
        self._pause = 1 if share >= WORTH else 2 * self._pause
        self._left = self._pause
        has_lost = self._averages.keep(self._splits)
        if has_lost:
            self._least_s = float("inf")
        return has_lost


class ScheduledBound:
    """The games of all ways to see the model as blocks, of which the least counts.

    Args:
        games: without any nothing is known.
        share: of what actions take one after the other, what a step takes at least, as collectives
            run beside them.
    """

    def __init__(self, games: Sequence[Game], share: float = 1.0) -> None:
        self._games, self._share = games, share

    @property
    def _least(self) -> Game | None:
        return min(self._games, key=lambda game: game.bound_s, default=None)

    @property
    def bound_s(self) -> float:
        """Seconds that no cut takes less than, as far as was played."""
        least = self._least
        return 0.0 if least is None else self._share * least.bound_s

    @property
    def is_over(self) -> bool:
        """Whether the bound can get no better."""
        least = self._least
        return least is None or least.is_over

    def play(
        self,
        enough_s: float,
        rounds: int = MAX_ROUNDS,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        """Play some more rounds of the game that counts, as :meth:`Game.play`."""
        if (least := self._least) is not None:
            least.play(enough_s / self._share, rounds, is_late)
