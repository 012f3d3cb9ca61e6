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
ranks have the same work. Pieces are as long as without it.

While compiling, sizes may be symbolic expressions; everything here that needs numbers says so.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.runtime.arguments import checked, checked_fields_late, checked_late
from shardwright.runtime.errors import ConfigError, LoadError, brief, did_you_mean, malformed

Size = Any
"""An ``int``, or while compiling a sympy expression over the names of dynamic input dims."""

Coords = Mapping[str, int]
"""A rank's index along each mesh axis."""

ZERO = "zero"
"""The axis that runs over units, outside of any mesh: ZeRO-3 stores parameters in pieces along
it.
"""


ZIGZAG = "zigzag"
"""What is said of an axis that deals in zigzag."""

MOST_RANKS = 2**20
"""The most ranks of a mesh, a job or a machine: a slip of the keyboard must not fill the memory."""


def piece(count: int, num_pieces: int, index: int) -> tuple[int, int]:
    """``(start, size)`` of piece ``index`` when ``count`` things are cut evenly; the first pieces
    get what is left over.
    """
    base, extra = divmod(count, num_pieces)
    return index * base + min(index, extra), base + (index < extra)


Run = tuple[int, int]
"""``(start, size)`` of things that lie one behind the other."""


def dealt(count: int, num_pieces: int, index: int, *, zigzag: bool) -> tuple[Run, ...]:
    """The runs of piece ``index`` when an axis deals ``count`` things, ascending: one, or in zigzag
    two. Either way it is :func:`piece` that says how many they are.
    """
    start, size = piece(count, num_pieces, index)
    if not zigzag:
        return ((start, size),)
    # Of every piece the larger half lies in front, in the order of the ranks, the other half
    # behind, in the reverse order.
    in_front = _front_halves(count, num_pieces, index)
    half = (size + 1) // 2
    behind = (start - in_front) + (size - half)  # the other halves up to this rank's
    return (in_front, half), (count - behind, size - half)


class PlaceOnAxis:
    """A place among the ``size`` places of an axis, and so which part of what the axis deals is
    there: that of a rank, or of a turn of a loop.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        """The number of places."""
        raise NotImplementedError

    @property
    def index(self) -> int:
        """Which of them this is."""
        raise NotImplementedError

    @property
    def zigzag(self) -> bool:
        """Whether the axis deals in zigzag."""
        return False

    def local_size(self, count: int) -> int:
        """How many of ``count`` things are here when the axis cuts them."""
        return piece(count, self.size, self.index)[1]

    def offset(self, count: int) -> int:
        """Where this place's piece of ``count`` things begins; it is one run."""
        assert not self.zigzag, f"a piece along {self} is two runs"
        return piece(count, self.size, self.index)[0]

    def holds(self, index: int, count: int) -> int:
        """1 if thing ``index`` of ``count`` is here when the axis cuts them, else 0."""
        return int(any(start <= index < start + size for start, size in self.runs(count)))

    def runs(self, count: int) -> tuple[Run, ...]:
        """Where this place's piece of ``count`` things lies."""
        return dealt(count, self.size, self.index, zigzag=self.zigzag)


