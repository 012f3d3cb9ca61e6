"""The least that any stage of a placement can have of time and memory, in any split."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.policies.autodist.stages.bands import Band
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.stage_costs import StageCosts, ranges

NUM_PARTS = 8
FORWARD, INPUT, WEIGHT, ONCE, HELD, KEPT, THERE, BACK = range(NUM_PARTS)
"""What a stage has: seconds of forwards, of the two parts of backwards, and of what comes once per
step; shares of the memory of a position that it holds, and that it keeps of a microbatch; seconds
of the message that it waits for, and of the one with the gradient of what it got.
"""

Crossings = Sequence[tuple[Array, Array]]
"""The seconds of messages, by stage: ``[start, stop]``, of what the stage gets from the one before
it, and of what it sends back.
"""

MAX_HULLS = 4_000_000
"""How many numbers may be kept of what stages can save for some time. Where it were more, all that
can be saved is free as soon as a stage has to compute something again.
"""


@dataclass(frozen=True)
class _Banded:
    """The tables of a :class:`Least` within a band. ``first``: by microbatches in flight, the
    seconds and the savings of what must be computed again.
    """

    band: Band
    forward_s: Array
    backward_s: Array
    input_s: Array
    once_s: Array
    held: Array
    kept: Array
    first: Mapping[int, tuple[Array, Array]]
    crossings: Crossings


class Least:
    """The least that any stage of one placement can have, ``[start, stop]`` over blocks.

    Args:
        tables: of the placement.
        relief_s: ``[start, stop, side]``, at most 0: what boundaries can save in the forward and in
            the backward.
        inputs_s: by block, of its backward the gradients of what its stage gets, at least.
        counts: by stage, the microbatches in flight.
        memory_bytes: what a position may take.
        crossings: the least that messages take; without it they count nothing.
    """

    def __init__(
        self,
        tables: StageCosts,
        relief_s: Array,
        inputs_s: Sequence[float],
        counts: Sequence[int],
        memory_bytes: float,
        crossings: Crossings = (),
    ) -> None:
        self._crossings = crossings
        # Stretches that cannot be a stage are infinite.
        some = np.isfinite(tables.work_s)
        self.num_blocks, self.num_devices = len(tables.blocks), tables.num_devices
        self.forward_s = np.maximum(np.where(some, tables.forward_s, 0.0) + relief_s[..., 0], 0.0)
        self.backward_s = np.maximum(np.where(some, tables.backward_s, 0.0) + relief_s[..., 1], 0.0)
        self.input_s = np.minimum(
            np.maximum(ranges(inputs_s) + relief_s[..., 1], 0.0), self.backward_s
        )
        self.once_s = tables.once_s
        self.held, self.kept = (
            tables.held_bytes / memory_bytes,
            tables.activation_bytes / memory_bytes,
        )
        # The least that must be computed again to fit, and what it saves.
        self._again_s, self._saved = _ways(tables, memory_bytes)
        again = {
            count: tables.again_s(count, memory_bytes, least=True)
            for count in dict.fromkeys(counts)
        }
        fits = {count: some & np.isfinite(seconds) for count, seconds in again.items()}
        self.fits = [fits[count] for count in counts]
        first = {
            count: np.where(np.isfinite(seconds), seconds, 0.0) for count, seconds in again.items()
        }
        saved = {count: self._saved_for(seconds) for count, seconds in first.items()}
        self.first = [(first[count], saved[count]) for count in counts]
        self._counts = tuple(counts)
        self._banded: _Banded | None = None

    @staticmethod
    def num_entries(num_blocks: int, counts: Sequence[int]) -> int:
        """About how many numbers the tables of so many blocks have."""
        return (num_blocks + 1) ** 2 * (NUM_PARTS + 2 * len(set(counts)))

    def priced(self, stage: int, counts: Array, band: Band) -> Array:
        """What the parts of a stage take at least, ``counts`` of each, if it ``fits``; of others
        the entries mean nothing.
        """
        of = self._within(band)
        forwards, inputs, weights, once, held, kept, there, back = counts.tolist()
        whole = (
            min(inputs, weights) * of.backward_s + self._more(stage, inputs, weights) * of.input_s
        )
        first_s, first_saved = of.first[self._counts[stage]]
        backward = whole
        # Blocks of fine chains are never computed again: there is nothing to sum.
        if self._again_s.shape[1] > 1:
            time_s, saved = (_sums(amounts, band) for amounts in self._best(inputs, kept))
            again = inputs * (of.backward_s + np.maximum(time_s, first_s)) - kept * np.maximum(
                saved, first_saved
            )
            # One with something computed again is not split.
            backward = np.where(first_s > 0, again, np.minimum(whole, again))
        rest = forwards * of.forward_s + once * of.once_s + held * of.held + kept * of.kept
        if of.crossings and (there or back):
            there_s, back_s = of.crossings[stage]
            rest = rest + there * there_s + back * back_s
        found: Array = rest + backward
        return found

    def _within(self, band: Band) -> _Banded:
        """The tables within a band. Only those of the latest are kept: bands get narrower."""
        if self._banded is None or self._banded.band is not band:
            first: dict[int, tuple[Array, Array]] = {}
            for count, both in zip(self._counts, self.first, strict=True):
                if count not in first:
                    first[count] = band.of(both[0], 0.0), band.of(both[1], 0.0)
            self._banded = _Banded(
                band,
                band.of(self.forward_s, 0.0),
                band.of(self.backward_s, 0.0),
                band.of(self.input_s, 0.0),
                band.of(self.once_s, 0.0),
                band.of(self.held, 0.0),
                band.of(self.kept, 0.0),
                first,
                self._crossings_within(band),
            )
        return self._banded

    def _crossings_within(self, band: Band) -> Crossings:
        # Few tables for many stages: messages depend on how positions lie to one another alone.
        within = {id(table): band.of(table, 0.0) for table in itertools.chain(*self._crossings)}
        return [(within[id(there)], within[id(back)]) for there, back in self._crossings]

    def amounts(self, stage: int, span: tuple[int, int], counts: Array) -> list[float]:
        """What a stage has of every part behind its price."""
        inputs, weights, kept = (float(counts[part]) for part in (INPUT, WEIGHT, KEPT))
        backward_s, first_s, first_saved = (
            float(of[span]) for of in (self.backward_s, *self.first[stage])
        )
        time_s, saved = (float(amounts[slice(*span)].sum()) for amounts in self._best(inputs, kept))
        # At least what the stage has to compute again.
        time_s, saved = max(time_s, first_s), max(saved, first_saved)
        input_s = float(self.input_s[span]) if stage else 0.0
        whole = min(inputs, weights) * backward_s + max(0.0, inputs - weights) * input_s
        # Nothing is computed again: the backward is whole or split, whichever counts less.
        if not first_s and whole <= inputs * (backward_s + time_s) - kept * saved:
            time_s, saved = 0.0, 0.0
            input_s = input_s if inputs >= weights else backward_s
        else:
            input_s = backward_s + time_s
        once = float(self.once_s[span]), float(self.held[span]), float(self.kept[span]) - saved
        messages = (0.0, 0.0)
        if self._crossings:
            there_s, back_s = self._crossings[stage]
            messages = float(there_s[span]), float(back_s[span])
        weight_s = backward_s + time_s - input_s
        return [float(self.forward_s[span]), input_s, weight_s, *once, *messages]

    def _best(self, inputs: float, kept: float) -> tuple[Array, Array]:
        """The seconds of the way to compute each block again that is best at these prices, or of
        none, and what it saves.
        """
        best = (inputs * self._again_s - kept * self._saved).argmin(axis=1)
        blocks = np.arange(self.num_blocks)
        return self._again_s[blocks, best], self._saved[blocks, best]

    def _saved_for(self, seconds: Array) -> Array:
        """The most that every stage saves in so many seconds, where blocks may be computed again by
        fractions.
        """
        if not seconds.any():
            return np.zeros_like(seconds)
        # The upper hull of (seconds, bytes saved) of each block: by fractions, the best that can be
        # had for a time lies on it.
        segments = [
            _hull(times, saved) for times, saved in zip(self._again_s, self._saved, strict=True)
        ]
        rates = sorted({rate for listed in segments for rate, _, _ in listed})
        most: Array = ranges(self._saved.max(axis=1))
        if len(rates) * seconds.size > MAX_HULLS:
            return np.where(seconds > 0, most, 0.0)
        # The cheapest rate first, until the seconds of each stage are used up.
        left, found = seconds.copy(), np.zeros_like(seconds)
        for rate in rates:
            own = [
                [(time, saved) for other, time, saved in listed if other == rate]
                for listed in segments
            ]
            time_s, saved = (
                ranges([sum(each[part] for each in listed) for listed in own]) for part in range(2)
            )
            # A rate that takes no time is used whole.
            share = np.divide(left, time_s, out=np.ones_like(left), where=time_s > 0)
            share = np.minimum(share, 1.0)
            found += share * saved
            left = left - share * time_s
        return found

    def _more(self, stage: int, inputs: float, weights: float) -> float:
        """How often gradients of what a stage gets are computed beside those of its weights; the
        first gets nothing.
        """
        return max(0.0, inputs - weights) if stage else 0.0


def _sums(amounts: Array, band: Band) -> Array:
    """The sums over the blocks of every stage within a band."""
    sums: Array = np.concatenate([[0.0], np.cumsum(amounts)])
    within: Array = sums - sums[band.starts]
    return within


def _ways(tables: StageCosts, memory_bytes: float) -> tuple[Array, Array]:
    """``[block, way]``: seconds, and the share of the memory saved; the first way is to compute
    nothing again.
    """
    number = max((len(block.again) for block in tables.blocks), default=0)
    time_s, saved = np.zeros((2, len(tables.blocks), number + 1))
    for index, block in enumerate(tables.blocks):
        for way, again in enumerate(block.again, start=1):
            time_s[index, way], saved[index, way] = again.time_s, again.saved_bytes / memory_bytes
    return time_s, saved


def _hull(times: Array, saved: Array) -> list[tuple[float, float, float]]:
    """The ways of one block that are best by fractions, from nothing saved on: seconds per share of
    the memory, ascending, and how many of both.
    """
    found: list[tuple[float, float, float]] = []
    time, share = 0.0, 0.0
    while (further := saved > share).any():
        rates = np.where(further, (times - time) / np.where(further, saved - share, 1.0), np.inf)
        best = int(np.lexsort((-saved, rates))[0])
        found.append((float(rates[best]), float(times[best] - time), float(saved[best] - share)))
        time, share = float(times[best]), float(saved[best])
    return found
