"""Conversions up to names and sizes: what :func:`shardwright.compiler.plan.conversion.convert` does, once per pattern.

A conversion depends on where the cut atoms of both layouts stand to each other, not on how long the dims are or which of them
they are: gathering the batch is like gathering the heads. A planner compares many thousand pairs of layouts that follow a few
hundred patterns. Sizes come back in when the steps of a pattern are applied to a pair.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from shardwright.compiler.ir.size import Size
from shardwright.compiler.plan.conversion import Place, convert, cut_places, fits
from shardwright.runtime.layout import Layout, Mesh

Cuts = tuple[tuple[int, tuple[str, ...]], ...]
"""Which places are cut by which axes; places by number."""

PlaceKey = tuple[int, Size, tuple[Size, ...]]


@dataclass(frozen=True, slots=True)
class PatternStep:
    """One adapter step. ``place``: the number of the place it cuts or gathers, and ``count`` axes cut it before."""

    kind: str
    axis: str
    backward: str | None
    before: Cuts
    after: Cuts
    place: int | None
    count: int


@dataclass(frozen=True, slots=True)
class Form:
    """A layout in canonical form as its cut places and the axes it is P and G on."""

    places: tuple[Place, ...]
    partial: tuple[str, ...]
    grad_partial: tuple[str, ...]

    @classmethod
    def of(cls, layout: Layout, mesh: Mesh) -> Form:
        places = sorted(cut_places(layout, mesh), key=lambda place: place.dim)
        return cls(tuple(places), layout.partial, layout.grad_partial)

    @property
    def is_static(self) -> bool:
        """Whether all sizes are numbers: only then two forms can be compared."""
        return all(isinstance(size, int) for place in self.places for size in (place.outer, *place.segments))


class Patterns:
    """The patterns met so far on meshes of the same axes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._steps: dict[Hashable, tuple[PatternStep, ...]] = {}

    def steps(
        self, source: Form, target: Form, layouts: tuple[Layout, Layout], *, differentiable: bool
    ) -> tuple[tuple[PlaceKey, ...], tuple[PatternStep, ...]]:
        """The places of both forms, and the steps over their numbers. ``layouts``: both layouts, for a new pattern."""
        keys = _ordered(source, target)
        number = {key: index for index, key in enumerate(keys)}
        pattern = (
            *_relations(keys),
            _cuts(source, number),
            _marks(source),
            _cuts(target, number),
            _marks(target),
            differentiable,
        )
        found = self._steps.get(pattern)
        if found is None:
            steps = convert(*layouts, self.mesh, differentiable=differentiable)
            found = self._steps[pattern] = tuple(
                _abstract(step.kind, step.axis, step.backward, step.before, step.after, number, self.mesh) for step in steps
            )
        return keys, found


def _ordered(source: Form, target: Form) -> tuple[PlaceKey, ...]:
    keys = {place.key for place in source.places}
    keys.update(place.key for place in target.places)
    return tuple(sorted(keys))


def _relations(keys: tuple[PlaceKey, ...]) -> tuple[Hashable, ...]:
    """Which places share a dim and whether they can be cut together there; which are single elements."""
    together = tuple(
        None if a[0] != b[0] else fits(Place(*a, ()), [Place(*b, ())]) for i, a in enumerate(keys) for b in keys[i + 1 :]
    )
    return len(keys), together, tuple(key[2] == (1,) for key in keys)


def _cuts(form: Form, number: Mapping[PlaceKey, int]) -> Cuts:
    return tuple((number[place.key], place.axes) for place in form.places)


def _marks(form: Form) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return form.partial, form.grad_partial


def _abstract(
    kind: str,
    axis: str,
    backward: str | None,
    before: Layout,
    after: Layout,
    number: Mapping[PlaceKey, int],
    mesh: Mesh,
) -> PatternStep:
    cuts = [tuple((number[place.key], place.axes) for place in cut_places(layout, mesh)) for layout in (before, after)]
    place, count = None, 0
    for state in cuts:  # the side on which the axis cuts something; both sides of an all-to-all, whose dim does not matter
        for index, axes in state:
            if axis in axes:
                place, count = index, axes.index(axis)
    return PatternStep(kind, axis, backward, cuts[0], cuts[1], place, count)
