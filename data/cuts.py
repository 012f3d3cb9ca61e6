"""Which part of a dim of an input a rank takes, where the plan cuts inputs before the model.

An example: a sequence of 16 over 2 ranks. Cut *contiguously*, rank 0 takes elements 0 to 8. Cut in
*zigzag* there are 4 chunks, and rank 0 takes the first and the last: 0 to 4 and 12 to 16. Under a
causal mask both ranks then see the same number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from shardwright.runtime.arguments import checked_fields, checked_late
from shardwright.runtime.atoms import Atom, Dim
from shardwright.runtime.errors import ConfigError, InputError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.runs import piece

Runs = tuple[tuple[int, int], ...]
"""Ascending ``(start, stop)`` of what is taken."""

CutKind = Literal["contiguous", "zigzag"]


@checked_fields
@dataclass(frozen=True)
class EvenCut:
    """Piece ``index`` of ``size`` of dim ``dim``; the first pieces get what is left over. ``kind``:
    ``contiguous`` or ``zigzag``.
    """

    dim: int
    index: int
    size: int
    kind: CutKind = "contiguous"

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size or self.dim < 0:
            raise ConfigError(
                f"there is no piece {self.index} of {self.size} of dim {self.dim}",
                why="pieces count from 0, and so do dims",
            )

    @checked_late
    def runs(self, length: int) -> Runs:
        """What is taken of a dim of ``length`` elements."""
        if self.kind == "contiguous":
            starts = [piece(length, self.size, self.index)]
        else:
            # Piece 0 of 4 has chunks 0 and 7 of 8: an early and a late one, so that causal
            # attention costs every rank the same.
            chunks = (self.index, 2 * self.size - 1 - self.index)
            starts = [piece(length, 2 * self.size, chunk) for chunk in chunks]
        return joined(tuple((start, start + size) for start, size in starts))

    def __str__(self) -> str:
        return f"dim {self.dim} {self.kind} {self.index}/{self.size}"


@dataclass(frozen=True)
class LayoutCut:
    """The piece of dim ``dim`` that a layout of the plan gives to a rank.

    ``atoms``: the dim as the layout has it. ``mesh`` and ``coords``: where the rank is.
    """

    dim: int
    atoms: Dim
    mesh: Mesh
    coords: tuple[tuple[str, int], ...]

    def runs(self, length: int) -> Runs:
        """What is taken of a dim of ``length`` elements."""
        atoms = self._sized(length)
        return Layout((atoms,)).runs(0, self.mesh, dict(self.coords))

    def _sized(self, length: int) -> Dim:
        """The atoms with numbers for sizes. A dim of one atom may vary between calls."""
        if len(self.atoms) == 1 and len(self.atoms[0].segments) == 1:
            return (replace(self.atoms[0], segments=(length,)),)
        size = 1
        for atom in self.atoms:
            if any(type(segment) is not int for segment in atom.segments):
                raise InputError(
                    f"dim {self.dim} of an input is cut as {self._text()}, whose sizes vary",
                    why="what a rank takes of it follows from numbers",
                    hint="compile with a fixed size of this dim",
                )
            size *= atom.size
        if size != length:
            raise InputError(
                f"dim {self.dim} of an input has {length} elements",
                why=f"the plan cuts it as {self._text()}, which are {size}",
                hint="give samples of the size that the module was compiled for",
            )
        return self.atoms

    def _text(self) -> str:
        return " * ".join(map(str, self.atoms))

    @property
    def kind(self) -> str:
        """``contiguous``, ``zigzag`` or ``pieces``, as far as it is known without a length.

        It is read off the runs of the shortest dim in which these differ, so that whatever way of
        dealing a mesh has is seen.
        """
        if len(self.atoms) != 1 or len(self.atoms[0].segments) != 1:
            return "pieces"
        size = math.prod(self.mesh.axis_size(axis) for axis in self.atoms[0].axes)
        if even_piece(self.atoms, self.mesh, dict(self.coords)) is not None:
            return "contiguous"
        # The shortest length that zigzag deals evenly shows the pattern.
        runs = self.runs(2 * size)
        if runs in (EvenCut(self.dim, i, size, "zigzag").runs(2 * size) for i in range(size)):
            return "zigzag"
        return "contiguous" if len(runs) == 1 else "pieces"

    def __str__(self) -> str:
        axes = [axis for atom in self.atoms for axis in atom.axes]
        at = ", ".join(f"{name}={index}" for name, index in self.coords if name in axes)
        return f"dim {self.dim} {self.kind} {self._text()} at {at}"


Cut = EvenCut | LayoutCut


def even_piece(atoms: Dim, mesh: Mesh, coords: Mapping[str, int]) -> tuple[int, int] | None:
    """``(index, size)`` if a dim is one row of elements that axes cut evenly; ``None`` if it is cut
    in another way.

    ``(0, 1)`` for a dim that nothing cuts.
    """
    cut = [atom for atom in atoms if atom.axes]
    if not cut:
        return 0, 1
    if len(atoms) > 1 or len(atoms[0].segments) > 1 or len(atoms[0].axes) > 1:
        return None
    (axis,) = atoms[0].axes
    index, size = coords[axis], mesh.axis_size(axis)
    # A mesh may deal in another way than one run to each.
    shortest = (replace(atoms[0], segments=(2 * size,)),)
    runs = Layout((shortest,)).runs(0, mesh, dict(coords))
    return (index, size) if runs == ((2 * index, 2 * index + 2),) else None


def is_cut(atoms: tuple[Atom, ...]) -> bool:
    """Whether any axis cuts a dim."""
    return any(atom.axes for atom in atoms)


def joined(runs: Runs) -> Runs:
    """The runs without empty ones, neighbours as one."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def take(x: Tensor, cut: Cut, path: str) -> Tensor:
    """The part of ``x`` that a cut leaves.

    Raises :class:`InputError` if ``x`` has no such dim.
    """
    if x.ndim <= cut.dim:
        raise InputError(
            f"the input {path!r} has shape {list(x.shape)}",
            why=f"the plan cuts its {cut}",
            hint="give samples of the shape that the module was compiled for",
        )
    runs = cut.runs(x.shape[cut.dim])
    parts = [x.narrow(cut.dim, start, stop - start) for start, stop in runs]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, cut.dim) if parts else x.narrow(cut.dim, 0, 0)
