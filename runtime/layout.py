"""Meshes and layouts: which piece of a tensor each rank holds.

A **mesh** is named axes with sizes, written major to minor; the last axis varies fastest with the
rank. A tensor **dim** is a product of **atoms**, outermost first. An atom is one or several
**segments** laid end to end, and an ordered tuple of mesh axes, major to minor, that cut every one
of its segments. So

    hidden 768, whole                      ->  [Atom(768)]
    12 heads of 64, heads over tp          ->  [Atom(12, tp), Atom(64)]
    GPT-2's fused QKV, heads over tp       ->  [Atom(3), Atom(12, tp), Atom(64)]
    Phi-3's fused QKV, 32 + 8 + 8 heads    ->  [Atom(32 + 8 + 8, tp), Atom(96)]
    batch x sequence flattened, batch over dp -> [Atom(4, dp), Atom(128)]
    the weight of expert 3, if 8 experts lie over ep -> [Atom(3 of 8, ep), Atom(64)]

The last one is an **element**: of 8 things that ``ep`` cuts, this tensor is thing 3. The rank that
has thing 3 holds the tensor, all others hold nothing.

Invariants: an axis cuts at most one atom of one dim of a tensor; the pieces of all ranks tile the
tensor exactly; a piece keeps the ascending global order. Sizes that do not divide give the first
ranks one element more; a rank may hold nothing.

Besides cutting, an axis may hold a summand of the value (**P**, partial) or of the gradient (**G**,
gradient-partial); an axis that does none of the three holds a copy (**R**, replicated).

An axis gives each rank one run of what it cuts, or deals it in **zigzag**: two runs to each rank,
the second ones in the reverse order of the ranks. Of 8 positions on 2 ranks the first then has 0,
1, 6, 7, and the second 2, 3, 4, 5. Where later positions cost more, as in causal attention, all
ranks have the same work. It may do so in several turns, which keeps work even in rows of several
documents. Pieces are as long as without it.

While compiling, sizes may be symbolic expressions; everything here that needs numbers says so.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwright.runtime.arguments import checked, checked_late
from shardwright.runtime.atoms import Atom, Dim, Size, merge_atoms, parse_axes, parse_dim
from shardwright.runtime.errors import LoadError, malformed
from shardwright.runtime.hashed_once import HashedOnce, hashed_once
from shardwright.runtime.mesh import Coords
from shardwright.runtime.mesh import Mesh as Mesh  # whoever has layouts has meshes: one import
from shardwright.runtime.runs import Run, dealt


@dataclass(frozen=True, slots=True)
class Density:
    """What is stored of a tensor whose first ``dims`` dims are all pairs of an expert and a token,
    experts outermost: the rows of those pairs that routing chose. So a rank holds as many rows as
    the values at hand say.

    ``share``: the part of all pairs that is chosen, ``top_k / num_experts``. ``imbalance``: how
    many times its even share the busiest rank is assumed to get where experts are cut. ``groups``:
    the number of equal groups of experts, and of those that a token chooses first, to choose its
    experts there.
    """

    dims: int
    share: float
    imbalance: float
    groups: tuple[int, int] = (1, 1)

    def rows(self, pairs: float, num_ranks: int) -> float:
        """The rows that the busiest rank is assumed to hold, of so many local pairs, where
        ``num_ranks`` share the experts. It gets no more than all rows.
        """
        # At most ``num_ranks`` times the even share: then one rank has all rows.
        return min(pairs, pairs * self.share * min(self.imbalance, num_ranks))


@hashed_once
@dataclass(frozen=True, slots=True)
class Layout(HashedOnce):
    """How one tensor lies on a mesh. ``dims``: of each dim its atoms, whose product it is, and the
    axes that cut them. ``partial``, ``grad_partial``: the axes along which ranks hold summands of
    the value (P) and of its gradient (G). ``density``: of a tensor of which rows are left out,
    which they are.

    :meth:`parse` reads what ``str`` writes: ``Layout.parse("[50257/tp, 768] G(dp)")`` has its rows
    cut over ``tp``, and along ``dp`` whole copies, each with a summand of the gradient.
    """

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    grad_partial: tuple[str, ...] = ()
    density: Density | None = None

    @classmethod
    @checked_late
    def whole(
        cls,
        shape: tuple[Size, ...],
        *,
        partial: tuple[str, ...] = (),
        grad_partial: tuple[str, ...] = (),
    ) -> Layout:
        """Nothing cut: R, or P / G on the axes named."""
        return cls(
            tuple((Atom((size,)),) for size in shape),
            tuple(sorted(partial)),
            tuple(sorted(grad_partial)),
        )

    @property
    def shape(self) -> tuple[Size, ...]:
        """The global shape."""
        return tuple(_product(atom.size for atom in dim) for dim in self.dims)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes that cut some dim, in the order of the dims."""
        atoms = (atom for dim in self.dims for atom in dim)
        return tuple(axis for atom in atoms for axis in atom.axes)

    @checked_late
    def placement(self, axis: str) -> str:
        """The placement on one axis: ``'S(d)'``, ``'P'``, ``'G'`` or ``'R'``."""
        for index, dim in enumerate(self.dims):
            if any(axis in atom.axes for atom in dim):
                return f"S({index})"
        if axis in self.partial:
            return "P"
        return "G" if axis in self.grad_partial else "R"

    @checked_late
    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that cut ``dim``, outermost atom first."""
        return tuple(axis for atom in self.dims[dim] for axis in atom.axes)

    def local_shape(self, mesh: Mesh, coords: Coords) -> tuple[int, ...]:
        """The shape of the piece at ``coords``; needs numbers."""
        return tuple(math.prod(atom.local_size(mesh, coords) for atom in dim) for dim in self.dims)

    def largest_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of the largest piece; needs numbers."""
        first = dict.fromkeys(mesh.names, 0)  # the first pieces of a cut are the largest
        return tuple(
            math.prod(1 if atom.element else atom.local_size(mesh, first) for atom in dim)
            for dim in self.dims
        )

    def runs(self, dim: int, mesh: Mesh, coords: Coords) -> tuple[tuple[int, int], ...]:
        """The piece at ``coords`` along ``dim`` as ascending global ``(start, stop)`` runs; needs
        numbers.
        """
        # Runs of the atoms so far, in units of the product of the atoms still to come.
        runs = [(0, 1)]
        # Outermost atom first: every run so far is cut into the pieces of the next atom.
        for atom in merge_atoms(self.dims[dim]):
            size, kept = atom.size, [(s, s + n) for s, n in atom.pieces(mesh, coords) if n]
            # An uncut atom only makes runs longer.
            if kept == [(0, size)]:
                runs = [(start * size, stop * size) for start, stop in runs]
            else:
                indices = [i for start, stop in runs for i in range(start, stop)]
                runs = [(i * size + a, i * size + b) for i in indices for a, b in kept]
        # Runs that touch are one.
        joined: list[tuple[int, int]] = []
        for start, stop in runs:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif stop > start:
                joined.append((start, stop))
        return tuple(joined)

    def normalized(self) -> Layout:
        """The layout with every dim in its shortest form."""
        return replace(self, dims=tuple(merge_atoms(dim) for dim in self.dims))

    @checked_late
    def with_dim(self, dim: int, atoms: Dim) -> Layout:
        """The layout with other atoms for one dim."""
        return replace(self, dims=self.dims[:dim] + (atoms,) + self.dims[dim + 1 :])

    def owners(self, mesh: Mesh) -> list[dict[str, int]]:
        """The coordinates that hold distinct pieces: index 0 along every axis that does not cut the
        tensor.
        """
        cut = set(self.cut_axes)
        return [c for c in mesh.all_coords() if all(c[a] == 0 for a in mesh.names if a not in cut)]

    def to_json(self) -> dict[str, Any]:
        """JSON values; :meth:`from_json` is the inverse."""
        return {
            "dims": [[_atom_json(atom) for atom in dim] for dim in self.dims],
            "partial": list(self.partial),
            "grad_partial": list(self.grad_partial),
        }

    @classmethod
    @checked_late
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """The reverse of :meth:`to_json`."""
        with malformed(
            LoadError,
            "this is no layout",
            hint="what Layout.to_json gives has dims, partial and grad_partial",
        ):
            dims = tuple(tuple(map(_read_atom, dim)) for dim in data["dims"])
            return cls(dims, tuple(data["partial"]), tuple(data["grad_partial"]))

    @classmethod
    @checked
    def parse(cls, text: str) -> Layout:
        """Read what ``str`` writes: ``"[50257/tp, 3 * 12/tp * 64, 32+8+8/tp * 96] G(dp)"``, or
        ``"[3 of 8/ep * 64, 32]"``. The size of a dim that varies is its name, as in ``"[batch/dp,
        768]"``.

        Raises :class:`LoadError` if it does not parse or an axis occurs twice.
        """
        match = re.fullmatch(r"\s*\[(.*)\]\s*(?:P\((.*?)\)\s*)?(?:G\((.*?)\)\s*)?", text)
        marks = [] if match is None else [parse_axes(group) for group in match.groups()[1:]]
        dims = (
            []
            if match is None or not match[1].strip()
            else [parse_dim(dim) for dim in match[1].split(",")]
        )
        if match is None or None in marks or None in dims:
            raise LoadError(
                f"the layout {text!r} does not parse",
                hint="write the dims as in '[12/tp * 64, 128] P(dp)': sizes / the axes that cut",
            )
        partial, grad_partial = (mark or () for mark in marks)
        layout = cls(tuple(dim for dim in dims if dim is not None), partial, grad_partial)
        # An axis can do one thing to a tensor.
        axes = [*layout.cut_axes, *partial, *grad_partial]
        twice = sorted({axis for axis in axes if axes.count(axis) > 1})
        if twice:
            raise LoadError(f"the layout {text!r} uses the axis {twice[0]!r} twice")
        return layout

    def __str__(self) -> str:
        dims = ", ".join(" * ".join(map(str, merge_atoms(dim))) for dim in self.dims)
        marks = [f"P({', '.join(self.partial)})"] if self.partial else []
        if self.density is not None:
            marks.insert(0, f"at {self.density.share:.3g}")
        marks += [f"G({', '.join(self.grad_partial)})"] if self.grad_partial else []
        return " ".join([f"[{dims}]", *marks])


