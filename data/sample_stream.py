"""Sample streams: the samples of one source, or of several that are blended, one after another
without an end.

Position ``k`` of the stream is a sample, and epoch ``e`` is positions ``e * n`` to ``(e + 1) * n``
of a stream of ``n`` samples. Nothing depends on ranks or workers, and nothing is stored.

A blend of two sources with weights 3 and 1 is a pattern that repeats: ``a a b a``. Position 6 is
the second ``b``. Each source goes round in epochs of its own, so each of its samples is seen once
in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.data.permutation import Order
from shardwright.runtime.errors import ConfigError

BLOCK = 8192
"""Positions are permuted that many at a time, as numpy costs by the call."""

LONGEST_PATTERN = 16384
"""The most positions after which a blend repeats; weights are rounded to that many."""


class Run(NamedTuple):
    """Neighbours of a stream that lie in one epoch of one source."""

    source: int
    epoch: int
    indices: list[int]


class SampleStream(Protocol):
    """See the top of this file. ``epoch_size``: the positions of an epoch."""

    @property
    def epoch_size(self) -> int: ...

    def runs(self, start: int, stop: int) -> list[Run]:
        """The samples at positions ``start`` to ``stop``."""
        ...


class SingleStream:
    """The samples of one source. ``source``: its number."""

    def __init__(self, order: Order, source: int = 0) -> None:
        self._order = order
        self._source = source
        self._block: tuple[int, int] | None = None
        self._indices: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def epoch_size(self) -> int:
        """See :class:`SampleStream`."""
        return self._order.size

    def runs(self, start: int, stop: int) -> list[Run]:
        """See :class:`SampleStream`."""
        found: list[Run] = []
        while start < stop:
            epoch, first = divmod(start, self._order.size)
            block, inside = divmod(first, BLOCK)
            count = min(stop - start, BLOCK - inside, self._order.size - first)
            # A list of these alone: other replicas take the rest of the block.
            indices = self._of_block(epoch, block)[inside : inside + count].tolist()
            if found and found[-1].epoch == epoch:
                found[-1].indices.extend(indices)
            else:
                found.append(Run(self._source, epoch, indices))
            start += count
        return found

    def _of_block(self, epoch: int, block: int) -> NDArray[np.int64]:
        if self._block != (epoch, block):
            start = block * BLOCK
            stop = min(start + BLOCK, self._order.size)
            self._block = (epoch, block)
            self._indices = self._order.indices(epoch, start, stop)
        return self._indices


@dataclass(frozen=True)
class Pattern:
    """How sources take turns. ``sources``: by position of the pattern. ``turns``: which turn of its
    source a position is. ``counts``: the turns of each source.
    """

    sources: NDArray[np.int64]
    turns: NDArray[np.int64]
    counts: tuple[int, ...] = field(compare=False)

    @classmethod
    def of_weights(cls, weights: Sequence[float]) -> Pattern:
        """The shortest pattern that has the weights exactly, or one of :data:`LONGEST_PATTERN`
        positions that has them rounded. Each source's turns are spread evenly.
        """
        counts = _counts(weights)
        sources = np.repeat(np.arange(len(counts)), counts)
        ideal = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        order = np.argsort(ideal, kind="stable")
        turns = np.concatenate([np.arange(count) for count in counts])
        return cls(sources[order], turns[order], counts)

    @property
    def length(self) -> int:
        """The number of positions after which it repeats."""
        return sum(self.counts)


def _counts(weights: Sequence[float]) -> tuple[int, ...]:
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(
            f"weights of a blend are positive numbers, not {list(weights)}",
            hint="leave out sources that are not to be read",
        )
    # 0.1 is no binary number: taken as 1/10, so that the pattern of 0.1 and 0.9 has ten slots.
    exact = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*counts) or 1
    counts = [count // divisor for count in counts]
    if sum(counts) <= LONGEST_PATTERN and all(counts):
        return tuple(counts)
    total = math.fsum(weights)
    ideal = [weight / total * LONGEST_PATTERN for weight in weights]
    if min(ideal) < 0.5:
        raise ConfigError(
            f"the smallest weight of a blend is {min(weights):g} of {total:g}",
            why=f"a blend repeats after at most {LONGEST_PATTERN} samples, so this source would "
            "never be read",
            hint="give it a larger weight, or leave it out",
        )
    return tuple(max(1, round(value)) for value in ideal)


class BlendedStream:
    """The samples of several sources, by weight.

    An epoch ends where every source has been read through at least once.
    """

    def __init__(self, streams: Sequence[SampleStream], weights: Sequence[float]) -> None:
        if len(streams) != len(weights):
            raise ConfigError(
                f"a blend of {len(streams)} sources has {len(weights)} weights",
                hint="give one weight for each source",
            )
        self._pattern = Pattern.of_weights(weights)
        self._streams = tuple(streams)

    @property
    def epoch_size(self) -> int:
        """See :class:`SampleStream`."""
        length, counts = self._pattern.length, self._pattern.counts
        pairs = zip(self._streams, counts, strict=True)
        return max(-(-stream.epoch_size * length // count) for stream, count in pairs)

    def runs(self, start: int, stop: int) -> list[Run]:
        """See :class:`SampleStream`."""
        pattern = self._pattern
        rounds, slots = np.divmod(np.arange(start, stop, dtype=np.int64), pattern.length)
        sources = pattern.sources[slots]
        # How many samples a source has given before: whole rounds, and those of this round.
        turns = rounds * np.asarray(pattern.counts)[sources] + pattern.turns[slots]
        samples = {
            int(source): self._of_source(int(source), turns[sources == source])
            for source in np.unique(sources)
        }
        found: list[Run] = []
        for source in sources.tolist():
            epoch, index = next(samples[source])
            if found and found[-1][:2] == (source, epoch):
                found[-1].indices.append(index)
            else:
                found.append(Run(source, epoch, [index]))
        return found

    def turns_before(self, position: int) -> list[int]:
        """How many samples of each source come before a position."""
        rounds, slot = divmod(position, self._pattern.length)
        begun = np.bincount(self._pattern.sources[:slot], minlength=len(self._streams))
        return [rounds * n + int(m) for n, m in zip(self._pattern.counts, begun, strict=True)]

    def _of_source(self, source: int, turns: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Pairs of epoch and index, for turns that follow each other."""
        for run in self._streams[source].runs(int(turns[0]), int(turns[-1]) + 1):
            for index in run.indices:
                yield run.epoch, index
