"""Cut a chain of blocks into pipeline stages, each on its own devices in a placement of its own:
exact under the model of one-forward-one-backward.

Variables: the cuts, the placement of every stage (a :class:`~stage_costs.PlacedBlocks`, which says
how many devices it takes), and what of its blocks is computed again in the backward.

Objective: ``sum_k t_k + max_k ((m - 1) t_k + u_k)`` s, where a microbatch takes ``t_k`` in stage
``k`` (forward, backward, what is computed again, and the message from the stage before, which
depends on both placements and on where the stages lie) and ``u_k`` comes once per step (reduction
of gradients, optimizer). For equal stages this is the time of 1F1B, GPipe and their like; for
others the schedule is simulated later.

Constraints: the devices add up; each stage fits the memory of a device, with as many microbatches
in flight as its place in the schedule asks for.

Method: for a limit on the second term, the least first term is a shortest path over (block, devices
used, placement of the last stage), stage by stage, solved as min-plus products
(:meth:`_Paths.least_sum`). Lowering the limit below each solution's own maximum enumerates the
Pareto points of the two terms, until no later one can be better: so the best sum is found exactly.
What a stage computes again is a knapsack, solved by Pareto frontiers (``frontier.py``). The bound
drops messages and takes what no such schedule can avoid (:meth:`_Paths.bound`): stage ``k`` works
``m w_k``, with what it must compute again to fit, after the first microbatch has come through the
stages before it and before its gradient has gone back.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.stages.bands import Band, band_of, most_blocks
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.stage_costs import PlacedBlocks, StageCosts


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks ``start`` up to ``stop`` on ``num_devices`` as placement number ``placement`` places
    them; ``recomputed``: blocks computed again, with the number of the way.
    """

    start: int
    stop: int
    num_devices: int
    placement: int = 0
    recomputed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Split:
    """The best stages under the model. No split into as many stages of these placements takes less
    than ``bound_s``, on any schedule with as many microbatches in flight. ``used_bytes``: of the
    stage that takes most.
    """

    stages: tuple[Stage, ...]
    cost_s: float
    bound_s: float
    used_bytes: float


@dataclass(frozen=True)
class NoFit:
    """No split fits: the best one still needs ``needed_bytes`` on its fullest device (infinite: the
    devices do not add up).
    """

    needed_bytes: float


@dataclass(frozen=True)
class NoGain:
    """No split that fits takes less under the model than was asked for; none at all takes less than
    ``bound_s``.
    """

    bound_s: float


InFlight = Callable[[int], float]
"""The microbatches that a stage holds at once, by its place counted from the end (the last is 1);
on average where several stages share a position.
"""


class Between(Protocol):
    """What depends on two neighbouring stages and where they lie. Placements are named by number,
    devices counted from the first.
    """

    def message_s(self, before: int, after: int, device: int) -> Array:
        """``[start, stop]``: seconds per microbatch that the boundary before a stage of placement
        ``after``, which begins at ``device``, adds to it, there and back. Where two are equal they
        should be one array.
        """
        ...

    def relief_s(self, placement: int) -> Array:
        """``[start, stop]``, at most 0: what the boundaries around a stage can save of its work."""
        ...

    def fits(self, placement: int, device: int) -> bool:
        """Whether what a placement says of seconds holds for a stage that begins at ``device``."""
        ...


def one_forward_one_backward(num_microbatches: int) -> InFlight:
    """A stage of 1F1B holds one microbatch for itself and one for every stage after it."""
    return lambda place: min(place, num_microbatches)


