"""The meshes that a search tries: how many ranks, as which axes, and where they lie on the machine.

Example: eight ranks are the meshes ``x=8``, ``x=2 x y=4`` and ``x=4 x y=2``. In two pipeline
positions each of them has one of the meshes of four ranks, and the pipeline axis stands before the
first axis, between the two, or behind the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.policies.autodist.stages.boundaries import tier_groups
from shardwright.runtime.layout import Mesh

AXIS_NAMES = ("x", "y", "z")
"""What the axes are called until it is known what they split."""


def meshes(size: int, max_axes: int = 2) -> list[Mesh]:
    """Every way to write ``size`` ranks as at most ``max_axes`` axes of two and more, major to
    minor, fewest axes first.
    """
    found = [sizes for count in range(1, max_axes + 1) for sizes in _factorizations(size, count)]
    return [Mesh(tuple(zip(AXIS_NAMES, sizes, strict=False))) for sizes in found or [()]]


def _factorizations(size: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered products of ``count`` factors above 1."""
    if count == 1:
        if size > 1:
            yield (size,)
        return
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in _factorizations(size // first, count - 1))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def stage_sizes(num_ranks: int) -> list[int]:
    """The numbers of ranks of a stage that need not be like the others: any number, if there are up
    to 7 ranks and that is no power of two; else divisors and powers of two, from a sixteenth of the
    ranks.
    """
    if num_ranks <= 7 and num_ranks & (num_ranks - 1):
        return list(range(1, num_ranks))
    return [
        n
        for n in range(1, num_ranks)
        if 16 * n >= num_ranks and (num_ranks % n == 0 or n & (n - 1) == 0)
    ]


def with_pp(inner: Mesh, num_positions: int, place: int = 0) -> Mesh:
    """The mesh with a ``pp`` axis before its axis number ``place``."""
    return inner.of_axes((*inner.axes[:place], ("pp", num_positions), *inner.axes[place:]))


def position_ranks(inner: Mesh, num_positions: int, place: int = 0) -> list[tuple[int, ...]]:
    """The ranks of every pipeline position, in the order of its mesh ``inner``."""
    grid = np.arange(num_positions * inner.size).reshape(
        [size for _, size in with_pp(inner, num_positions, place).axes]
    )
    return [tuple(row) for row in np.moveaxis(grid, place, 0).reshape(num_positions, -1).tolist()]


def inner_places(hardware: Hardware, inner: Mesh, num_positions: int) -> list[int]:
    """Where the pipeline axis may stand among those of a mesh, but for the outermost place: one for
    every way in which the ranks of all positions can lie on the tiers.
    """
    found: dict[bytes, int] = {}
    for place in range(len(inner.axes) + 1 if num_positions > 1 else 1):
        ranks = itertools.chain.from_iterable(position_ranks(inner, num_positions, place))
        found.setdefault(tier_groups(hardware, tuple(ranks)), place)
    return [place for place in found.values() if place]
