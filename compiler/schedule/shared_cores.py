"""Ranks that share the cores of a machine: each is the faster the fewer of them compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharing:
    """``num_cores`` of one machine run its ``num_ranks`` ranks. Times are those of a rank while all
    of them compute.

    While no more than ``num_cores`` ranks compute, each has a core for itself, and a rank that
    waits leaves its own to others.
    """

    num_ranks: int
    num_cores: int

    def speed(self, computing: int) -> float:
        """How much faster than with all ranks at work each of ``computing`` ranks is."""
        return self.num_ranks / max(self.num_cores, min(computing, self.num_ranks))


@dataclass(frozen=True, slots=True)
class SharedMachines:
    """The machines under a pipeline. ``beside[p][q]``: ranks of position ``q`` on the machine of
    position ``p``.
    """

    sharing: Sharing
    beside: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls, sharing: Sharing, positions: Sequence[Sequence[int]], unit_size: int, num_units: int
    ) -> SharedMachines:
        """``positions``: the ranks of each in the first unit, which stand for those of all
        units.
        """
        size = sharing.num_ranks
        machines = [
            [(unit * unit_size + rank) // size for unit in range(num_units) for rank in ranks]
            for ranks in positions
        ]
        return cls(sharing, [[found.count(own[0]) for found in machines] for own in machines])

    def speeds(self, computing: Sequence[int]) -> list[float]:
        """Of the positions that compute, one for each."""
        return [self.sharing.speed(sum(self.beside[p][q] for q in computing)) for p in computing]