def split_stages(
    placements: Sequence[PlacedBlocks],
    num_devices: int,
    num_stages: int,
    num_microbatches: int,
    *,
    memory_bytes: float = float("inf"),
    in_flight: InFlight | None = None,
    splits_backward: bool = False,
    between: Between | None = None,
    below_s: float = float("inf"),
    limit_bytes: float | None = None,
    alone: Sequence[int] | None = None,
    is_bounded: bool = True,
) -> Split | NoFit | NoGain:
    """The best split into exactly ``num_stages``.

    ``placements``: the placements that stages may have, all with the same blocks.
    ``splits_backward``: the schedule puts off gradients of weights, so that the bound may count on
    forwards only before and after a stage's own work. ``between``: messages and where stages may
    lie; without it messages take no time. ``below_s``: what takes longer is of no interest.
    ``limit_bytes``: what a stage may take at all, where that is more than ``memory_bytes``; the
    bound is of all such splits. ``alone``: by stage the microbatches that it holds at once in any
    case, whatever shares its position, for the bound too. ``is_bounded``: whether a bound is
    wanted; else it is 0.
    """
    # The costs of all stretches of blocks as stages, for each placement.
    tables = [StageCosts(placement, num_microbatches, splits_backward) for placement in placements]
    paths = _Paths(placements, tables, num_devices, num_stages, num_microbatches, between)
    if below_s < float("inf") and not paths.can_keep(below_s):
        return NoGain(below_s)
    # Microbatches in flight by stage: the first stage holds most.
    holds = in_flight or one_forward_one_backward(num_microbatches)
    counts = [holds(place) for place in range(num_stages, 0, -1)]
    surely, most_bytes = (
        counts if alone is None else alone,
        memory_bytes if limit_bytes is None else limit_bytes,
    )
    # Stages that hold equally many have equal prices.
    by_count = {
        count: [table.priced(count, memory_bytes) for table in tables]
        for count in dict.fromkeys(counts)
    }
    found = paths.best([by_count[count] for count in counts], below_s)
    if found is None:
        # Nothing fits at all, or nothing that is of interest.
        if below_s == float("inf"):
            return NoFit(paths.least_memory(counts))
        return NoGain(paths.bound(below_s, surely, most_bytes))
    cost, path = found
    stages, used = [], 0.0
    # The stages of the path, with what each computes again.
    for count, (start, stop, index) in zip(counts, path, strict=True):
        table = tables[index]
        recomputed = table.recomputed(start, stop, count, memory_bytes)
        stages.append(Stage(start, stop, placements[index].num_devices, index, recomputed))
        used = max(used, table.used_bytes(start, stop, recomputed, count))
    # A lower bound of all splits, to say how good this one is.
    bound = paths.bound(float(cost), surely, most_bytes) if is_bounded else 0.0
    return Split(tuple(stages), float(cost), min(float(cost), bound), used)


def may_take_less(
    placements: Sequence[PlacedBlocks],
    num_devices: int,
    num_stages: int,
    num_microbatches: int,
    below_s: float,
    *,
    splits_backward: bool,
    between: Between | None = None,
) -> bool:
    """Whether a split could take less, as far as the bound tells, memory and messages aside.
    ``between``: what they may save of the work around them.
    """
    tables = [StageCosts(placement, num_microbatches, splits_backward) for placement in placements]
    paths = _Paths(placements, tables, num_devices, num_stages, num_microbatches, between)
    return paths.can_keep(below_s)


Priced = Sequence[tuple[Array, Array]]
"""What :meth:`StageCosts.priced` says of each placement."""

Path = list[tuple[int, int, int]]
"""``(start, stop, placement)`` from the first stage to the last."""


Reached = dict[int, dict[int, Array]]
"""The least seconds so far for each block, by placement of the last stage and number of lots used;
only what some path reaches.
"""

Step = dict[int, dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]]]
"""Where a stage begins, and the placement of the one before, for each block at which it ends; by
its placement and the number of lots used behind it.
"""

BandedStage = tuple[Band, Array, Array]
"""The stages that may be with one placement, and two tables of them within the band: for the best
split seconds and what is counted of them, for bounds what counts of a stage itself and of those
before it.
"""

Allowed = dict[tuple[int, int], BandedStage]
"""The stages that a limit allows, by identity of their prices and of the message before them."""

OwnAndFill = tuple[list[Array], list[Array]]
"""What counts of a stage itself and of a stage before it, for each placement."""


