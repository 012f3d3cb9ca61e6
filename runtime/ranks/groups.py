"""Groups by role: the mesh of one unit laid over the ranks of the world.

A **unit** is some consecutive ranks that run one program; the world holds one or several units,
which run copies of it on their own data. Rank ``r`` of unit ``u`` is rank ``u * unit_size + r`` of
the world. The mesh covers all ranks of the unit, in order; in a pipeline each stage has a mesh of
its own, which covers the ranks of the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.mesh import Coords
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.runs import PlaceOnAxis

UNITS = "units"
"""The name under which communication between units is counted."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisGroup(PlaceOnAxis):
    """The ranks that differ from this one along one mesh axis only, or along several, and this
    rank's index among them. ``turns``: in how many turns of zigzag the axis deals. ``worked_out``:
    what operators have worked out once for all steps, by what it follows from.
    """

    name: str
    communicator: Communicator
    turns: int = 0
    worked_out: dict[Any, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return self.communicator.size

    @property
    def index(self) -> int:
        """Which of them this rank is."""
        return self.communicator.index

    def __repr__(self) -> str:
        return f"{self.name}={self.index}/{self.size}"


class RankMesh:
    """The groups of one rank of a mesh. Making it is collective: all ranks of the world, in the
    same order.

    The mesh is that of a whole unit, or of a stage that lies on some of its ranks. ``ranks``: those
    unit ranks, in the order of the mesh. ``coords``: this rank's index along each axis. ``rank``:
    its number within the unit. ``unit``, ``num_units``: which unit it belongs to, of how many.
    ``units``: the ranks with the same coordinates in all units, as an :class:`AxisGroup`. On a rank
    outside the stage ``coords`` is empty, and every group is that rank alone.

    Raises :class:`DistributedError` if the ranks of the world do not divide into units.
    """

    def __init__(
        self,
        mesh: Mesh,
        world: World | None = None,
        ranks: Sequence[int] | None = None,
        unit_size: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.world = world if world is not None else current_world()
        self.unit_size = mesh.size if unit_size is None else unit_size
        self.ranks = tuple(range(self.unit_size)) if ranks is None else tuple(ranks)
        assert len(self.ranks) == mesh.size, f"a mesh {mesh} on {len(self.ranks)} ranks"
        if self.world.size % self.unit_size:
            raise DistributedError(
                f"{self.world.size} ranks cannot run a plan for {self.unit_size}",
                why=f"the mesh is {mesh}, and every unit of the plan needs all of it"
                if ranks is None
                else f"every unit of the plan needs {self.unit_size} ranks",
                hint=f"start a multiple of {self.unit_size} ranks, e.g. torchrun "
                f"--nproc_per_node={self.unit_size}",
            )
        self.num_units = self.world.size // self.unit_size
        # Units are outermost: ranks 0 to 3 are unit 0, ranks 4 to 7 unit 1.
        self.unit, self.rank = divmod(self.world.rank, self.unit_size)
        self.is_member = self.rank in self.ranks
        self.coords = mesh.coords(self.ranks.index(self.rank)) if self.is_member else {}
        self._groups: dict[tuple[tuple[str, ...], bool], Communicator] = {}
        self._axes = {
            name: AxisGroup(name, self.group(name), mesh.turns_of(name)) for name in mesh.names
        }
        self.units = AxisGroup(UNITS, self.group((), across_units=True))

    def __deepcopy__(self, memo: object) -> RankMesh:
        """Itself: groups are made by all ranks together, and a copy of a module uses the same."""
        return self

    def axis(self, *names: str) -> AxisGroup:
        """The group along one axis, or along several that were joined before; axes of size 1 have
        one too.
        """
        return self._axes["+".join(names)]

    def join(self, names: Sequence[str]) -> None:
        """Make the group along several axes, for :meth:`axis`. Collective, like :meth:`group`."""
        label = "+".join(names)
        self._axes.setdefault(label, AxisGroup(label, self.group(names)))

    def group(self, axes: Iterable[str] | str, *, across_units: bool = False) -> Communicator:
        """The ranks that differ along ``axes`` only (and by unit, with ``across_units``).

        Collective at the first call with these axes: all ranks of the world, in the same order.
        """
        # In the order of the mesh, whatever the order asked for.
        wanted = {axes} if isinstance(axes, str) else set(axes)
        names = tuple(name for name in self.mesh.names if name in wanted)
        assert len(names) == len(wanted), (
            f"{sorted(wanted)} are not all axes of the mesh {self.mesh}"
        )
        key = (names, across_units)
        if key not in self._groups:
            starts = [unit * self.unit_size for unit in range(self.num_units)]
            # The groups within a unit, as unit ranks, then those of all units.
            inside = [
                tuple(self.ranks[index] for index in group) for group in self.mesh.groups(names)
            ]
            if across_units:
                groups = [
                    tuple(start + rank for start in starts for rank in ranks) for ranks in inside
                ]
            else:
                groups = [
                    tuple(start + rank for rank in ranks) for start in starts for ranks in inside
                ]
            label = "+".join([*names, *([UNITS] if across_units else [])])
            self._groups[key] = self.world.partition(groups, label)
        return self._groups[key]

    def over_units(self, num_units: int) -> RankMesh:
        """The mesh of these ranks in ``num_units`` neighbouring units together, with the axis
        ``zero`` over the units. Collective.

        What is stored in pieces over units refers to this mesh; its ``units`` are the groups of
        units that hold copies.
        """
        if num_units == 1:
            return self
        ranks = [unit * self.unit_size + rank for unit in range(num_units) for rank in self.ranks]
        return RankMesh(
            self.mesh.over_units(num_units), self.world, ranks, num_units * self.unit_size
        )

    def alike(self, coords: Coords, axes: Iterable[str] = ()) -> tuple[int, ...]:
        """The unit ranks at ``coords``, and those that differ from it along ``axes`` only."""
        index, chosen = self.mesh.rank(coords), tuple(axes)
        group = next(group for group in self.mesh.groups(chosen) if index in group)
        return tuple(self.ranks[member] for member in group)

    def world_ranks(self, unit_ranks: Iterable[int]) -> tuple[int, ...]:
        """These unit ranks in all units, as ranks of the world, ascending."""
        ranks = sorted(set(unit_ranks))
        return tuple(
            unit * self.unit_size + rank for unit in range(self.num_units) for rank in ranks
        )

    def __repr__(self) -> str:
        coords = ", ".join(f"{name}={index}" for name, index in self.coords.items())
        return f"RankMesh({self.mesh}; {coords}; unit {self.unit} of {self.num_units})"
