"""Atoms: the factors of a tensor dim, and the mesh axes that cut each.

A dim is a product of atoms, outermost first. A hidden size of 768 as 12 heads of 64, the heads cut
over tp, is ``[Atom((12,), ("tp",)), Atom((64,))]``; in the text of a layout ``12/tp * 64``. An axis
cuts each segment of an atom by itself: of Phi-3's 32 + 8 + 8 heads, ``32+8+8/tp * 96``, every rank
has its share of queries, of keys and of values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardwright.runtime.mesh import Coords, Mesh
from shardwright.runtime.runs import Run, dealt, within

Size = Any
"""An ``int``, or while compiling a sympy expression over the names of dynamic input dims."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One factor of a dim: segments laid end to end, each cut by ``axes`` (major to minor).

    ``element``: of an atom of size 1, ``(index, count)`` if it is one of ``count`` things that the
    axes cut together; the rank that has this one holds it. Without it the first rank would.
    """

    segments: tuple[Size, ...]
    axes: tuple[str, ...] = ()
    element: tuple[int, ...] = ()

    @property
    def size(self) -> Size:
        """The sum of the segments."""
        return sum(self.segments) if len(self.segments) != 1 else self.segments[0]

    def pieces(self, mesh: Mesh, coords: Coords) -> tuple[Run, ...]:
        """The runs within the atom that its segments leave at ``coords``."""
        if self.element:
            index, count = self.element
            held = self._left(0, count, mesh, coords)
            return ((0, int(any(start <= index < start + size for start, size in held))),)
        result: list[Run] = []
        offset = 0
        for segment in self.segments:
            result += self._left(offset, segment, mesh, coords)
            offset += segment
        return tuple(result)

    def _left(self, start: int, count: int, mesh: Mesh, coords: Coords) -> tuple[Run, ...]:
        """What the axes leave of ``count`` things from ``start`` on."""
        runs: tuple[Run, ...] = ((start, count),)
        for axis in self.axes:
            turns = mesh.turns_of(axis)
            own = dealt(count, mesh.axis_size(axis), coords[axis], turns=turns)
            runs, count = within(runs, own), sum(size for _, size in own)
        return runs

    def local_size(self, mesh: Mesh, coords: Coords) -> int:
        """The size of the piece at ``coords``; needs numbers where axes cut the atom."""
        if not self.axes:
            return self.size  # type: ignore[no-any-return]
        return sum(size for _, size in self.pieces(mesh, coords))

    def __str__(self) -> str:
        if not self.axes:
            return "+".join(map(str, self.segments))
        size = " of ".join(map(str, self.element)) or "+".join(map(str, self.segments))
        return "/".join([size, *self.axes])


Dim = tuple[Atom, ...]


def merge_atoms(dim: Dim) -> Dim:
    """A dim in its shortest form: without atoms of size 1, and with neighbouring uncut atoms and
    segments joined, but for those that a comment names in the place of a size.

    A size-1 atom that is cut stays: it tells which rank holds the only element.
    """
    merged: list[Atom] = []
    for atom in dim:
        if not atom.axes:
            if atom.size == 1:
                continue
            # Segments of an uncut atom lie end to end anyway, so their bounds say nothing.
            atom = Atom((atom.size,))
            if merged and not merged[-1].axes:
                before = merged[-1].size
                if isinstance(before, int) and isinstance(atom.size, int):
                    merged[-1] = Atom((before * atom.size,))
                    continue
        merged.append(atom)
    return tuple(merged) or (Atom((1,)),)


AXIS = r"[^\s\d/*+,()\[\]][^\s/*+,()\[\]]*"
"""The name of an axis in the text of a layout: any identifier."""

_ATOM = re.compile(rf"(\d+(?:\+\d+)*| *\d+ of \d+ *(?=/)|[^\W\d]\w*)((?:/{AXIS})*)")


def parse_axes(text: str | None) -> tuple[str, ...] | None:
    """The names in ``"dp, tp"``; ``None`` if they are not names."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    return names if all(name.isidentifier() for name in names) else None


def parse_dim(text: str) -> Dim | None:
    """The atoms of ``"3 * 12/tp * 64"``; ``None`` if they are not atoms."""
    matches = [_ATOM.fullmatch(word.strip()) for word in text.split("*")]
    if None in matches:
        return None
    atoms = tuple(_parse_atom(m[1], tuple(m[2].split("/")[1:])) for m in matches if m is not None)
    named = all(axis.isidentifier() for atom in atoms for axis in atom.axes)
    inside = all(atom.element[0] < atom.element[1] for atom in atoms if atom.element)
    return atoms if named and inside else None


def _parse_atom(sizes: str, axes: tuple[str, ...]) -> Atom:
    index, of, count = sizes.partition(" of ")
    if of:
        return Atom((1,), axes, (int(index), int(count)))
    if sizes.isidentifier():
        return Atom((sizes,), axes)
    return Atom(tuple(map(int, sizes.split("+"))), axes)
