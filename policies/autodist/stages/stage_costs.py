"""What stages are made of: the blocks of the model in one placement, and all the stages that these
could be.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.policies.autodist.stages.frontier import Again, Array, StageFrontiers


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the model that stays in one piece, in one placement. Seconds of one microbatch,
    bytes of one rank.

    ``once_s``: per step. ``held_bytes``: parameters, gradients and optimizer state.
    ``activation_bytes``: what one microbatch keeps from forward to backward; ``again``: the ways to
    compute it again, of which a plan takes one or none.
    """

    forward_s: float
    backward_s: float
    once_s: float = 0.0
    held_bytes: float = 0.0
    activation_bytes: float = 0.0
    again: tuple[Again, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeated:
    """What ``block`` has in common with ``before``, the block before it that has it last, and
    stages make for themselves: a stage with the later one alone has it, too. Units as of blocks.
    """

    before: int
    block: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    once_s: float = 0.0
    held_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Unshared:
    """What a stage with all of these blocks holds in addition: optimizer state of what they read,
    of which other stages would hold their parts.
    """

    blocks: tuple[int, ...]
    held_bytes: float


@dataclass(frozen=True)
class PlacedBlocks:
    """One placement that stages may have: on so many devices, with all blocks of the model
    there.
    """

    num_devices: int
    blocks: Sequence[Block]
    repeated: Sequence[Repeated] = ()
    unshared: Sequence[Unshared] = ()

    @functools.cached_property
    def frontiers(self) -> StageFrontiers:
        """What stages can compute again; the same for all schedules."""
        return StageFrontiers([block.again for block in self.blocks])

    @functools.cached_property
    def most_saved(self) -> Array:
        """``[start, stop]``: the bytes of a microbatch that computing all blocks again saves."""
        return ranges(
            [max((way.saved_bytes for way in block.again), default=0.0) for block in self.blocks]
        )


class StageCosts:
    """All stages that one placement could have: arrays [start, stop] over blocks."""

    def __init__(
        self, placement: PlacedBlocks, num_microbatches: int, splits_backward: bool
    ) -> None:
        self.blocks, self.num_microbatches, self.fills_forward = (
            (blocks := placement.blocks),
            num_microbatches,
            splits_backward,
        )
        self.num_devices = placement.num_devices
        # ``[start, stop]``: sums over the blocks of a stage.
        self.forward_s = ranges([b.forward_s for b in blocks], np.inf)
        self.backward_s = ranges([b.backward_s for b in blocks], np.inf)
        self.once_s = ranges([b.once_s for b in blocks])
        self.held_bytes = ranges([b.held_bytes for b in blocks])
        # What several blocks use is had again by a stage that begins between them.
        for item in placement.repeated:
            stages = slice(item.before + 1, item.block + 1), slice(item.block + 1, None)
            self.forward_s[stages] += item.forward_s
            self.backward_s[stages] += item.backward_s
            self.once_s[stages] += item.once_s
            self.held_bytes[stages] += item.held_bytes
        # What is not shared out is held by a stage that has all of its blocks.
        for part in placement.unshared:
            self.held_bytes[: part.blocks[0] + 1, part.blocks[-1] + 1 :] += part.held_bytes
        self.work_s = self.forward_s + self.backward_s
        self.fill_s = self.forward_s if splits_backward else self.work_s
        self.activation_bytes = ranges([b.activation_bytes for b in blocks])
        self._frontiers, self._most_saved = placement.frontiers, placement.most_saved

    def priced(self, count: float, memory_bytes: float) -> tuple[Array, Array]:
        """Seconds per microbatch, and seconds counted into the maximum, with ``count`` microbatches
        in flight, messages aside; infinite where the stage does not fit.
        """
        time = self.work_s + self.again_s(count, memory_bytes)
        counted = self.once_s.copy()
        if self.num_microbatches > 1:
            counted += (self.num_microbatches - 1) * time
        return time, counted

    def again_s(
        self,
        count: float,
        memory_bytes: float,
        *,
        least: bool = False,
        within: Array | None = None,
    ) -> Array:
        """Seconds per microbatch of what a stage has to compute again; infinite where it does not
        fit. ``least``: no less. ``within``: the stages that are asked for, by default all; of
        others that fit it is 0.
        """
        found = np.where(self.least_bytes(count) > memory_bytes * (1 + 1e-12), np.inf, 0.0)
        # ``[start, stop]``: above 0 where a stage of these blocks is too large as it is.
        lacking = self.held_bytes + count * self.activation_bytes - memory_bytes
        too_large = np.isfinite(self.work_s) & np.isfinite(found) & (lacking > 0)
        if within is not None:
            too_large &= within
        for frontier, stages in self._frontiers.distinct(too_large):
            found[stages] = frontier.costs_of(lacking[stages] / count, least=least)
        return found

    def recomputed(
        self, start: int, stop: int, count: float, memory_bytes: float
    ) -> tuple[tuple[int, int], ...]:
        """Which blocks of a stage are computed again so that it fits, and in which way; of blocks
        alike the :meth:`earliest`.
        """
        lacking = (
            self.held_bytes[start, stop] + count * self.activation_bytes[start, stop] - memory_bytes
        )
        if lacking <= 0:
            return ()
        chosen = self._frontiers.of(start, stop).chosen(lacking / count)
        return self.earliest(start, stop, [(start + index, way) for index, way in chosen])

    def earliest(
        self, start: int, stop: int, chosen: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        """A choice that takes the same time and keeps as much, in which the first of blocks alike
        are computed again, and the first of those in the way that saves most.

        The backward of the last block begins while all others still keep theirs. What that block
        would compute again comes on top of it.
        """
        ways, alike = dict(chosen), dict[tuple[Again, ...], list[int]]()
        for block in range(start, stop):
            alike.setdefault(self.blocks[block].again, []).append(block)
        found: list[tuple[int, int]] = []
        for again, blocks in alike.items():
            taken = [ways[block] for block in blocks if block in ways]
            taken.sort(key=lambda way: -again[way].saved_bytes)
            found += zip(blocks, taken, strict=False)
        return tuple(sorted(found))

    def used_bytes(
        self, start: int, stop: int, recomputed: Sequence[tuple[int, int]], count: float
    ) -> float:
        """The bytes of one stage."""
        saved = sum(self.blocks[block].again[way].saved_bytes for block, way in recomputed)
        return float(
            self.held_bytes[start, stop] + count * (self.activation_bytes[start, stop] - saved)
        )

    def may_fit(self, counts: Sequence[int], memory_bytes: float) -> bool:
        """Whether there is a split into stages of which each fits, with so many microbatches in
        flight, and all computed again that can be.
        """
        fits = {
            count: self.least_bytes(count) <= memory_bytes * (1 + 1e-12) for count in set(counts)
        }
        # ``[block]``: where the stages so far may end.
        ends = np.arange(len(self.blocks) + 1) == 0
        for count in counts:
            ends = (ends[:, None] & fits[count]).any(axis=0)
        return bool(ends[-1])

    def least_bytes(self, count: float) -> Array:
        """The bytes of every stage with all blocks computed again, as far as they can be."""
        return np.where(
            np.isfinite(self.work_s),
            self.held_bytes + count * (self.activation_bytes - self._most_saved),
            np.inf,
        )


def ranges(values: Sequence[float] | Array, empty: float = 0.0) -> Array:
    """[start, stop] -> the sum over the range; ``empty`` where there is nothing in it."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    table = sums[None, :] - sums[:, None]
    return np.where(np.triu(np.ones_like(table), 1) > 0, table, empty)