def _front_halves(count: int, num_pieces: int, index: int) -> int:
    """How many things lie in the front halves of the first ``index`` pieces."""
    base, extra = divmod(count, num_pieces)
    longer = min(index, extra)
    return longer * ((base + 2) // 2) + (index - longer) * ((base + 1) // 2)


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs in ascending order, those that touch or overlap as one."""
    found: list[Run] = []
    for start, size in sorted(runs):
        if not size:
            continue
        if found and start <= sum(found[-1]):
            begin = found[-1][0]
            found[-1] = begin, max(sum(found[-1]), start + size) - begin
        else:
            found.append((start, size))
    return tuple(found)


def within(runs: Iterable[Run], inner: Iterable[Run]) -> tuple[Run, ...]:
    """What ``inner``, runs of the things that ``runs`` hold together, are of the whole."""
    found: list[Run] = []
    for start, size in inner:
        passed = 0
        for begin, length in runs:
            low, high = max(start, passed), min(start + size, passed + length)
            if low < high:
                found.append((begin + low - passed, high - low))
            passed += length
    return tuple(found)


@checked_fields_late
@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes with sizes, major to minor. ``Mesh((("dp", 2), ("tp", 4)))`` has 8 ranks; tp
    varies fastest. ``zigzag``: the axes that deal what they cut in zigzag.
    """

    axes: tuple[tuple[str, int], ...] = ()
    zigzag: tuple[str, ...] = ()

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
        for dealt_axis in self.zigzag:
            if dealt_axis not in self.names:
                raise ConfigError(
                    f"the mesh has no axis {brief(dealt_axis)} to deal in zigzag",
                    why=f"its axes are {', '.join(map(repr, self.names))}",
                    hint=did_you_mean(str(dealt_axis), self.names),
                )

    @classmethod
    @checked
    def of(cls, axes: Mapping[str, int] | Mesh) -> Mesh:
        """The mesh itself, or that of a mapping from axis to size, major to minor."""
        return axes if isinstance(axes, Mesh) else cls(tuple(axes.items()))

    def to_json(self) -> list[list[Any]]:
        """JSON values; :meth:`from_json` is the inverse."""
        return [
            [name, size, ZIGZAG] if name in self.zigzag else [name, size]
            for name, size in self.axes
        ]

    @classmethod
    def from_json(cls, data: Iterable[Sequence[Any]]) -> Mesh:
        """The reverse of :meth:`to_json`."""
        items = [tuple(item) for item in data]
        return cls(
            tuple((str(item[0]), int(item[1])) for item in items),
            tuple(str(item[0]) for item in items if item[2:] == (ZIGZAG,)),
        )

    def of_axes(self, axes: Iterable[tuple[str, int]]) -> Mesh:
        """The mesh of other axes, or of the same with other sizes, that deal as those of their
        names do here.
        """
        axes = tuple(axes)
        names = [name for name, _ in axes]
        return Mesh(axes, tuple(name for name in self.zigzag if name in names))

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, major to minor."""
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    @checked_late
    def axis_size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        sizes = dict(self.axes)
        if axis not in sizes:
            raise ConfigError(
                f"the mesh has no axis {axis!r}",
                why=f"mesh {self}",
                hint=did_you_mean(axis, self.names),
            )
        return sizes[axis]

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
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coords = self.coords(rank)
            groups.setdefault(
                tuple(c for name, c in coords.items() if name not in axes), []
            ).append(rank)
        return [tuple(group) for group in groups.values()]

    def __str__(self) -> str:
        axes = (
            f"{name}={size} {ZIGZAG}" if name in self.zigzag else f"{name}={size}"
            for name, size in self.axes
        )
        return " x ".join(axes) or "one rank"


def _is_count(size: Any) -> bool:
    return type(size) is int and 1 <= size <= MOST_RANKS


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
            zigzag = axis in mesh.zigzag
            own = dealt(count, mesh.axis_size(axis), coords[axis], zigzag=zigzag)
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
    segments joined.

    A size-1 atom that is cut stays: it tells which rank holds the only element.
    """
    merged: list[Atom] = []
    for atom in dim:
        if not atom.axes:
            if atom.size == 1:
                continue
            atom = Atom((atom.size,))
            if merged and not merged[-1].axes:
                merged[-1] = Atom((merged[-1].size * atom.size,))
                continue
        merged.append(atom)
    return tuple(merged) or (Atom((1,)),)


@dataclass(frozen=True, slots=True)
class Density:
    """What is stored of a tensor whose first ``dims`` dims are all pairs of an expert and a token,
    experts outermost: the rows of those pairs that routing chose. So a rank holds as many rows as
    the values at hand say.

    ``share``: the part of all pairs that is chosen, ``top_k / num_experts``. ``imbalance``: how
    many times its even share the busiest rank is assumed to get where experts are cut.
    """

    dims: int
    share: float
    imbalance: float

    def rows(self, pairs: float, num_ranks: int) -> float:
        """The rows that the busiest rank is assumed to hold, of so many local pairs, where
        ``num_ranks`` share the experts. It gets no more than all rows.
        """
        return min(pairs, pairs * self.share * min(self.imbalance, num_ranks))


@dataclass(frozen=True, slots=True)
class Layout:
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
            "dims": [
                [
                    {"segments": list(atom.segments), "axes": list(atom.axes)}
                    | ({"element": list(atom.element)} if atom.element else {})
                    for atom in dim
                ]
                for dim in self.dims
            ],
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
            dims = tuple(
                tuple(
                    Atom(tuple(a["segments"]), tuple(a["axes"]), tuple(a.get("element", ())))
                    for a in dim
                )
                for dim in data["dims"]
            )
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
        marks = [] if match is None else [_parse_axes(group) for group in match.groups()[1:]]
        dims = (
            []
            if match is None or not match[1].strip()
            else [_parse_dim(dim) for dim in match[1].split(",")]
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


AXIS = r"[^\s\d/*+,()\[\]][^\s/*+,()\[\]]*"
"""The name of an axis in the text of a layout: any identifier."""

_ATOM = re.compile(rf"(\d+(?:\+\d+)*| *\d+ of \d+ *(?=/)|[^\W\d]\w*)((?:/{AXIS})*)")


def _parse_axes(text: str | None) -> tuple[str, ...] | None:
    """The names in ``"dp, tp"``; ``None`` if they are not names."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    return names if all(name.isidentifier() for name in names) else None


def _parse_dim(text: str) -> Dim | None:
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


def _product(sizes: Iterator[Size]) -> Size:
    return math.prod(itertools.chain((1,), sizes))


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dim of a *local* tensor is cut along one axis: ``outer`` repeats of ``segments``,
    each element ``inner`` long.

    The uncut length is ``outer * sum(segments) * inner``. Every segment is cut by :func:`dealt`.
    This is what generated code hands to the adapters; all numbers are known when the code runs.

    ``element``: the one segment has size 1, and is ``(index, count)`` of things that the axis cuts.
    An index that is none of them: other axes have left nothing of it here. ``zigzag`` the adapters
    add themselves, as their axis says.
    """

    segments: tuple[int, ...]
    outer: int = 1
    inner: int = 1
    element: tuple[int, ...] = ()
    zigzag: bool = False

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
            held = dealt(self.element[1], num_pieces, index, zigzag=self.zigzag)
            return [(0, 1)] if any(a <= self.element[0] < a + n for a, n in held) else []
        found, offset = [], 0
        for segment in self.segments:
            for start, size in dealt(segment, num_pieces, index, zigzag=self.zigzag):
                found.append((offset + start, size))
            offset += segment
        return found

    def local_length(self, num_pieces: int, index: int) -> int:
        """How long a member's piece is."""
        return self.outer * self.inner * sum(size for _, size in self.runs(num_pieces, index))
