"""Convert one layout into another: the adapters that a value needs between producer and consumer.
Each step converts one mesh axis, or several axes by one sum.

Both layouts are brought to a canonical form first (``layout_cuts.py``). ``layout_moves.py`` says
which axis is converted when. Here the moves get their sizes.

Example, on ``tp=4``: from ``[8, 768/tp]`` to ``[8, 768]`` is one step, an ``all_gather`` of dim 1
whose backward slices. From ``[8/tp, 768]`` to ``[8, 768/tp]`` it is one ``all_to_all``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shardwright.compiler.ir.size import Size, element_in, local_size, num_held, product, quotient
from shardwright.compiler.plan.layout_cuts import Place, PlaceKey, cut_places
from shardwright.compiler.plan.layout_moves import Move, State, moves
from shardwright.runtime.atoms import Atom, Dim
from shardwright.runtime.errors import InternalError
from shardwright.runtime.layout import Density, Layout, Mesh

GATHERS, SLICES = ("all_gather", "pad"), ("narrow", "reduce_scatter")
REGROUP = "regroup"
"""The step that no adapter can do: rows that routing chose (``Density``) have no positions by
which they could be cut or joined. Only ``dispatch`` and ``combine`` move them. It has no price.
"""


@dataclass(frozen=True, slots=True)
class CutSizes:
    """The form of a dim on a rank, without the cut that an adapter makes or joins. It is ``outer x
    segments x inner``, in size expressions (see ``layout.Cut``).
    """

    segments: tuple[Size, ...]
    outer: Size = 1
    inner: Size = 1
    element: tuple[Size, ...] = ()

    @property
    def sizes(self) -> tuple[Size, ...]:
        """All expressions."""
        return (*self.segments, self.outer, self.inner, *self.element)


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """One call of ``shardwright.runtime.adapters``.

    - ``axes``: the axes over which it goes. Several are possible only for a step that neither cuts
      nor joins a dim.
    - ``before``, ``after``: the layouts of the value around it.
    - ``dim``, ``cut``: the dim that it joins or cuts. An all-to-all joins ``dim`` and cuts
      ``to_dim``.
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
        """The only axis of a step that cuts or joins a dim."""
        (axis,) = self.axes
        return axis

    @property
    def transition(self) -> str:
        """The placement on each of its axes before and after, for people: ``P -> R``."""
        axis = self.axes[0]
        return f"{self.before.placement(axis)} -> {self.after.placement(axis)}"


@functools.lru_cache(maxsize=65536)
def canonical(layout: Layout, mesh: Mesh, *, differentiable: bool = True) -> Layout:
    """The one way to write a layout: without axes of size 1, with even cuts as products of their
    pieces, and without G if no gradient flows.
    """
    return _build(
        layout.shape, State.of(layout, mesh, differentiable=differentiable), layout.density
    )


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
    density = source.density
    # A state has cuts in place of atoms: what is not cut has no part in a conversion.
    state = State.of(source, mesh, differentiable=differentiable)
    goal = State.of(target, mesh, differentiable=differentiable)
    before = canonical(source, mesh, differentiable=differentiable)
    # Rows that a router chose are nowhere else: no adapter moves them.
    if density is not None and _cuts_of(state, density.dims) != _cuts_of(goal, density.dims):
        return (AdapterStep(REGROUP, mesh.names, before, _build(shape, goal, density)),)
    steps: list[AdapterStep] = []
    # The moves of the search become steps, each with the layouts around it.
    for move in moves(state, goal, mesh):
        steps.append(_step(move, before, _build(shape, move.after, density), mesh))
        before = steps[-1].after
    return tuple(steps)


def _cuts_of(state: State, num_dims: int) -> tuple[Place, ...]:
    return tuple(place for place in state.places if place.dim < num_dims)


def _step(move: Move, before: Layout, after: Layout, mesh: Mesh) -> AdapterStep:
    """A move with its sizes. A rank describes the dim that it joins as it lies before the step, and
    the dim that it cuts as it lies behind it.
    """
    # ``dim`` and ``cut`` are joined, ``to_dim`` and ``to_cut`` are cut: an all-to-all has both.
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
    # A slice joins nothing.
    if move.kind in SLICES:
        dim, cut, to_dim, to_cut = to_dim, to_cut, None, None
    return AdapterStep(move.kind, move.axes, before, after, move.backward, dim, cut, to_dim, to_cut)


def _cut(layout: Layout, key: PlaceKey, count: int, mesh: Mesh, *, exclude: str) -> CutSizes:
    """The local form of a dim around one cut atom: without the cut along ``exclude``, with all
    other cuts. ``count``: how many axes of the atom itself are applied.
    """
    dim = key[0]
    outer: Size = 1
    sizes: list[Size] = []
    found: tuple[Size, ...] | None = None
    element: tuple[Size, ...] = ()
    seen_outer: Size = 1
    # Atoms before the one that is sought multiply to ``outer``, those behind it to ``inner``.
    # ``seen_outer`` is the product of their uncut sizes, by which the atom is known.
    for atom in layout.dims[dim]:
        known = (seen_outer, atom.segments, atom.element)
        if found is None and atom.axes and known == key[1:]:
            if atom.element:
                # One element, and where it stands among those that the axes before have left here.
                found, element = (1,), element_in(atom.element, atom.axes[:count])
            else:
                found = _local_segments(atom, mesh, atom.axes[:count])
            outer, sizes = product(sizes), []
        else:
            sizes.append(
                _plain_sum(_local_segments(atom, mesh, tuple(a for a in atom.axes if a != exclude)))
            )
        seen_outer = product((seen_outer, atom.size))
    assert found is not None, f"{key} is not an atom of {layout}"
    return CutSizes(found, outer, product(sizes), element)


def cut_sizes(layout: Layout, dim: int, axis: str, mesh: Mesh) -> CutSizes:
    """The local form of a dim of ``layout`` without its innermost cut, which is along ``axis``. The
    layout is in canonical form.
    """
    place = next(
        place for place in cut_places(layout, mesh) if place.dim == dim and place.axes[-1] == axis
    )
    return _cut(layout, place.key, len(place.axes) - 1, mesh, exclude=axis)


def _plain_sum(sizes: tuple[Size, ...]) -> Size:
    return sum(sizes) if len(sizes) > 1 else sizes[0]


def _local_segments(atom: Atom, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Size, ...]:
    if atom.element and axes:
        return (num_held(atom.element, axes),)
    segments = atom.segments
    for axis in axes:
        segments = tuple(local_size(size, axis, mesh.axis_size(axis)) for size in segments)
    return segments


def _build(shape: tuple[Size, ...], state: State, density: Density | None) -> Layout:
    """The layout of a tensor of ``shape`` that is cut as ``state`` says. What lies between two cut
    atoms of a dim is one uncut atom.
    """
    dims: list[Dim] = []
    for dim, size in enumerate(shape):
        atoms: list[Atom] = []
        # Elements of the dim outside of the next atom.
        outer: Size = 1
        for place in state.places:
            if place.dim != dim:
                continue
            # What lies between two cuts is one uncut atom, left out where it is 1.
            gap = quotient(place.outer, outer)
            if gap != 1:
                atoms.append(Atom((gap,)))
            atoms.append(Atom(place.segments, place.axes, place.element))
            outer = product((place.outer, place.size))
        # No quotient of 0 says how large a part is: a dim without elements is one atom.
        rest = quotient(size, outer) if size != 0 else size
        if rest != 1 or not atoms:
            atoms.append(Atom((rest,)))
        dims.append(tuple(atoms))
    return Layout(tuple(dims), state.partial, state.grad_partial, density)
