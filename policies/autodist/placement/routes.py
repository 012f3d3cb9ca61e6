"""The steps of conversions between the layouts of one mesh, by number, and what lowering weighs
them by. They do not depend on the ranks that the mesh lies on: what a step takes there is asked for
its number (``conversions.py``).

Most pairs of layouts differ in few numbers from others. So a *route*, the steps of one conversion,
is found by the pattern of the pair (:mod:`shardwright.compiler.plan.patterns`), and a step is known
by its movement: kind, axes, and the bytes of the largest piece before and behind it.

Example: on ``x=4`` a tensor of 100 MB is cut along its first dim, and is to be whole. The pattern
says one step, ``all_gather`` over ``x``; its movement has 25 MB before it and 100 MB behind it, and
pieces that lie end to end. A weight of the same size has the same movement, and so the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwright.compiler.cost.communication import elements_sent, estimate
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.adapter_time import (
    Movement,
    message_s,
    movement_of,
    movement_time,
    step_time,
)
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.passes.copy_trees import STEP_WEIGHT, weight
from shardwright.compiler.plan.conversion import AdapterStep, convert
from shardwright.compiler.plan.patterns import Form, Patterns, PatternStep, Places
from shardwright.policies.autodist.placement.pattern_steps import Pieces
from shardwright.policies.autodist.placement.strategies import LayoutTable
from shardwright.runtime.layout import Mesh


class Route(NamedTuple):
    """The steps of one conversion, by number, and the weight that lowering chooses trees by."""

    weight: float
    steps: tuple[int, ...]


class Traits(NamedTuple):
    """What of a value its routes depend on beside the layouts. ``has_backward``: whether the
    backward of its adapters counts.
    """

    dtype: torch.dtype
    differentiable: bool
    has_backward: bool


@dataclass(frozen=True, slots=True)
class UnsizedStep:
    """A step between layouts that patterns say nothing of: with sizes that are not known yet, or
    with rows left out.
    """

    step: AdapterStep
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        return self.step.kind


class Routes:
    """The routes met so far on one mesh, and their ``steps`` by number."""

    def __init__(self, mesh: Mesh, layouts: LayoutTable) -> None:
        self.mesh, self.layouts, self.patterns = mesh, layouts, Patterns(mesh)
        self.steps: list[Movement | UnsizedStep] = []
        self._numbers: dict[object, int] = {}
        self._known: dict[Traits, dict[tuple[int, int], Route]] = {}
        self._tensors: dict[tuple[object, ...], _Tensor] = {}
        self._forms: dict[tuple[int, bool], Form] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}

    def of(self, traits: Traits, pairs: Iterable[tuple[int, int]]) -> list[Route]:
        """The routes of some pairs of layouts, from and to, by number."""
        known = self._known.setdefault(traits, {})
        found = []
        for pair in pairs:
            route = known.get(pair)
            if route is None:
                route = known[pair] = self._find(traits, *pair)
            found.append(route)
        return found

    def time(self, number: int, ranks: tuple[int, ...], hardware: Hardware) -> OpTime:
        """The seconds of a step on these ranks, in the order of the mesh."""
        step = self.steps[number]
        if isinstance(step, Movement):
            return movement_time(step, self.mesh, ranks, hardware)
        return step_time(step.step, step.dtype, self.mesh, ranks, hardware)

    def message_s(self, number: int, ranks: tuple[int, ...], hardware: Hardware) -> float:
        """The seconds of a gather's message on these ranks; 0 for other steps."""
        step = self.steps[number]
        if isinstance(step, UnsizedStep):
            if step.kind != "all_gather":
                return 0.0
            step = movement_of(step.step, step.dtype, self.mesh)
        return message_s(step, self.mesh, ranks, hardware)

    def _find(self, traits: Traits, source: int, goal: int) -> Route:
        forms = self._form(source, traits.differentiable), self._form(goal, traits.differentiable)
        # Patterns know places, not which rows are left out.
        dense = self.layouts[source].density is None
        if not (dense and forms[0].is_static and forms[1].is_static):
            return self.converted(traits, source, goal)
        # Conversions of the same kind differ in sizes only: pattern first, then its steps for this
        # tensor.
        places, steps = self.patterns.steps(*forms)
        key = (self._shape(source), places.number, traits.dtype.itemsize, traits.has_backward)
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = _Tensor(self, key[0], places, traits)
        return tensor.route(steps)

    def converted(self, traits: Traits, source: int, goal: int) -> Route:
        """The route of one pair, step by step, whatever patterns say."""
        steps = convert(
            self.layouts[source],
            self.layouts[goal],
            self.mesh,
            differentiable=traits.differentiable,
        )
        numbers = tuple(self.number(UnsizedStep(step, traits.dtype)) for step in steps)
        return Route(weight(steps, self.mesh, takes_gradient=traits.has_backward), numbers)

    def number(self, step: Movement | UnsizedStep) -> int:
        """The number of a step; equal ones have the same."""
        found = self._numbers.setdefault(step, len(self.steps))
        if found == len(self.steps):
            self.steps.append(step)
        return found

    def movement_number(self, step: PatternStep, before: int, after: int, end_to_end: bool) -> int:
        """The number of the movement of a step of a pattern."""
        key = step.kind, step.backward, step.axes, before, after, end_to_end
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = self.number(Movement(*key))
        return found

    def _form(self, layout: int, differentiable: bool) -> Form:
        found = self._forms.get((layout, differentiable))
        if found is None:
            form = self.patterns.form(self.layouts[layout], differentiable=differentiable)
            found = self._forms[layout, differentiable] = form
        return found

    def _shape(self, layout: int) -> tuple[int, ...]:
        found = self._shapes.get(layout)
        if found is None:
            found = self._shapes[layout] = tuple(
                round(estimate(size)) for size in self.layouts[layout].shape
            )
        return found


