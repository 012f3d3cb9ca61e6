"""What a device reaches by size: the fraction of its peak in a matrix product, and the bandwidth of
its memory.

Tables hold measured points. Between points the logarithm of the value is linear in the logarithms
of the sizes. Outside the grid the nearest point counts, and ``covers`` is false there, as such an
estimate is no measurement.

Example: 0.2 of the peak at k = 64 and 0.8 at k = 1024. Halfway in logarithms, at k = 256, the table
gives sqrt(0.2 * 0.8) = 0.4.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EfficiencyTable:
    """Fractions of the peak at every ``(m, n, k)`` of a grid.

    ``m``, ``n`` and ``k`` are ascending sizes, ``fractions`` holds one positive number per point,
    ``k`` fastest, then ``n``. A fraction may exceed 1 where the peak it refers to was measured at
    another size.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    fractions: tuple[float, ...]

    def covers(self, m: float, n: float, k: float) -> bool:
        """Whether the grid surrounds the product ``[m, k] x [k, n]``."""
        return all(
            grid[0] <= size <= grid[-1] for grid, size in zip(self._grids, (m, n, k), strict=True)
        )

    def at(self, m: float, n: float, k: float) -> float:
        """The fraction at ``[m, k] x [k, n]``; outside the grid that of the nearest point of its
        surface.
        """
        corners = [
            _neighbours(grid, size) for grid, size in zip(self._grids, (m, n, k), strict=True)
        ]
        # Trilinear: each corner of the cell counts with the product of its weights.
        logarithm = 0.0
        for (i, weight_m), (j, weight_n), (l, weight_k) in itertools.product(*corners):
            weight = weight_m * weight_n * weight_k
            logarithm += weight * math.log(self.fractions[(i * len(self.n) + j) * len(self.k) + l])
        return math.exp(logarithm)

    @property
    def _grids(self) -> tuple[tuple[int, ...], ...]:
        return self.m, self.n, self.k


@dataclass(frozen=True)
class BandwidthTable:
    """Bytes per second of operators that read and write ``num_bytes`` in all, which ascend."""

    num_bytes: tuple[int, ...]
    bytes_per_s: tuple[float, ...]

    def covers(self, num_bytes: float) -> bool:
        """Whether the measured sizes surround this one."""
        return self.num_bytes[0] <= num_bytes <= self.num_bytes[-1]

    def at(self, num_bytes: float) -> float:
        """The bandwidth at this size; outside the measured sizes, that of the nearest one."""
        return math.exp(
            sum(
                weight * math.log(self.bytes_per_s[i])
                for i, weight in _neighbours(self.num_bytes, num_bytes)
            )
        )


def _neighbours(grid: tuple[int, ...], size: float) -> tuple[tuple[int, float], ...]:
    """The points of ``grid`` around ``size``, each with its weight in log space."""
    above = bisect.bisect_right(grid, size)
    if above == 0 or above == len(grid):
        return ((max(above - 1, 0), 1.0),)
    low, high = math.log(grid[above - 1]), math.log(grid[above])
    weight = (math.log(size) - low) / (high - low)
    return (above - 1, 1 - weight), (above, weight)
