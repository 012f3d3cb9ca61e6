"""Meshes: named axes with sizes, along which the ranks lie.

Axes are written major to minor; the last one varies fastest with the rank. On ``dp=2 x tp=4`` rank
6 has the coordinates ``dp=1, tp=2``. An axis gives each rank one run of what it cuts, or deals it
in turns of **zigzag**, two runs to each in every turn (:mod:`~shardwright.runtime.runs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.runtime.arguments import checked, checked_fields_late, checked_late
from shardwright.runtime.errors import ConfigError, brief, did_you_mean
from shardwright.runtime.hashed_once import HashedOnce, hashed_once

Coords = Mapping[str, int]
"""A rank's index along each mesh axis."""

ZERO = "zero"
"""The axis that runs over units, outside of any mesh: ZeRO-3 stores parameters in pieces along
it.
"""


MOST_RANKS = 2**20
"""The most ranks of a mesh, a job or a machine: a slip of the keyboard must not fill the memory."""


@checked_fields_late
@hashed_once
@dataclass(frozen=True, slots=True)
class Mesh(HashedOnce):
    """Named axes with sizes, major to minor. ``Mesh((("dp", 2), ("tp", 4)))`` has 8 ranks; tp
    varies fastest. ``turns``: the axes that deal what they cut in zigzag, and in how many turns.
    """

    axes: tuple[tuple[str, int], ...] = ()
    turns: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        # Meshes come from plan files and generated files, which people edit: a wrong one is told in
        # words here, and not by a TypeError far away.
        for axis in self.axes if isinstance(self.axes, tuple) else (None,):
            if (
                not isinstance(axis, tuple)
                or len(axis) != 2
                or type(axis[0]) is not str
                or not _is_count(axis[1])
            ):
                raise ConfigError(
                    "a mesh is made of axes with names and sizes",
                    why=f"{'its axes are' if axis is None else 'one axis is'} "
                    f"{brief(self.axes if axis is None else axis)}; "
                    f"a size is a whole number from 1 to {MOST_RANKS:,}",
                    hint='write Mesh((("dp", 2), ("tp", 4))), or Mesh.of({"dp": 2, "tp": 4})',
                )
        if self.size > MOST_RANKS:
            raise ConfigError(
                f"a mesh of {brief(self.size)} ranks", why=f"it has at most {MOST_RANKS:,}"
            )
        for entry in self.turns if isinstance(self.turns, tuple) else (None,):
            if not isinstance(entry, tuple) or len(entry) != 2 or not _is_count(entry[1]):
                raise ConfigError(
                    "the turns of a mesh are axes with numbers of turns",
                    why=f"{'they are' if entry is None else 'one is'} "
                    f"{brief(self.turns if entry is None else entry)}; a number of turns is a "
                    f"whole number from 1 to {MOST_RANKS:,}",
                    hint='write Mesh((("cp", 4),), turns=(("cp", 1),))',
                )
            if entry[0] not in self.names:
                raise ConfigError(
                    f"the mesh has no axis {brief(entry[0])} to deal in zigzag",
                    why=f"its axes are {', '.join(map(repr, self.names))}",
                    hint=did_you_mean(str(entry[0]), self.names),
                )

    @classmethod
    @checked
    def of(cls, axes: Mapping[str, int] | Mesh) -> Mesh:
        """The mesh itself, or that of a mapping from axis to size, major to minor."""
        return axes if isinstance(axes, Mesh) else cls(tuple(axes.items()))

    def to_json(self) -> list[list[Any]]:
        """JSON values; :meth:`from_json` is the inverse."""
        return [
            [name, size, self.turns_of(name)] if self.turns_of(name) else [name, size]
            for name, size in self.axes
        ]

    @classmethod
    def from_json(cls, data: Iterable[Sequence[Any]]) -> Mesh:
        """The reverse of :meth:`to_json`."""
        items = [tuple(item) for item in data]
        return cls(
            tuple((str(item[0]), int(item[1])) for item in items),
            tuple((str(item[0]), int(item[2])) for item in items if item[2:]),
        )

    def of_axes(self, axes: Iterable[tuple[str, int]]) -> Mesh:
        """The mesh of other axes, or of the same with other sizes, that deal as those of their
        names do here.
        """
        axes = tuple(axes)
        names = [name for name, _ in axes]
        return Mesh(axes, tuple(entry for entry in self.turns if entry[0] in names))

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, major to minor."""
        return tuple([name for name, _ in self.axes])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    @checked_late
    def axis_size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        for name, size in self.axes:
            if name == axis:
                return size
        raise ConfigError(
            f"the mesh has no axis {axis!r}",
            why=f"mesh {self}",
            hint=did_you_mean(axis, self.names),
        )

    def turns_of(self, axis: str) -> int:
        """The turns of zigzag in which an axis deals what it cuts; 0: one run to each rank."""
        return dict(self.turns).get(axis, 0)

    @checked_late
    def num_ranks(self, axes: Iterable[str]) -> int:
        """How many ranks differ along ``axes`` only."""
        return math.prod(map(self.axis_size, axes))

    @checked_late
    def coords(self, rank: int) -> dict[str, int]:
        """The coordinates of ``rank``, in the order of the axes."""
        coords = {}
        for name, size in reversed(self.axes):
            rank, coords[name] = divmod(rank, size)
        return {name: coords[name] for name in self.names}

    @checked_late
    def rank(self, coords: Coords) -> int:
        """The rank at coordinates, the reverse of :meth:`coords`."""
        rank = 0
        for name, size in self.axes:
            if name not in coords:
                raise ConfigError(f"coordinates without the axis {name!r}", why=f"mesh {self}")
            rank = rank * size + coords[name]
        return rank

    def all_coords(self) -> Iterator[dict[str, int]]:
        """The coordinates of every rank, in the order of the ranks."""
        return (self.coords(rank) for rank in range(self.size))

    def over_units(self, num_units: int) -> Mesh:
        """The mesh of ``num_units`` units together: with the axis ``zero``, outermost, if they are
        several.
        """
        return self.of_axes(((ZERO, num_units), *self.axes)) if num_units > 1 else self

    @checked_late
    def groups(self, axes: tuple[str, ...] | str) -> list[tuple[int, ...]]:
        """The rank groups that differ only along ``axes``, each in ascending order, in one order on
        all ranks.
        """
        axes = (axes,) if isinstance(axes, str) else axes
        # How far ranks are apart that differ in one coordinate, from minor to major.
        first, offsets, apart = [0], [0], 1
        for name, size in reversed(self.axes):
            steps = range(0, size * apart, apart)
            if name in axes:
                offsets = [step + offset for step in steps for offset in offsets]
            else:
                first = [step + rank for step in steps for rank in first]
            apart *= size
        return [tuple([rank + offset for offset in offsets]) for rank in first]

    def __str__(self) -> str:
        axes = (f"{name}={size}{in_turns(self.turns_of(name))}" for name, size in self.axes)
        return " x ".join(axes) or "one rank"


def in_turns(turns: int) -> str:
    """How an axis deals, behind its name: nothing, `` zigzag`` or `` zigzag in 4 turns``."""
    if turns < 2:
        return " zigzag" * turns
    return f" zigzag in {turns} turns"


def _is_count(size: Any) -> bool:
    return type(size) is int and 1 <= size <= MOST_RANKS