def _added(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    return [first + second for first, second in zip(a, b, strict=True)]


class _Paths:
    """The splits as paths over blocks and devices, which are dealt out in lots of as many as all
    placements have in common.
    """

    def __init__(
        self,
        placements: Sequence[PlacedBlocks],
        tables: Sequence[StageCosts],
        num_devices: int,
        num_stages: int,
        num_microbatches: int,
        between: Between | None,
    ) -> None:
        self.unit = math.gcd(*(placement.num_devices for placement in placements), num_devices)
        self.sizes = [placement.num_devices // self.unit for placement in placements]
        self.tables, self.num_lots, self.num_stages = tables, num_devices // self.unit, num_stages
        self.num_microbatches, self.between = num_microbatches, between
        self._messages: dict[tuple[int, int, int], Array] = {}
        self.num_blocks = len(tables[0].blocks) if tables else 0

    def best(self, priced: Sequence[Priced], below_s: float) -> tuple[float, Path] | None:
        """The least cost below ``below_s``, and its path; ``priced``: by stage."""
        best, limit = None, below_s
        least = below_s
        allowed = Allowed()
        while True:
            found = self.least_sum(priced, limit, allowed)
            if found is None:
                return best
            total, peak, path = found
            if total + peak < least:
                least = total + peak
                best = (least, path)
            # the sum only grows as the limit falls, and one stage has at least an equal share of it
            if total * (1 + (self.num_microbatches - 1) / self.num_stages) >= least:
                return best
            limit = np.nextafter(peak, -np.inf)

    def least_sum(
        self, priced: Sequence[Priced], limit: float, allowed: Allowed | None = None
    ) -> tuple[float, float, Path] | None:
        """The least sum of stage times with no stage's counted seconds above ``limit``: ``(sum,
        largest counted, path)``. ``allowed``: what was allowed with the same ``priced`` and a
        higher limit; what this one allows takes its place.
        """
        if not self.num_blocks:
            return None
        # Before the first stage, whose number is -1, nothing is used and nothing is done.
        before: Reached = {-1: {0: self._nothing()}}
        steps: list[Step] = []
        known = Allowed() if allowed is None else allowed
        # By table and message: stages that hold equally many share them.
        stages_s: dict[tuple[int, int], Array] = {}
        # One stage more each round.
        for listed in priced:
            step, after = Step(), Reached()
            # Every placement of the stage, after every number of lots that is used so far.
            for index, used in self._places(before):
                stop_lots = used + self.sizes[index]
                for message, sums, origins in self._arrivals(before, index, used):
                    key = (id(listed[index]), id(message))
                    if key not in stages_s:
                        known[key] = self._allowed(
                            known.get(key) or self._all(listed[index], message), limit
                        )
                        band, time, counted = known[key]
                        stages_s[key] = np.where(counted <= limit, time, np.inf)
                    band = known[key][0]
                    if not band.width:
                        continue
                    # All starts at once; the best start for each stop.
                    times = band.at_start(sums) + stages_s[key]
                    rows = times.argmin(axis=0)
                    values, starts = times[rows, band.stops], band.starts[rows, band.stops]
                    if not np.isfinite(values).any():
                        continue
                    columns, chosen = after.setdefault(index, {}), step.setdefault(index, {})
                    if stop_lots not in columns:
                        columns[stop_lots] = values
                        chosen[stop_lots] = starts, origins[starts]
                        continue
                    # Another message: remember start and placement where it is the better one.
                    better = values < columns[stop_lots]
                    columns[stop_lots][better] = values[better]
                    chosen[stop_lots][0][better] = starts[better]
                    chosen[stop_lots][1][better] = origins[starts[better]]
            before = after
            steps.append(step)
        return self._read(before, steps, priced)

    def _nothing(self) -> Array:
        """The seconds by block before the first stage."""
        column = np.full(self.num_blocks + 1, np.inf)
        column[0] = 0.0
        return column

    def _read(
        self, last: Reached, steps: Sequence[Step], priced: Sequence[Priced]
    ) -> tuple[float, float, Path] | None:
        """The path that the tables of the steps describe."""
        # The placement of the last stage at the end of everything.
        ends = {
            index: float(columns[self.num_lots][self.num_blocks])
            for index, columns in last.items()
            if self.num_lots in columns
        }
        index = min(ends, key=ends.__getitem__, default=-1)
        total = ends.get(index, math.inf)
        if not math.isfinite(total):
            return None
        path: Path = []
        largest, stop, used = 0.0, self.num_blocks, self.num_lots
        # Back from the end, stage by stage.
        for step, listed in zip(reversed(steps), reversed(priced), strict=True):
            starts, origins = step[index][used]
            start, origin = int(starts[stop]), int(origins[stop])
            used -= self.sizes[index]
            path.append((start, stop, index))
            message = self._message(origin, index, used)
            counted = float(listed[index][1][start, stop])
            if message is not None:
                counted += (self.num_microbatches - 1) * float(message[start, stop])
            largest = max(largest, counted)
            stop, index = start, origin
        return total, largest, path[::-1]

    def _places(self, before: Reached) -> list[tuple[int, int]]:
        """``(placement, lots used)`` of the stages that may come next."""
        reached = sorted({used for columns in before.values() for used in columns})
        return [
            (index, used)
            for index, size in enumerate(self.sizes)
            for used in reached
            if used + size <= self.num_lots and self._fits(index, used)
        ]

    def _arrivals(
        self, before: Reached, index: int, used: int
    ) -> list[tuple[Array | None, Array, Array]]:
        """The least seconds so far per block, and the placement of the stage before, for each
        distinct message before a stage.
        """
        # Placements with the same message may be compared before the stage is.
        groups: dict[int, tuple[Array | None, list[int]]] = {}
        for origin, columns in before.items():
            if used in columns:
                # Placements whose messages to this stage are one table are one group: for each
                # block only the cheapest of them can be a part of the best path.
                message = self._message(origin, index, used)
                groups.setdefault(id(message), (message, []))[1].append(origin)
        found = []
        for message, origins in groups.values():
            sums = np.stack([before[origin][used] for origin in origins])
            least = sums.argmin(axis=0)
            found.append((message, sums[least, np.arange(sums.shape[1])], np.array(origins)[least]))
        return found

    def _message(self, origin: int, index: int, used: int) -> Array | None:
        if origin < 0 or self.between is None:
            return None
        # Kept, as tables are told apart by identity.
        at = origin, index, used
        if at not in self._messages:
            self._messages[at] = self.between.message_s(origin, index, used * self.unit)
        return self._messages[at]

    def _fits(self, index: int, used: int) -> bool:
        return self.between is None or self.between.fits(index, used * self.unit)

    def _all(self, priced: tuple[Array, Array], message: Array | None) -> BandedStage:
        """All stages that fit, with a message before them."""
        time, counted = priced
        if message is not None:
            time = time + message
            if self.num_microbatches > 1:
                counted = counted + (self.num_microbatches - 1) * message
        band = band_of(self.num_blocks, most_blocks(np.isfinite(time)))
        return band, band.of(time), band.of(counted)

    def _allowed(self, stage: BandedStage, limit: float) -> BandedStage:
        """The stages that count no more than the limit, in the narrowest band that has them."""
        band, time, counted = stage
        rows = np.flatnonzero((counted <= limit).any(axis=1))
        first = int(rows[0]) if len(rows) else band.width
        narrow = band_of(self.num_blocks, band.width - first)
        return narrow, time[first:], counted[first:]

    # ---------------------------------------------------------------------------------------------
    # bounds

    def bound(self, upper: float, counts: Sequence[float], memory_bytes: float) -> float:
        """What no split can avoid, messages aside: the larger of the least ``max_k m w_k + u_k``,
        and the least ``max_k sum_{j<k} fill_j + m w_k`` (a stage's ``u_k`` comes while gradients go
        back through the stages before it), with what a stage has to compute again so that it fits,
        ``counts[k]`` microbatches at once. SearchResult by bisection below ``upper``, where one of
        them ends if they are larger.
        """
        tables = self._with_again(counts, memory_bytes, upper)
        # Bisection. The invariant: some split keeps within ``high``; none is known that keeps
        # within ``low``.
        low, high = 0.0, upper
        stages = self._within(tables, upper)
        if not self._keep(stages, high):
            return upper
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            if self._keep(stages, middle):
                high = middle
            else:
                low = middle
        return low

    def can_keep(self, limit: float) -> bool:
        """Whether neither bound is above ``limit``, memory aside."""
        tables = [[kind] * self.num_stages for kind in self._bound_tables]
        return self._keep(self._within(tables, limit), limit)

    @functools.cached_property
    def _bound_tables(self) -> list[OwnAndFill]:
        """What each of the two bounds counts, memory aside: of a stage itself, and of the stages
        before another.
        """
        # First bound: the longest stage alone. Second: a stage's work behind the filling of those
        # before.
        alone, work, fill = [], [], []
        for index, table in enumerate(self.tables):
            # Messages may make a placement cheaper than it looks by itself.
            less = (
                np.zeros_like(table.work_s)
                if self.between is None
                else self.between.relief_s(index)
            )
            work.append(self.num_microbatches * np.maximum(table.work_s + less, 0.0))
            alone.append(work[-1] + table.once_s)
            fill.append(np.maximum(table.fill_s + less, 0.0))
        nothing = [np.where(np.isfinite(own), 0.0, np.inf) for own in alone]
        return [(alone, nothing), (work, fill)]

    def _with_again(
        self, counts: Sequence[float], memory_bytes: float, upper: float
    ) -> list[list[OwnAndFill]]:
        """The bounds of each stage, with what has to be computed again; of stages that take more
        than ``upper`` in any case, without that.
        """
        (alone, nothing), (work, fill) = self._bound_tables
        within = [
            (own <= upper) & (longest <= upper) for own, longest in zip(alone, work, strict=True)
        ]
        by_count: dict[float, tuple[OwnAndFill, OwnAndFill]] = {}
        for count in dict.fromkeys(counts):
            again = [
                table.again_s(count, memory_bytes, least=True, within=some)
                for table, some in zip(self.tables, within, strict=True)
            ]
            longer = [self.num_microbatches * seconds for seconds in again]
            # What has to be computed again in a backward is waited for, too.
            before = [
                own
                + np.where(np.isfinite(seconds), 0.0 if table.fills_forward else seconds, np.inf)
                for own, seconds, table in zip(fill, again, self.tables, strict=True)
            ]
            by_count[count] = (_added(alone, longer), nothing), (_added(work, longer), before)
        return [[by_count[count][kind] for count in counts] for kind in range(2)]

    def _within(
        self, tables: Sequence[Sequence[OwnAndFill]], limit: float
    ) -> list[list[list[BandedStage]]]:
        """The tables of stages, by bound and stage, without what takes more than ``limit``."""
        known: dict[int, list[BandedStage]] = {}
        for stages in tables:
            for table in stages:
                if id(table) not in known:
                    known[id(table)] = [
                        self._banded(own, fill, limit) for own, fill in zip(*table, strict=True)
                    ]
        return [[known[id(table)] for table in stages] for stages in tables]

    def _banded(self, own: Array, fill: Array, limit: float) -> BandedStage:
        is_within = own <= limit
        band = band_of(self.num_blocks, most_blocks(is_within))
        return band, band.of(own), band.of(fill)

    def _keep(self, tables: Sequence[Sequence[Sequence[BandedStage]]], limit: float) -> bool:
        """Whether no bound is above ``limit``; ``tables``: by bound and stage."""
        return all(self._keeps(stages, limit) for stages in tables)

    def _keeps(self, stages: Sequence[Sequence[BandedStage]], limit: float) -> bool:
        """Whether a split exists with ``sum_{j<k} fill_j + own_k`` at most ``limit`` for all
        stages: the least sum of the stages before decides whether the next one keeps within it.
        """
        # By number of lots: the least sum for each block. Less is never worse.
        before = {0: self._nothing()}
        for placements in stages:
            following: dict[int, Array] = {}
            for index, used in self._places({-1: before}):
                band, own, fill = placements[index]
                if not band.width:
                    continue
                start, stop = band.at_start(before[used]), used + self.sizes[index]
                sums = np.where(start + own <= limit, start + fill, np.inf)
                least = sums.min(axis=0)
                known = following.get(stop)
                following[stop] = least if known is None else np.minimum(known, least)
            before = {
                used: column for used, column in following.items() if np.isfinite(column).any()
            }
        return self.num_lots in before and bool(np.isfinite(before[self.num_lots][self.num_blocks]))

    def least_memory(self, counts: Sequence[float]) -> float:
        """The least over all splits of what the fullest device needs; infinite where the devices do
        not add up. ``counts``: microbatches in flight by stage.
        """
        # By placement and lots used: what the fullest stage needs at least, by block.
        before: Reached = {-1: {0: self._nothing()}}
        for count, alike in itertools.groupby(counts):
            tables = [table.least_bytes(count) for table in self.tables]
            for _ in alike:
                after = Reached()
                for index, used in self._places(before):
                    columns, stop_lots = after.setdefault(index, {}), used + self.sizes[index]
                    for message, fullest, _ in self._arrivals(before, index, used):
                        needed = np.maximum(fullest[:, None], tables[index])
                        if message is not None:
                            needed = np.where(np.isfinite(message), needed, np.inf)
                        least = needed.min(axis=0)
                        columns[stop_lots] = np.minimum(columns.get(stop_lots, np.inf), least)
                before = after
        ends = (columns.get(self.num_lots) for columns in before.values())
        return min((float(end[self.num_blocks]) for end in ends if end is not None), default=np.inf)
