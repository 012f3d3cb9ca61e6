"""Groups of the ranks that hold copies of a parameter. Each group splits the optimizer state among
its ranks.

Example: 8 ranks hold copies, and ``zero_ngroups`` is 2. The groups are 0-3 and 4-7, and each rank
has a quarter of the state. Rank 1 and rank 5 have the same quarter: these are the ranks across.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.world import World


@dataclass(frozen=True, slots=True)
class ZeroGroup:
    """One rank's place among the ranks ``everyone`` that hold copies of some parameters.

    ``inside``: its group, whose ranks split the state. ``across``: the ranks, one of each group,
    that hold the same part of the state.
    """

    everyone: Communicator
    inside: Communicator
    across: Communicator


def deal(
    world: World, communicators: Iterable[Communicator], num_groups: int
) -> dict[tuple[int, ...], ZeroGroup]:
    """The groups within each of this rank's ``communicators``, by its ranks. Collective over the
    world.

    Consecutive ranks form a group. Units are outermost in the order of ranks, so a group consists
    of whole units.
    """
    mine = {communicator.ranks: communicator for communicator in communicators}
    if num_groups == 1:
        return {ranks: ZeroGroup(c, c, _alone(c)) for ranks, c in mine.items()}
    # Ranks of a pipeline hold different parameters, but all of them make all groups, in one order.
    listed = {
        tuple(ranks) for of_rank in world.all_gather_object(sorted(mine)) for ranks in of_rank
    }
    dealt = {}
    for ranks in sorted(listed):
        # 8 ranks in 2 groups: ``inside`` has 0 to 3 and 4 to 7, ``across`` has 0 and 4, 1 and 5,
        # ...
        size = len(ranks) // num_groups
        name = mine[ranks].name if ranks in mine else ""
        inside = world.partition(
            [ranks[start : start + size] for start in range(0, len(ranks), size)], name
        )
        across = world.partition([ranks[index::size] for index in range(size)], name)
        if ranks in mine:
            dealt[ranks] = ZeroGroup(mine[ranks], inside, across)
    return dealt


def undivided(communicators: Iterable[Communicator]) -> dict[tuple[int, ...], ZeroGroup]:
    """The groups where nothing is split: each rank is a group by itself."""
    return {
        communicator.ranks: ZeroGroup(communicator, _alone(communicator), communicator)
        for communicator in communicators
    }


def _alone(communicator: Communicator) -> Communicator:
    """A communicator of this rank alone, which sends nothing."""
    rank = communicator.ranks[communicator.index]
    return Communicator(None, (rank,), 0, communicator.name, communicator.counters)
