"""What each worker reads, as a function of how much it has read.

A worker goes through its samples epoch after epoch, each in an order that follows from its seed.
After a state was dealt to other workers (:mod:`~shardwright.data.energon.redist`) it first reads
what was left of the epochs that were under way: **segments**, each a part of the order in which
another split would have read.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from shardwright.data.energon.worker_config import global_boundaries, worker_seed
from shardwright.data.permutation import Order, key
from shardwright.data.sample_stream import BlendedStream, Run, SampleStream

KIND = "energon"
"""The kind of states, as they say it themselves."""


@dataclass(frozen=True)
class Split:
    """How all samples of a source are shared, and in which orders they are read.

    ``num_samples``: of the source. ``seed_offset``: see
    :class:`~shardwright.data.energon.worker_config.WorkerConfig`. ``shuffle``: whether workers read
    in another order in each epoch; ``block``: neighbours that stay together then. ``source``: its
    number among those that are blended.
    """

    num_samples: int
    seed_offset: int
    shuffle: bool
    block: int | None
    source: int = 0

    def size(self, num_workers: int, worker: int) -> int:
        """The samples of a worker of so many."""
        bounds = global_boundaries(self.num_samples, num_workers)
        return bounds[worker + 1] - bounds[worker]

    def samples(
        self, num_workers: int, worker: int, epoch: int, start: int, stop: int
    ) -> list[int]:
        """What a worker of so many reads at positions ``start`` to ``stop`` of an epoch."""
        first = global_boundaries(self.num_samples, num_workers)[worker]
        seed = worker_seed(worker, self.seed_offset)
        if self.source:  # sources of one size are not to be read in one order
            seed = key(seed, "source", self.source)
        order = Order(self.size(num_workers, worker), seed, self.shuffle, self.block)
        return [first + index for index in order.indices(epoch, start, stop).tolist()]


class Segment(NamedTuple):
    """Positions ``start`` to ``stop`` of an epoch of worker ``worker`` of ``num_workers``."""

    num_workers: int
    worker: int
    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many samples it has."""
        return self.stop - self.start


@dataclass(frozen=True)
class WorkerStream:
    """The samples of worker ``worker`` of ``num_workers``, without an end: the ``segments``, then
    its own epochs from ``first_epoch`` on.
    """

    split: Split
    num_workers: int
    worker: int
    segments: tuple[Segment, ...] = ()
    first_epoch: int = 0

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(segment.size for segment in self.segments))

    @property
    def dealt(self) -> int:
        """The samples of all segments."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def own(self) -> int:
        """The samples of an epoch of its own."""
        return self.split.size(self.num_workers, self.worker)

    def parts(self, start: int, stop: int) -> list[Segment]:
        """Positions ``start`` to ``stop`` of this stream as segments."""
        found: list[Segment] = []
        while start < stop:
            # First what a redistribution has dealt to this worker, then its own epochs.
            if start < self.dealt:
                number = bisect.bisect_right(self._ends, start)
                segment = self.segments[number]
                offset = start - (self._ends[number] - segment.size) + segment.start
                count = min(stop, self._ends[number]) - start
                found.append(segment._replace(start=offset, stop=offset + count))
            else:
                epoch, inside = divmod(start - self.dealt, self.own)
                count = min(stop - start, self.own - inside)
                number = self.first_epoch + epoch
                found.append(Segment(self.num_workers, self.worker, number, inside, inside + count))
            start += count
        return found

    def runs(self, start: int, stop: int) -> list[Run]:
        """See :class:`~shardwright.data.sample_stream.SampleStream`."""
        source, samples = self.split.source, self.split.samples
        return [Run(source, part.epoch, samples(*part)) for part in self.parts(start, stop)]

    @property
    def epoch_size(self) -> int:
        """See :class:`~shardwright.data.sample_stream.SampleStream`; of epochs of its own."""
        return self.own

    def epoch_at(self, position: int) -> int:
        """The epoch of its own that is under way; that before the first one among segments."""
        if position < self.dealt:
            return self.first_epoch - 1
        return self.first_epoch + (position - self.dealt) // max(1, self.own)

    def left(self, position: int, last_epoch: int) -> list[Segment]:
        """What is still to be read up to the end of an epoch."""
        epochs = last_epoch + 1 - self.first_epoch
        return self.parts(position, max(position, self.dealt + max(0, epochs) * self.own))


def segments_of(value: Any) -> tuple[Segment, ...]:
    """Segments from the lists of a state."""
    return tuple(Segment(*map(int, item)) for item in value)


def cut(segments: Sequence[Segment], bounds: Sequence[int]) -> list[list[Segment]]:
    """The samples of all segments, end to end, cut at ``bounds``."""
    pieces: list[list[Segment]] = [[] for _ in bounds[1:]]
    at = 0
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            # The piece that sample ``at`` falls into; a segment may go over several.
            piece = bisect.bisect_right(bounds, at) - 1
            count = min(segment.stop - start, bounds[piece + 1] - at)
            pieces[piece].append(segment._replace(start=start, stop=start + count))
            start, at = start + count, at + count
    return pieces


def worker_streams(
    splits: Sequence[Split], num_workers: int, worker: int, dealt: Sequence[Any] | None, epochs: Any
) -> list[WorkerStream]:
    """The streams of a worker, by source. ``dealt``: the segments of each source, and ``epochs``
    its first own one, if a state was dealt anew.
    """
    if dealt is None:
        return [WorkerStream(split, num_workers, worker) for split in splits]
    return [
        WorkerStream(split, num_workers, worker, segments_of(segments), int(epoch))
        for split, segments, epoch in zip(splits, dealt, epochs, strict=True)
    ]


def blended(streams: Sequence[WorkerStream], weights: Sequence[float] | None) -> SampleStream:
    """What a worker reads of all sources."""
    return streams[0] if weights is None else BlendedStream(streams, weights)
