"""The places where a layout is cut, in canonical form.

A cut atom is known by its place in its dim: the product of the sizes outside it, its segments, and
the product of the sizes inside it. An evenly cut atom becomes exactly its pieces, so ``12/tp * 64``
and ``768/tp`` are the same layout if tp divides 12.

Example, on ``tp=4``: both are the place ``outer=1, segments=(4,)``, which says that the dim is
``4/tp * 192``. On ``tp=8`` they differ: 12 over 8 ranks is uneven, so that atom stays 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.ir.size import Size, divides, product
from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Layout, Mesh

PlaceKey = tuple[int, Size, tuple[Size, ...], tuple[int, ...]]
"""A place, whichever axes cut it: dim, size outside, segments, element."""


@dataclass(frozen=True, slots=True)
class Place:
    """A cut atom of one dim. ``outer``: the product of the sizes of the atoms outside it."""

    dim: int
    outer: Size
    segments: tuple[Size, ...]
    element: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def size(self) -> Size:
        """The sum of the segments."""
        return sum(self.segments) if len(self.segments) > 1 else self.segments[0]

    @property
    def key(self) -> PlaceKey:
        """The place without its axes: equal for two cuts of one place."""
        return self.dim, self.outer, self.segments, self.element


def cut_places(layout: Layout, mesh: Mesh) -> list[Place]:
    """The cut atoms of all dims in canonical form."""
    places = []
    for dim, atoms in enumerate(layout.dims):
        outer: Size = 1
        for atom in atoms:
            axes = tuple(axis for axis in atom.axes if mesh.axis_size(axis) > 1)
            if axes:
                places += _even_pieces(dim, outer, atom, axes, mesh)
            # What stands in front of an atom in its dim: ``[3 * 4/tp]`` cuts 3 times 4 elements.
            outer = product((outer, atom.size))
    return _single_elements(places, mesh)


def _single_elements(places: list[Place], mesh: Mesh) -> list[Place]:
    """Merge the axes that cut one single element into one place. Their order means nothing, as only
    the rank at index 0 of each of them holds the element.
    """
    merged: dict[PlaceKey, Place] = {}
    for place in places:
        earlier = merged.get(place.key)
        axes = (*earlier.axes, *place.axes) if earlier is not None else place.axes
        if place.segments == (1,) and not place.element:
            axes = tuple(axis for axis in mesh.names if axis in axes)
        merged[place.key] = replace(place, axes=axes)
    return list(merged.values())


def _even_pieces(
    dim: int, outer: Size, atom: Atom, axes: tuple[str, ...], mesh: Mesh
) -> list[Place]:
    """The places of one cut atom. A single segment that divides evenly is the product of its
    pieces, with one place for each axis.
    """
    places = []
    size = atom.size
    # Whether a symbolic size divides is not known before a call. Segments are cut each for itself,
    # so that their sum says nothing.
    if len(atom.segments) == 1 and isinstance(size, int):
        # (Dealt in zigzag, 12 rows of 64 are other pieces than 768.)
        while axes and not mesh.turns_of(axes[0]) and size % mesh.axis_size(axes[0]) == 0:
            places.append(Place(dim, outer, (mesh.axis_size(axes[0]),), (), axes[:1]))
            outer, size = product((outer, mesh.axis_size(axes[0]))), size // mesh.axis_size(axes[0])
            axes = axes[1:]
        return [*places, Place(dim, outer, (size,), atom.element, axes)] if axes else places
    return [Place(dim, outer, atom.segments, (), axes)]


def in_order(places: Iterable[Place]) -> tuple[Place, ...]:
    """The places by dim, outermost first. Sizes may be symbolic and cannot be compared, so
    divisibility says which place is outside of which.
    """
    by_dim: dict[int, list[Place]] = {}
    for place in places:
        by_dim.setdefault(place.dim, []).append(place)
    found: list[Place] = []
    for dim in sorted(by_dim):
        left = by_dim[dim]
        while len(left) > 1:
            # The outermost place is the one whose end all others are inside of: it divides where
            # they begin.
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
        # The two atoms would overlap, as 2 x 6 and 4 x 3 of 12 do: there is no product that has
        # both.
        if not inside and not outside:
            return False
    return True
