"""Where a layout is cut, in canonical form.

In it a cut atom is known by where it stands in its dim: the product of what is outside it, its
segments, and the product of what is inside it. An evenly cut atom becomes exactly its pieces, so
that ``12/tp * 64`` and ``768/tp`` are the same layout when tp divides 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.ir.size import Size, divides, product
from shardwright.runtime.layout import Atom, Layout, Mesh

PlaceKey = tuple[int, Size, tuple[Size, ...]]
"""A place whatever cuts it: dim, what is outside, segments."""


@dataclass(frozen=True, slots=True)
class Place:
    """A cut atom of one dim: its size stands between ``outer`` and the rest."""

    dim: int
    outer: Size
    segments: tuple[Size, ...]
    axes: tuple[str, ...]

    @property
    def size(self) -> Size:
        """The sum of the segments."""
        return sum(self.segments) if len(self.segments) > 1 else self.segments[0]

    @property
    def key(self) -> PlaceKey:
        """What makes two cuts the same place, whichever axes make them."""
        return self.dim, self.outer, self.segments


def cut_places(layout: Layout, mesh: Mesh) -> list[Place]:
    """The cut atoms of all dims in canonical form."""
    places = []
    for dim, atoms in enumerate(layout.dims):
        outer: Size = 1
        for atom in atoms:
            axes = tuple(axis for axis in atom.axes if mesh.axis_size(axis) > 1)
            if axes:
                places += _even_pieces(dim, outer, atom, axes, mesh)
            outer = product((outer, atom.size))
    return _single_elements(places, mesh)


def _single_elements(places: list[Place], mesh: Mesh) -> list[Place]:
    """One place for all axes that cut the same single element: in whatever order, only index 0 of
    each holds it.
    """
    merged: dict[PlaceKey, Place] = {}
    for place in places:
        earlier = merged.get(place.key)
        axes = (*earlier.axes, *place.axes) if earlier is not None else place.axes
        if place.segments == (1,):
            axes = tuple(axis for axis in mesh.names if axis in axes)
        merged[place.key] = replace(place, axes=axes)
    return list(merged.values())


def _even_pieces(
    dim: int, outer: Size, atom: Atom, axes: tuple[str, ...], mesh: Mesh
) -> list[Place]:
    """A single segment that divides evenly is the product of its pieces, one atom for each axis."""
    places = []
    size = atom.size
    if len(atom.segments) == 1 and isinstance(size, int):
        while axes and size % mesh.axis_size(axes[0]) == 0:
            places.append(Place(dim, outer, (mesh.axis_size(axes[0]),), axes[:1]))
            outer, size = product((outer, mesh.axis_size(axes[0]))), size // mesh.axis_size(axes[0])
            axes = axes[1:]
        return [*places, Place(dim, outer, (size,), axes)] if axes else places
    return [Place(dim, outer, atom.segments, axes)]


def in_order(places: Iterable[Place]) -> tuple[Place, ...]:
    """By dim, and outermost first; sizes may be symbolic, so that divisibility says what is
    outside.
    """
    by_dim: dict[int, list[Place]] = {}
    for place in places:
        by_dim.setdefault(place.dim, []).append(place)
    found: list[Place] = []
    for dim in sorted(by_dim):
        left = by_dim[dim]
        while len(left) > 1:
            first = next(
                p
                for p in left
                if all(p is q or divides(product((p.outer, p.size)), q.outer) for q in left)
            )
            left.remove(first)
            found.append(first)
        found += left
    return tuple(found)


def fits(place: Place, now: Sequence[Place]) -> bool:
    """Whether the atom can be cut beside the atoms that are cut now."""
    for other in now:
        if other.dim != place.dim or other.key == place.key:
            continue
        inside = divides(product((place.outer, place.size)), other.outer)
        outside = divides(product((other.outer, other.size)), place.outer)
        if not inside and not outside:
            return False
    return True
