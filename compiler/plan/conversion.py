"""From one layout to another: the adapters that a value needs between producer and consumer. Each
step converts one mesh axis, or several by one sum.

Both layouts are brought to a canonical form first (:mod:`shardwright.compiler.plan.layout_cuts`);
which axis is converted when says :mod:`shardwright.compiler.plan.layout_moves`. Here the moves get
their sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardwright.compiler.ir.size import Size, local_size, product, quotient
from shardwright.compiler.plan.layout_cuts import PlaceKey, cut_places
from shardwright.compiler.plan.layout_moves import Move, State, moves
from shardwright.runtime.errors import InternalError
from shardwright.runtime.layout import Atom, Dim, Layout, Mesh

GATHERS, SLICES = ("all_gather", "pad"), ("narrow", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class CutSizes:
    """The uncut form of a dim as a rank sees it, in size expressions: ``outer x segments x inner``
    (see ``layout.Cut``).
    """

    segments: tuple[Size, ...]
    outer: Size = 1
    inner: Size = 1


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """One call of ``shardwright.runtime.adapters``. ``before`` and ``after`` are the whole layouts
    around it. ``axes``: those over which it goes, several only where it cuts and joins nothing.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    backward: str | None = None
    dim: int | None = None
    cut: CutSizes | None = None
    to_dim: int | None = None
    to_cut: CutSizes | None = None

    @property
    def axis(self) -> str:
        """The only one, of a step that cuts or joins."""
        (axis,) = self.axes
        return axis

    @property
    def transition(self) -> str:
        """The placement on each of its axes, before and after."""
        axis = self.axes[0]
        return f"{self.before.placement(axis)} -> {self.after.placement(axis)}"


@functools.lru_cache(maxsize=65536)
def canonical(layout: Layout, mesh: Mesh, *, differentiable: bool = True) -> Layout:
    """One way to write each layout: axes of size 1 gone, even cuts reduced to their pieces, no G
    where no gradient flows.
    """
    return _build(layout.shape, State.of(layout, mesh, differentiable=differentiable))


@functools.lru_cache(maxsize=65536)
def convert(
    source: Layout, target: Layout, mesh: Mesh, *, differentiable: bool = True
) -> tuple[AdapterStep, ...]:
    """The steps from ``source`` to ``target``; none when they are the same layout."""
    shape = source.shape
    if target.shape != shape:
        raise InternalError(
            f"no conversion from {source} to {target} on mesh {mesh}", why="their shapes differ"
        )
    state = State.of(source, mesh, differentiable=differentiable)
    before = _build(shape, state)
    steps: list[AdapterStep] = []
    for move in moves(state, State.of(target, mesh, differentiable=differentiable), mesh):
        steps.append(_step(move, before, _build(shape, move.after), mesh))
        before = steps[-1].after
    return tuple(steps)


def _step(move: Move, before: Layout, after: Layout, mesh: Mesh) -> AdapterStep:
    dim = cut = to_dim = to_cut = None
    if move.source is not None:
        dim, cut = (
            move.source.dim,
            _cut(before, move.source.key, len(move.source.axes) - 1, mesh, exclude=move.axes[0]),
        )
    if move.to is not None:
        to_dim, to_cut = (
            move.to.dim,
            _cut(after, move.to.key, move.count, mesh, exclude=move.axes[0]),
        )
    if move.kind in SLICES:
        dim, cut, to_dim, to_cut = to_dim, to_cut, None, None
    return AdapterStep(move.kind, move.axes, before, after, move.backward, dim, cut, to_dim, to_cut)


def _cut(layout: Layout, key: PlaceKey, count: int, mesh: Mesh, *, exclude: str) -> CutSizes:
    """The local form of a dim around one cut atom, uncut along ``exclude`` but cut along everything
    else.
    """
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
            sizes.append(
                _plain_sum(_local_segments(atom, mesh, tuple(a for a in atom.axes if a != exclude)))
            )
        seen_outer = product((seen_outer, atom.size))
    assert found is not None, f"{key} is not an atom of {layout}"
    return CutSizes(found, outer, product(sizes))


def cut_sizes(layout: Layout, dim: int, axis: str, mesh: Mesh) -> CutSizes:
    """The local form of a dim of ``layout`` (in canonical form) as it is without its innermost cut,
    that along ``axis``.
    """
    place = next(
        place for place in cut_places(layout, mesh) if place.dim == dim and place.axes[-1] == axis
    )
    return _cut(layout, place.key, len(place.axes) - 1, mesh, exclude=axis)


def _plain_sum(sizes: tuple[Size, ...]) -> Size:
    return sum(sizes) if len(sizes) > 1 else sizes[0]


def _local_segments(atom: Atom, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Size, ...]:
    segments = atom.segments
    for axis in axes:
        segments = tuple(local_size(size, axis, mesh.axis_size(axis)) for size in segments)
    return segments


def _build(shape: tuple[Size, ...], state: State) -> Layout:
    dims: list[Dim] = []
    for dim, size in enumerate(shape):
        atoms: list[Atom] = []
        outer: Size = 1
        for place in state.places:
            if place.dim != dim:
                continue
            gap = quotient(place.outer, outer)
            if gap != 1:
                atoms.append(Atom((gap,)))
            atoms.append(Atom(place.segments, place.axes))
            outer = product((place.outer, place.size))
        rest = quotient(size, outer) if size != 0 else size
        if rest != 1 or not atoms:
            atoms.append(Atom((rest,)))
        dims.append(tuple(atoms))
    return Layout(tuple(dims), state.partial, state.grad_partial)
