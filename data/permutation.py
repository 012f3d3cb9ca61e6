"""Shuffling by computation: where position ``i`` of an epoch goes, without a list of all samples.

A permutation of ``size`` things is a function of a key. Small ones sort hashes of the indices.
Large ones are Feistel networks (Luby and Rackoff, "How to construct pseudorandom permutations from
pseudorandom functions", 1988): the index is two halves, and each round mixes one half into the
other, which can be undone; so the whole is a permutation of the next power of 2. What falls outside
of ``size`` is permuted again until it falls inside ("cycle walking").

An example: ``permute(numpy.arange(4), 4, key("seed", 0))`` is some order of 0, 1, 2, 3, the same on
every machine.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

SORTED_SIZE = 4096
"""Up to this size hashes are sorted: every order can occur, and it takes under a millisecond."""

_ROUNDS = 4
_TABLE_BITS = 13
"""Up to so many bits of a half a round is a table, of 64 KB at most."""
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


def key(*parts: Any) -> int:
    """64 bits that follow from ``parts``: plain numbers and texts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def permute(positions: Indices, size: int, permutation_key: int) -> Indices:
    """Where ``positions``, each from 0 up to ``size``, go."""
    if size <= SORTED_SIZE:
        return _sorted_hashes(size, permutation_key)[positions]
    return _feistel(positions, size, permutation_key)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each value (the finaliser of splitmix64)."""
    first, second = _MULTIPLIERS
    values = values * first
    values = (values ^ (values >> np.uint64(29))) * second
    return values ^ (values >> np.uint64(32))


@functools.lru_cache(maxsize=64)
def _sorted_hashes(size: int, permutation_key: int) -> Indices:
    with np.errstate(over="ignore"):
        hashes = _mixed(_mixed(np.arange(size, dtype=np.uint64) + np.uint64(permutation_key)))
    return np.argsort(hashes, kind="stable")


def _feistel(positions: Indices, size: int, permutation_key: int) -> Indices:
    bits = (size - 1).bit_length()
    low = bits // 2
    # The halves change places, and so sizes, in each round; after an even number they are back.
    rights = [low, bits - low] * (_ROUNDS // 2)
    rounds = [_round(permutation_key, number, bits, right) for number, right in enumerate(rights)]
    moved = positions
    values, outside = moved, None
    while True:
        for right_bits, swapped in zip(rights, rounds, strict=True):
            left = moved >> right_bits
            moved = swapped(moved & ((1 << right_bits) - 1))
            moved ^= left
        if outside is None:
            values = moved
        else:
            values[outside] = moved
        walks = np.flatnonzero(moved >= size)
        outside = walks if outside is None else outside[walks]
        if not len(outside):
            return values
        moved = moved[walks]


@functools.lru_cache(maxsize=32)
def _round(
    permutation_key: int, number: int, bits: int, right_bits: int
) -> Callable[[Indices], Indices]:
    """A round as a function of the right half: that half moved to the left, and beside it what is
    mixed into the other. It is looked up in a table of all right halves where that is short: the
    first blocks save what it costs.
    """
    round_key = np.uint64(key(permutation_key, number))
    left_bits = bits - right_bits

    def swapped(right: Indices) -> Indices:
        with np.errstate(over="ignore"):
            mixed = _mixed(right.astype(np.uint64) + round_key) >> np.uint64(64 - left_bits)
        return (right << left_bits) | mixed.astype(np.int64)

    if right_bits > _TABLE_BITS:
        return swapped
    table: Indices = swapped(np.arange(1 << right_bits))
    return table.take


@dataclass(frozen=True)
class Order:
    """The order in which the samples of one source are seen, epoch by epoch.

    ``size``: how many samples there are. ``shuffle``: in another order in each epoch, that follows
    from ``seed``. ``block``: blocks of that many neighbouring samples are shuffled, and the samples
    within a block, so that a source which is slow at random access is read a block at a time.
    """

    size: int
    seed: int
    shuffle: bool = False
    block: int | None = None

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The samples at positions ``start`` to ``stop`` of an epoch."""
        positions = np.arange(start, stop, dtype=np.int64)
        if not self.shuffle:
            return positions
        if self.block is None or self.block >= self.size:
            return permute(positions, self.size, key(self.seed, epoch))
        return self._in_blocks(epoch, positions, self.block)

    def _in_blocks(self, epoch: int, positions: Indices, block: int) -> Indices:
        """Blocks in a permuted order. The last block of the source may be short; ``early`` is the
        number of blocks before it, so that positions behind it can be counted.
        """
        num_blocks, rest = -(-self.size // block), self.size % block
        order = functools.partial(permute, size=num_blocks, permutation_key=key(self.seed, epoch))
        places = positions // block
        if rest:
            # For example 10 samples in blocks of 4: the block of two may come first, second or
            # last, and everything behind it begins two places earlier.
            early = _place_of(num_blocks - 1, num_blocks, key(self.seed, epoch))
            behind = positions >= early * block + rest
            places = np.where(behind, (positions - rest) // block + 1, places)
            starts = np.where(behind, (places - 1) * block + rest, places * block)
        else:
            starts = places * block
        blocks = order(places)
        result = np.empty_like(positions)
        for number in dict.fromkeys(blocks.tolist()):
            inside = blocks == number
            size = rest if rest and number == num_blocks - 1 else block
            within = permute(
                positions[inside] - starts[inside], size, key(self.seed, epoch, number)
            )
            result[inside] = number * block + within
        return result


@functools.lru_cache(maxsize=16)
def _place_of(index: int, size: int, permutation_key: int) -> int:
    """The position that goes to ``index``: looked for among all, which are blocks, not samples."""
    every = permute(np.arange(size, dtype=np.int64), size, permutation_key)
    return int(np.flatnonzero(every == index)[0])