class _Tensor:
    """The routes of tensors of one shape that may be cut at some places. Patterns and their steps
    are the same objects wherever they are met, so they are looked up by identity.
    """

    def __init__(
        self, routes: Routes, shape: tuple[int, ...], places: Places, traits: Traits
    ) -> None:
        self._routes, self._item, self._has_backward = (
            routes,
            traits.dtype.itemsize,
            traits.has_backward,
        )
        self._pieces = Pieces(shape, places.keys, dict(routes.mesh.axes))
        self._by_pattern: dict[int, Route] = {}
        self._by_step: dict[int, tuple[float, int]] = {}

    def route(self, steps: Sequence[PatternStep]) -> Route:
        found = self._by_pattern.get(id(steps))
        if found is None:
            elements, numbers = 0.0, []
            for step in steps:
                each = self._by_step.get(id(step))
                if each is None:
                    each = self._by_step[id(step)] = self._measured(step)
                elements += each[0]
                numbers.append(each[1])
            # Added as lowering does, so that equal trees tie.
            found = Route(elements + STEP_WEIGHT * len(numbers), tuple(numbers))
            self._by_pattern[id(steps)] = found
        return found

    def _measured(self, step: PatternStep) -> tuple[float, int]:
        """The elements that a rank sends in a step, and the number of its movement."""
        pieces = self._pieces
        # Bytes of the largest piece before and behind the step.
        before, after = pieces.largest(step.before), pieces.largest(step.after)
        number = self._routes.movement_number(
            step, before * self._item, after * self._item, pieces.end_to_end(step)
        )
        # Elements on average, by which lowering weighs trees.
        forward, backward = elements_sent(
            step.kind,
            step.backward,
            self._routes.mesh.num_ranks(step.axes),
            pieces.average(step.before),
            pieces.average(step.after),
        )
        return forward + (backward if self._has_backward else 0.0), number
