"""Conversions up to names and sizes: what :func:`shardwright.compiler.plan.conversion.convert` does, once per pattern.

A conversion depends on where the cut atoms of both layouts stand to each other, not on how long the dims are or which of them
they are: gathering the batch is like gathering the heads. A planner compares many thousand pairs of layouts that follow a few
hundred patterns. Sizes come back in when the steps of a pattern are applied to a pair.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from shardwright.compiler.ir.size import Size
from shardwright.compiler.plan.conversion import Place, convert, cut_places, fits
from shardwright.runtime.layout import Layout, Mesh

Cuts = tuple[tuple[int, tuple[str, ...]], ...]
"""Which places are cut by which axes; places by number."""

PlaceKey = tuple[int, Size, tuple[Size, ...]]


@dataclass(frozen=True, eq=False)
class Places:
    """The places of two layouts: ``keys`` in order, their ``number``, and how they stand to each other."""

    keys: tuple[PlaceKey, ...]
    number: Mapping[PlaceKey, int]
    relations: tuple[Hashable, ...]


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


@dataclass(frozen=True)
class Form:
    """A layout in canonical form as its cut places and the axes it is P and G on."""

    places: tuple[Place, ...]
    partial: tuple[str, ...]
    grad_partial: tuple[str, ...]

    @classmethod
    def of(cls, layout: Layout, mesh: Mesh) -> Form:
        places = sorted(cut_places(layout, mesh), key=lambda place: place.dim)
        return cls(tuple(places), layout.partial, layout.grad_partial)

    @functools.cached_property
    def is_static(self) -> bool:
        """Whether all sizes are numbers: only then two forms can be compared."""
        return all(isinstance(size, int) for place in self.places for size in (place.outer, *place.segments))

    @functools.cached_property
    def cuts(self) -> tuple[tuple[PlaceKey, tuple[str, ...]], ...]:
        """The places by key, and the axes that cut them."""
        return tuple((place.key, place.axes) for place in self.places)


class Patterns:
    """The patterns met so far on meshes of the same axes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._steps: dict[Hashable, tuple[PatternStep, ...]] = {}
        self._places: dict[tuple[PlaceKey, ...], Places] = {}
        self._known: dict[PatternStep, PatternStep] = {}

    def steps(
        self, source: Form, target: Form, layouts: tuple[Layout, Layout], *, differentiable: bool
    ) -> tuple[Places, tuple[PatternStep, ...]]:
        """The places of both forms, and the steps over their numbers. ``layouts``: both layouts, for a new pattern.

        Equal places and equal steps are the same objects.
        """
        keys = tuple(sorted({key for form in (source, target) for key, _ in form.cuts}))
        places = self._places.get(keys)
        if places is None:
            places = self._places[keys] = Places(keys, {key: index for index, key in enumerate(keys)}, _relations(keys))
        number = places.number
        pattern = (
            places.relations,
            tuple((number[key], axes) for key, axes in source.cuts),
            source.partial,
            source.grad_partial,
            tuple((number[key], axes) for key, axes in target.cuts),
            target.partial,
            target.grad_partial,
            differentiable,
        )
        found = self._steps.get(pattern)
        if found is None:
            steps = convert(*layouts, self.mesh, differentiable=differentiable)
            abstract = (
                _abstract(step.kind, step.axis, step.backward, step.before, step.after, number, self.mesh) for step in steps
            )
            found = self._steps[pattern] = tuple(self._known.setdefault(step, step) for step in abstract)
        return places, found


def _relations(keys: tuple[PlaceKey, ...]) -> tuple[Hashable, ...]:
    """Which places share a dim and whether they can be cut together there; which are single elements."""
    together = tuple(
        None if a[0] != b[0] else fits(Place(*a, ()), [Place(*b, ())]) for i, a in enumerate(keys) for b in keys[i + 1 :]
    )
    return len(keys), together, tuple(key[2] == (1,) for key in keys)


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
