"""Conversions up to names and sizes: what ``convert`` does, once per pattern.

A conversion depends on where the cut atoms of both layouts stand to each other, not on how long the
dims are or which of them they are: gathering the batch is like gathering the heads. A planner
compares many thousand pairs of layouts that follow a few thousand patterns. Sizes come back in when
the steps of a pattern are applied to a pair.

Everything that is compared often has a number, so that finding the steps of a pair takes four
look-ups of small keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwright.compiler.plan.layout_cuts import Place, PlaceKey, fits
from shardwright.compiler.plan.layout_moves import Move, State, moves
from shardwright.runtime.layout import Layout, Mesh

T = TypeVar("T", bound=Hashable)

Cuts = tuple[tuple[int, tuple[str, ...]], ...]
"""Which places are cut by which axes; places by number."""


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """A layout that patterns can be found for. ``keys``: the number of its places' keys;
    ``is_static``: whether all their sizes are numbers: only then two forms can be compared.
    """

    number: int
    state: State
    keys: int
    is_static: bool


@dataclass(frozen=True, eq=False, slots=True)
class Places:
    """The places of two layouts together: ``keys`` in order, the ``order`` of each, and the number
    of how they stand to each other.
    """

    number: int
    keys: tuple[PlaceKey, ...]
    order: Mapping[PlaceKey, int]
    relations: int


@dataclass(frozen=True, slots=True)
class PatternStep:
    """One adapter step. ``place``: the number of the place it cuts or gathers, and ``count`` axes
    cut it before.
    """

    kind: str
    axes: tuple[str, ...]
    backward: str | None
    before: Cuts
    after: Cuts
    place: int | None
    count: int


class _Numbered(Generic[T]):
    """Items by number, in the order they were met."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, item: T) -> int:
        found = self._numbers.setdefault(item, len(self.items))
        if found == len(self.items):
            self.items.append(item)
        return found


class Patterns:
    """The patterns met so far on one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._num_forms = 0
        self._keys = _Numbered[tuple[PlaceKey, ...]]()
        self._relations = _Numbered[Hashable]()
        self._part_numbers = _Numbered[Hashable]()
        self._places: dict[tuple[PlaceKey, ...], Places] = {}
        self._together: dict[tuple[int, int], Places] = {}
        self._parts: dict[tuple[int, int], int] = {}
        self._steps: dict[tuple[int, int, int], tuple[PatternStep, ...]] = {}
        self._known: dict[PatternStep, PatternStep] = {}

    def form(self, layout: Layout, *, differentiable: bool = True) -> Form:
        """The form of a layout of a value."""
        state = State.of(layout, self.mesh, differentiable=differentiable)
        keys = tuple(place.key for place in state.places)
        is_static = all(
            isinstance(size, int) for _, outer, segments, _ in keys for size in (outer, *segments)
        )
        self._num_forms += 1
        return Form(self._num_forms, state, self._keys.number(keys), is_static)

    def steps(self, source: Form, target: Form) -> tuple[Places, tuple[PatternStep, ...]]:
        """The places of both forms, and the steps over their numbers. Equal places and equal steps
        are the same objects.
        """
        both = (source.keys, target.keys)
        places = self._together.get(both)
        if places is None:
            places = self._together[both] = self._join(both)
        # What `moves` asks of two states: nothing else of them may enter here, or be left out.
        pattern = (places.relations, self._on(places, source), self._on(places, target))
        found = self._steps.get(pattern)
        if found is None:
            found = self._steps[pattern] = self._abstract(places, source, target)
        return places, found

    def _join(self, both: tuple[int, int]) -> Places:
        # Sorted, so that pairs of layouts that differ by the numbers of dims alone meet in one
        # pattern.
        keys = tuple(sorted({key for number in both for key in self._keys.items[number]}))
        found = self._places.get(keys)
        if found is None:
            order = {key: index for index, key in enumerate(keys)}
            relations = self._relations.number(_relations(keys))
            found = self._places[keys] = Places(len(self._places), keys, order, relations)
        return found

    def _on(self, places: Places, form: Form) -> int:
        """The number of what a form does to these places."""
        key = (places.number, form.number)
        found = self._parts.get(key)
        if found is None:
            state = form.state
            found = self._parts[key] = self._part_numbers.number(
                (_cuts(state, places), state.partial, state.grad_partial)
            )
        return found

    def _abstract(self, places: Places, source: Form, target: Form) -> tuple[PatternStep, ...]:
        steps, now = [], source.state
        for move in moves(source.state, target.state, self.mesh):
            step = _step(move, _cuts(now, places), _cuts(move.after, places))
            steps.append(self._known.setdefault(step, step))
            now = move.after
        return tuple(steps)


def _relations(keys: tuple[PlaceKey, ...]) -> tuple[Hashable, ...]:
    """Which places share a dim and whether they can be cut together there; which are single
    elements.
    """
    together: list[bool | None] = []
    for one, other in itertools.combinations(keys, 2):
        # Cuts of different dims never hinder each other.
        same_dim = one[0] == other[0]
        together.append(fits(Place(*one, ()), [Place(*other, ())]) if same_dim else None)
    return len(keys), tuple(together), tuple(key[2:] == ((1,), ()) for key in keys)


def _cuts(state: State, places: Places) -> Cuts:
    return tuple((places.order[place.key], place.axes) for place in state.places)


def _step(move: Move, before: Cuts, after: Cuts) -> PatternStep:
    place, count = None, 0
    # The side on which the axis cuts something; both sides of an all-to-all: its dim is not asked.
    for cuts in (before, after):
        for index, axes in cuts:
            if move.axes[0] in axes:
                place, count = index, axes.index(move.axes[0])
    return PatternStep(move.kind, move.axes, move.backward, before, after, place, count)
