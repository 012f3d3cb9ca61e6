"""From one layout to another: the adapters, one mesh axis per step, that a value needs between producer and consumer.

Each dim is brought to a canonical form first, in which a cut atom is known by where it stands: the product of what is outside
it, its segments, and the product of what is inside it. An evenly cut atom becomes exactly its pieces, so that
``12/tp * 64`` and ``768/tp`` are the same layout when tp divides 12. Axes that cut the same atom on both sides stay; the
others are added, moved or dropped, cheapest data first: slices and reduce-scatters shrink the tensor, so they go before
all-reduces, and gathers go last. A minor axis of an atom is dropped before its major one and added after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.compiler.ir.size import Size, divides, local_size, product, quotient
from shardwright.runtime.errors import InternalError
from shardwright.runtime.layout import Atom, Dim, Layout, Mesh

GATHERS, SLICES = ("all_gather", "pad"), ("narrow", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class CutSizes:
    """The uncut form of a dim as a rank sees it, in size expressions: ``outer x segments x inner`` (see ``layout.Cut``)."""

    segments: tuple[Size, ...]
    outer: Size = 1
    inner: Size = 1


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """One call of ``shardwright.runtime.adapters``. ``before`` and ``after`` are the whole layouts around it."""

    kind: str
    axis: str
    before: Layout
    after: Layout
    backward: str | None = None
    dim: int | None = None
    cut: CutSizes | None = None
    to_dim: int | None = None
    to_cut: CutSizes | None = None

    @property
    def transition(self) -> str:
        return f"{self.before.placement(self.axis)} -> {self.after.placement(self.axis)}"


@dataclass(frozen=True, slots=True)
class Place:
    """A cut atom of one dim: its size stands between ``outer`` and the rest."""

    dim: int
    outer: Size
    segments: tuple[Size, ...]
    axes: tuple[str, ...]

    @property
    def size(self) -> Size:
        return sum(self.segments) if len(self.segments) > 1 else self.segments[0]

    @property
    def key(self) -> tuple[int, Size, tuple[Size, ...]]:
        return self.dim, self.outer, self.segments


def canonical(layout: Layout, mesh: Mesh, *, differentiable: bool = True) -> Layout:
    """One way to write each layout: axes of size 1 gone, even cuts reduced to their pieces, no G where no gradient flows."""
    shape = layout.shape
    places = cut_places(layout, mesh)
    return _build(
        shape,
        places,
        tuple(a for a in layout.partial if mesh.axis_size(a) > 1),
        tuple(a for a in layout.grad_partial if mesh.axis_size(a) > 1) if differentiable else (),
    )


def convert(source: Layout, target: Layout, mesh: Mesh, *, differentiable: bool = True) -> tuple[AdapterStep, ...]:
    """The steps from ``source`` to ``target``; none when they are the same layout."""
    current = canonical(source, mesh, differentiable=differentiable)
    goal = canonical(target, mesh, differentiable=differentiable)
    steps: list[AdapterStep] = []
    for _ in range(8 * max(1, len(mesh.axes))):
        if current == goal:
            return tuple(steps)
        step = _next_step(current, goal, mesh)
        steps.append(step)
        current = step.after
    raise InternalError(f"no conversion from {source} to {target} on mesh {mesh}", why=f"stuck at {current}")


def _next_step(current: Layout, goal: Layout, mesh: Mesh) -> AdapterStep:
    now, then = cut_places(current, mesh), cut_places(goal, mesh)
    kept = _kept(now, then)
    letter_now = {axis: current.placement(axis)[0] for axis in mesh.names}
    letter_then = {axis: goal.placement(axis)[0] for axis in mesh.names}

    addable = {
        place.axes[count]: (place, count) for place in then for count in (_present(place, now),) if count < len(place.axes)
    }
    droppable = {place.axes[-1]: place for place in now if len(place.axes) > kept.get(place.key, 0)}
    # slices and reduce-scatters
    for axis, (place, count) in addable.items():
        if letter_now[axis] != "S" and fits(place, now):
            if letter_now[axis] == "P":
                return _step("reduce_scatter", axis, current, _add(current, now, place, count, mesh), mesh, to=(place, count))
            backward = "pad" if letter_now[axis] == "G" else "all_gather"
            return _step(
                "narrow", axis, current, _add(current, now, place, count, mesh), mesh, to=(place, count), backward=backward
            )
    # all-to-alls
    for axis, (place, count) in addable.items():
        if axis in droppable:
            rest = _without(now, droppable[axis])
            if _present(place, rest) == count and fits(place, rest):
                after = _add(_rebuild(current, rest), rest, place, count, mesh)
                return _step("all_to_all", axis, current, after, mesh, source=droppable[axis], to=(place, count))
    # conversions that keep the shape
    for axis in mesh.names:
        a, b = letter_now[axis], letter_then[axis]
        if a != "S" and b != "S" and a != b:
            return _reshaping_free(axis, a, b, current)
    # gathers; an axis that could not move yet is gathered and cut again
    for place in sorted(droppable.values(), key=lambda p: letter_then[p.axes[-1]] == "S"):
        axis = place.axes[-1]
        after = _rebuild(current, _without(now, place))
        wanted = letter_then[axis]
        if wanted == "P":
            return _step("pad", axis, current, replace(after, partial=_with(after.partial, axis)), mesh, source=place)
        if wanted == "G":
            after = replace(after, grad_partial=_with(after.grad_partial, axis))
        return _step(
            "all_gather", axis, current, after, mesh, source=place, backward="reduce_scatter" if wanted == "G" else "slice"
        )
    raise InternalError(f"no step from {current} towards {goal} on mesh {mesh}")


_SHAPELESS = {
    ("R", "G"): ("grad_all_reduce", None),
    ("R", "P"): ("keep_one", "identity"),
    ("P", "R"): ("all_reduce", "identity"),
    ("P", "G"): ("all_reduce", "all_reduce"),
    ("G", "R"): ("grad_keep_one", None),
    ("G", "P"): ("keep_one", "keep_one"),
}


def _reshaping_free(axis: str, a: str, b: str, current: Layout) -> AdapterStep:
    kind, backward = _SHAPELESS[a, b]
    after = replace(
        current,
        partial=_with(current.partial, axis) if b == "P" else _drop(current.partial, axis),
        grad_partial=_with(current.grad_partial, axis) if b == "G" else _drop(current.grad_partial, axis),
    )
    return AdapterStep(kind, axis, current, after, backward)


def _step(
    kind: str,
    axis: str,
    before: Layout,
    after: Layout,
    mesh: Mesh,
    *,
    source: Place | None = None,
    to: tuple[Place, int] | None = None,
    backward: str | None = None,
) -> AdapterStep:
    dim = cut = to_dim = to_cut = None
    if source is not None:
        dim, cut = source.dim, _cut(before, source.key, len(source.axes) - 1, mesh, exclude=axis)
    if to is not None:
        to_dim, to_cut = to[0].dim, _cut(after, to[0].key, to[1], mesh, exclude=axis)
    if kind in SLICES:
        dim, cut, to_dim, to_cut = to_dim, to_cut, None, None
    return AdapterStep(kind, axis, before, after, backward, dim, cut, to_dim, to_cut)


def _cut(layout: Layout, key: tuple[int, Size, tuple[Size, ...]], count: int, mesh: Mesh, *, exclude: str) -> CutSizes:
    """The local form of a dim around one cut atom, uncut along ``exclude`` but cut along everything else."""
    dim = key[0]
    outer: Size = 1
    sizes: list[Size] = []
    found: tuple[Size, ...] | None = None
    seen_outer: Size = 1
    for atom in layout.dims[dim]:
        if found is None and atom.axes and seen_outer == key[1] and atom.segments == key[2]:
            found = _local_segments(atom, mesh, atom.axes[:count])
            outer, sizes = product(sizes), []
        else:
            sizes.append(_plain_sum(_local_segments(atom, mesh, tuple(a for a in atom.axes if a != exclude))))
        seen_outer = product((seen_outer, atom.size))
    assert found is not None, f"{key} is not an atom of {layout}"
    return CutSizes(found, outer, product(sizes))


def cut_sizes(layout: Layout, dim: int, axis: str, mesh: Mesh) -> CutSizes:
    """The local form of a dim of ``layout`` (in canonical form) as it is without its innermost cut, that along ``axis``."""
    place = next(place for place in cut_places(layout, mesh) if place.dim == dim and place.axes[-1] == axis)
    return _cut(layout, place.key, len(place.axes) - 1, mesh, exclude=axis)


def _plain_sum(sizes: tuple[Size, ...]) -> Size:
    return sum(sizes) if len(sizes) > 1 else sizes[0]


def _local_segments(atom: Atom, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Size, ...]:
    segments = atom.segments
    for axis in axes:
        segments = tuple(local_size(size, axis, mesh.axis_size(axis)) for size in segments)
    return segments


# ------------------------------------------------------------------------------------------------ places of cut atoms


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
    """One place for all axes that cut the same single element: in whatever order, only index 0 of each holds it."""
    merged: dict[tuple[int, Size, tuple[Size, ...]], Place] = {}
    for place in places:
        earlier = merged.get(place.key)
        axes = (*earlier.axes, *place.axes) if earlier is not None else place.axes
        if place.segments == (1,):
            axes = tuple(axis for axis in mesh.names if axis in axes)
        merged[place.key] = replace(place, axes=axes)
    return list(merged.values())


def _even_pieces(dim: int, outer: Size, atom: Atom, axes: tuple[str, ...], mesh: Mesh) -> list[Place]:
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


def _kept(now: list[Place], then: list[Place]) -> dict[tuple[int, Size, tuple[Size, ...]], int]:
    """Per atom, how many of its axes (majors first) are the same on both sides."""
    wanted = {place.key: place.axes for place in then}
    kept = {}
    for place in now:
        common = 0
        for a, b in zip(place.axes, wanted.get(place.key, ()), strict=False):
            if a != b:
                break
            common += 1
        kept[place.key] = common
    return kept


def _present(place: Place, now: list[Place]) -> int:
    """How many axes of ``place`` cut that atom already; -1-like large when others cut it (then nothing can be added yet)."""
    for other in now:
        if other.key == place.key:
            return len(other.axes) if place.axes[: len(other.axes)] == other.axes else len(place.axes)
    return 0


def fits(place: Place, now: list[Place]) -> bool:
    """Whether the atom can be cut beside the atoms that are cut now."""
    for other in now:
        if other.dim != place.dim or other.key == place.key:
            continue
        inside = divides(product((place.outer, place.size)), other.outer)
        outside = divides(product((other.outer, other.size)), place.outer)
        if not inside and not outside:
            return False
    return True


def _without(now: list[Place], place: Place) -> list[Place]:
    """The places with the last axis of one gone."""
    shorter = replace(place, axes=place.axes[:-1])
    return [p for p in (shorter if q == place else q for q in now) if p.axes]


def _add(current: Layout, now: list[Place], place: Place, count: int, mesh: Mesh) -> Layout:
    """The layout with axis ``count`` of ``place`` cutting too."""
    added = replace(place, axes=place.axes[: count + 1])
    after = _rebuild(current, [p for p in now if p.key != place.key] + [added])
    axis = place.axes[count]
    return replace(after, partial=_drop(after.partial, axis), grad_partial=_drop(after.grad_partial, axis))


def _rebuild(current: Layout, places: list[Place]) -> Layout:
    return _build(current.shape, places, current.partial, current.grad_partial)


def _build(shape: tuple[Size, ...], places: list[Place], partial: tuple[str, ...], grad_partial: tuple[str, ...]) -> Layout:
    dims: list[Dim] = []
    for dim, size in enumerate(shape):
        atoms: list[Atom] = []
        outer: Size = 1
        remaining = [place for place in places if place.dim == dim]
        while remaining:  # outermost first; sizes may be symbolic, so order by divisibility
            first = next(p for p in remaining if all(p is q or divides(product((p.outer, p.size)), q.outer) for q in remaining))
            remaining.remove(first)
            gap = quotient(first.outer, outer)
            if gap != 1:
                atoms.append(Atom((gap,)))
            atoms.append(Atom(first.segments, first.axes))
            outer = product((first.outer, first.size))
        rest = quotient(size, outer) if size != 0 else size
        if rest != 1 or not atoms:
            atoms.append(Atom((rest,)))
        dims.append(tuple(atoms))
    return Layout(tuple(dims), tuple(sorted(partial)), tuple(sorted(grad_partial)))


def _with(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return tuple(sorted({*axes, axis}))


def _drop(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return tuple(a for a in axes if a != axis)
