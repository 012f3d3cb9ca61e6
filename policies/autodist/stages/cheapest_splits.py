"""The split of a model into stages that is cheapest at given prices: a shortest path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.policies.autodist.stages.bands import band_of, most_blocks
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.stage_minima import Least

Path = tuple[tuple[int, int, int], ...]
"""A split: of each stage, from the first, the number of its placement, and the blocks at which it
starts and stops.
"""


@dataclass(frozen=True)
class PricedPaths:
    """What splits take, so many of each part of a stage counted. ``prices``: by stage and
    placement, ``[row, stop]`` within the band of the placement.
    ``before``: by stage, ``[lots used, block]``, the least of all stages before it; the last is of
    all. ``least_s``: the least of all splits, infinite where there are none; ``best``: the split
    that has it.
    """

    prices: list[list[Array]]
    before: list[Array]
    least_s: float
    best: Path


class Splits:
    """The splits that are looked for: their stages have some of the placements and take so many
    devices, which are dealt out in lots.

    ``bands``: by placement, of all stages that are not left out; ``may_have``: by stage and
    placement, ``[row, stop]`` within these, which stages that are.
    """

    def __init__(self, placements: Sequence[Least], num_devices: int, num_stages: int) -> None:
        unit = math.gcd(num_devices, *(least.num_devices for least in placements))
        self.placements, self.num_blocks = placements, placements[0].num_blocks
        self.num_lots, self.sizes = (
            num_devices // unit,
            [least.num_devices // unit for least in placements],
        )
        self.bands = [
            band_of(self.num_blocks, max(most_blocks(fits) for fits in least.fits[:num_stages]))
            for least in placements
        ]
        self.may_have = [
            [
                band.of(least.fits[stage], False)
                for least, band in zip(placements, self.bands, strict=True)
            ]
            for stage in range(num_stages)
        ]

    def priced(self, counts: Array) -> PricedPaths:
        """``counts``: ``[stage, part]``."""
        # Stage by stage: ``after[lots used, block]`` is the least of all ways to end there.
        prices, befores, origins = [], [self._nothing((0, 0))], []
        for stage, (own, masks) in enumerate(zip(counts, self.may_have, strict=True)):
            # What is left out is infinite.
            prices.append(
                [
                    np.where(mask, least.priced(stage, own, band), np.inf)
                    for least, band, mask in zip(self.placements, self.bands, masks, strict=True)
                ]
            )
            before, after = befores[-1], self._nothing()
            origin = np.zeros((*before.shape, 2), dtype=int)  # placement, block
            # Every start of the stage at once; the best start for each stop.
            for index, used in self._places(before):
                band = self.bands[index]
                sums = band.at_start(before[used]) + prices[-1][index]
                rows = sums.argmin(axis=0)
                values, starts = sums[rows, band.stops], band.starts[rows, band.stops]
                stop = used + self.sizes[index]
                better = values < after[stop]
                # Remember where it came from.
                after[stop][better] = values[better]
                origin[stop][better] = np.column_stack([np.full_like(starts, index), starts])[
                    better
                ]
            befores.append(after)
            origins.append(origin)
        least_s = float(befores[-1][-1, -1])
        return PricedPaths(
            prices, befores, least_s, self._read(origins) if np.isfinite(least_s) else ()
        )

    def _read(self, origins: Sequence[Array]) -> Path:
        used, stop, found = self.num_lots, self.num_blocks, []
        for origin in reversed(origins):
            index, start = origin[used, stop].tolist()
            found.append((index, start, stop))
            used, stop = used - self.sizes[index], start
        return tuple(found[::-1])

    def leave_out(self, paths: PricedPaths, above_s: float) -> float:
        """Leave out the stages of which every split takes more; the share that they are of those
        before.
        """
        # From the end: ``after`` is the least from a block on.
        after, known, left = self._nothing((-1, -1)), 0, 0
        for stage in reversed(range(len(self.may_have))):
            before, further = paths.before[stage], self._nothing()
            least = [np.full_like(prices, np.inf) for prices in paths.prices[stage]]
            # The least of all splits that have this stage: before it, itself, behind it.
            for index, used in self._places(before):
                band = self.bands[index]
                sums = paths.prices[stage][index] + after[used + self.sizes[index]]
                np.minimum.at(further[used], band.starts, sums)
                np.minimum(least[index], band.at_start(before[used]) + sums, out=least[index])
            known += sum(int(mask.sum()) for mask in self.may_have[stage])
            self.may_have[stage] = [own <= above_s for own in least]
            left += sum(int(mask.sum()) for mask in self.may_have[stage])
            after = further
        self._narrow()
        return 1 - left / max(1, known)

    def leave_out_alone(self, counts: Array, above_s: float) -> None:
        """Leave out the stages that take more by themselves."""
        for stage, (own, masks) in enumerate(zip(counts, self.may_have, strict=True)):
            self.may_have[stage] = [
                mask & (least.priced(stage, own, band) <= above_s)
                for least, band, mask in zip(self.placements, self.bands, masks, strict=True)
            ]
        self._narrow()

    def _narrow(self) -> None:
        """Leave out the rows of the bands that have no stage any more."""
        for index, band in enumerate(self.bands):
            # The first row has the stages of most blocks.
            rows = np.any([masks[index].any(axis=1) for masks in self.may_have], axis=0)
            width = band.width - int(rows.argmax()) if rows.any() else 0
            if width < band.width:
                self.bands[index] = band_of(self.num_blocks, width)
                for masks in self.may_have:
                    masks[index] = masks[index][band.width - width :]

    def has(self, path: Path) -> bool:
        """Whether no stage of a split is left out."""
        return all(
            self._has(masks[index], stop - start, stop)
            for masks, (index, start, stop) in zip(self.may_have, path, strict=True)
        )

    def _has(self, mask: Array, num_blocks: int, stop: int) -> bool:
        return num_blocks <= len(mask) and bool(mask[len(mask) - num_blocks, stop])

    def amounts(self, path: Path, counts: Array) -> Array:
        """``[stage, part]``: what the stages of a split have, so much of each counted."""
        stages = zip(path, counts, strict=True)
        return np.array(
            [
                self.placements[index].amounts(k, (start, stop), own)
                for k, ((index, start, stop), own) in enumerate(stages)
            ]
        )

    def _nothing(self, reached: tuple[int, int] | None = None) -> Array:
        """``[lots used, block]``: infinite, but 0 for what is reached."""
        found = np.full((self.num_lots + 1, self.num_blocks + 1), np.inf)
        if reached is not None:
            found[reached] = 0.0
        return found

    def _places(self, before: Array) -> list[tuple[int, int]]:
        """``(placement, lots used)`` of the stages that may come next."""
        reached = np.flatnonzero(np.isfinite(before).any(axis=1)).tolist()
        return [
            (index, used)
            for index, size in enumerate(self.sizes)
            for used in reached
            if used + size <= self.num_lots and self.bands[index].width
        ]
