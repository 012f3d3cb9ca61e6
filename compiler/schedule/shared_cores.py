"""Ranks that share the cores of a machine: the fewer of them compute, the faster each is.

Example: 4 ranks on 2 cores. While all compute, each has half a core. While 3 compute each is 4/3 as
fast, and while 2 or fewer do, twice as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharing:
    """A machine whose ``num_cores`` cores run ``num_ranks`` ranks. All times are those of a rank
    while all ranks compute.

    While no more than ``num_cores`` ranks compute, each has a core for itself. A rank that waits
    leaves its core to others.
    """

    num_ranks: int
    num_cores: int

    def speed(self, computing: int) -> float:
        """The speed of each of ``computing`` ranks, where 1 is the speed with all ranks at work."""
        return self.num_ranks / max(self.num_cores, min(computing, self.num_ranks))


@dataclass(frozen=True, slots=True)
class SharedMachines:
    """The machines under a pipeline. ``beside[p][q]``: the number of ranks of position ``q`` on the
    machine of position ``p``.
    """

    sharing: Sharing
    beside: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls, sharing: Sharing, positions: Sequence[Sequence[int]], unit_size: int, num_units: int
    ) -> SharedMachines:
        """The machines under ``positions``, given as the ranks of each in the first unit. They
        stand for the ranks of all units.
        """
        size = sharing.num_ranks
        machines = [
            [(unit * unit_size + rank) // size for unit in range(num_units) for rank in ranks]
            for ranks in positions
        ]
        return cls(sharing, [[found.count(own[0]) for found in machines] for own in machines])

    def speeds(self, computing: Sequence[int]) -> list[float]:
        """The speed of each position that computes, in the order of ``computing``."""
        return [self.sharing.speed(sum(self.beside[p][q] for q in computing)) for p in computing]