def _atom_json(atom: Atom) -> dict[str, Any]:
    data: dict[str, Any] = {"segments": list(atom.segments), "axes": list(atom.axes)}
    return {**data, "element": list(atom.element)} if atom.element else data


def _read_atom(data: Mapping[str, Any]) -> Atom:
    return Atom(tuple(data["segments"]), tuple(data["axes"]), tuple(data.get("element", ())))


def _product(sizes: Iterator[Size]) -> Size:
    return math.prod(itertools.chain((1,), sizes))


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dim of a *local* tensor is cut along one axis: ``outer`` repeats of ``segments``,
    each element ``inner`` long.

    The uncut length is ``outer * sum(segments) * inner``. Every segment is cut by :func:`dealt`.
    This is what generated code hands to the adapters; all numbers are known when the code runs.

    ``element``: the one segment has size 1, and is ``(index, count)`` of things that the axis cuts.
    An index that is none of them: other axes have left nothing of it here. ``turns`` of zigzag the
    adapters add themselves, as their axis says.
    """

    segments: tuple[int, ...]
    outer: int = 1
    inner: int = 1
    element: tuple[int, ...] = ()
    turns: int = 0

    @property
    def length(self) -> int:
        """The uncut length of the dim."""
        return self.outer * self.repeat * self.inner

    @property
    def repeat(self) -> int:
        """The uncut length of one repeat, in elements ``inner`` long."""
        if not self.element:
            return sum(self.segments)
        index, count = self.element
        return int(0 <= index < count)

    def runs(self, num_pieces: int, index: int) -> list[Run]:
        """Where a member's elements of one repeat lie, ascending."""
        if self.element:
            held = dealt(self.element[1], num_pieces, index, turns=self.turns)
            return [(0, 1)] if any(a <= self.element[0] < a + n for a, n in held) else []
        found, offset = [], 0
        for segment in self.segments:
            # Each segment is cut by itself: a rank has a piece of q, one of k and one of v.
            for start, size in dealt(segment, num_pieces, index, turns=self.turns):
                found.append((offset + start, size))
            offset += segment
        return found

    def local_length(self, num_pieces: int, index: int) -> int:
        """How long a member's piece is."""
        return self.outer * self.inner * sum(size for _, size in self.runs(num_pieces, index))
