"""What it costs to bring a value from the layout it is made in to those its readers want, for all layouts at once.

A value is converted along the tree that lowering builds (:mod:`shardwright.compiler.passes.sharing`), which is chosen by
elements sent; here it is also given its seconds, as the sum of its adapters'. Tables are shared by all values of one dtype that
have the same layouts to choose from.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shardwright.compiler.cost.adapters import step_time
from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.passes.sharing import MAX_EXACT, STEP_WEIGHT, best_tree, tree_weights, trees, weight
from shardwright.compiler.plan.conversion import convert
from shardwright.compiler.plan.patterns import Form, Patterns
from shardwright.policies.autodist.placement.pieces import Pieces, StepPrices
from shardwright.policies.autodist.placement.strategies import Ids, LayoutTable, Seconds
from shardwright.runtime.layout import Mesh

LayoutSet = tuple[int, ...]
"""The layouts some readers want of one value: distinct numbers, ascending."""

MAX_GOALS = MAX_EXACT - 1
"""No set of wanted layouts is larger, so that every tree is the one lowering finds, whatever the source is."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """What conversions depend on beside the layouts. ``forwards`` and ``backwards``: how often they run per
    step. ``is_weight``: it is a parameter, whose pieces are gathered for their uses only.
    """

    dtype: torch.dtype
    differentiable: bool
    forwards: int = 1
    backwards: int = 1
    is_weight: bool = False

    @property
    def gathers_again(self) -> bool:
        """Whether what is gathered in the forward is gathered again in the backward: parameters stored in pieces."""
        return self.is_weight and self.differentiable


@dataclass(frozen=True, eq=False)
class _Table:
    """Conversions between all layouts of a universe, [from, to]."""

    position: dict[int, int]
    weights: Seconds
    seconds: Seconds


class Conversions:
    """Prices on one mesh. ``ranks``: the global ranks the mesh lies on, in its order."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int], hardware: Hardware, layouts: LayoutTable) -> None:
        self.mesh, self.ranks, self.hardware, self.layouts = mesh, tuple(ranks), hardware, layouts
        self._pairs: dict[Hashable, dict[tuple[int, int], tuple[float, float, float]]] = {}
        self._tables: dict[Hashable, _Table] = {}
        self._prices: dict[Hashable, StepPrices] = {}
        self._names: dict[int, str] = {}
        self._forms: dict[tuple[int, bool], Form] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._sizes = dict(mesh.axes)
        self.patterns = Patterns(mesh)

    def seconds(self, kind: ValueType, sources: Sequence[int], sets: Sequence[LayoutSet]) -> Seconds:
        """``[sources, sets]``: seconds of making all layouts of a set, for each layout the value may be made in."""
        universe = tuple(sorted({*sources, *(goal for wanted in sets for goal in wanted)}, key=self._name))
        table = self._table(kind, universe)
        where = table.position
        by_size: dict[int, list[int]] = {}
        for index, wanted in enumerate(sets):
            by_size.setdefault(len(wanted), []).append(index)
        found = np.zeros((len(sources), len(sets)))
        for size, members in by_size.items():
            goals = np.sort(np.array([[where[g] for g in sets[i]] for i in members], dtype=np.int64), axis=1)
            for row, source in enumerate(sources):
                found[row, members] = _from_source(table, where[source], goals.reshape(len(members), size))
        return found

    def exact(self, kind: ValueType, source: int, goals: LayoutSet) -> float:
        """Seconds of making a value in all of some layouts, however many."""
        return sum(self.step_s(kind, start, goal) for goal, start in self.tree(kind, source, goals).items())

    def tree(self, kind: ValueType, source: int, goals: Iterable[int]) -> dict[int, int]:
        """Every layout to be made, to the one it is made from."""
        left = sorted({goal for goal in goals if goal != source}, key=self._name)
        if not left:
            return {}
        table = self._table(kind, tuple(sorted({source, *left}, key=self._name)))
        start, ends = table.position[source], [table.position[goal] for goal in left]
        parents = best_tree(table.weights[start, ends], table.weights[np.ix_(ends, ends)])
        return {goal: source if parent < 0 else left[parent] for goal, parent in zip(left, parents, strict=True)}

    def step_s(self, kind: ValueType, source: int, goal: int) -> float:
        """Seconds of one conversion."""
        _, forward, backward = self._pair(kind, source, goal)
        return kind.forwards * forward + kind.backwards * backward

    def gathers(self, kind: ValueType, source: int, goal: int) -> bool:
        """Whether a conversion gathers something."""
        layouts = self.layouts[source], self.layouts[goal]
        return any(step.kind == "all_gather" for step in convert(*layouts, self.mesh, differentiable=kind.differentiable))

    def _table(self, kind: ValueType, universe: tuple[int, ...]) -> _Table:
        key = (kind, universe)
        found = self._tables.get(key)
        if found is None:
            size = len(universe)
            weights, seconds = np.zeros((size, size)), np.zeros((size, size))
            for i, source in enumerate(universe):
                for j, goal in enumerate(universe):
                    if i != j:
                        weights[i, j], forward, backward = self._pair(kind, source, goal)
                        seconds[i, j] = kind.forwards * forward + kind.backwards * backward
            found = self._tables[key] = _Table({g: i for i, g in enumerate(universe)}, weights, seconds)
        return found

    def _pair(self, kind: ValueType, source: int, goal: int) -> tuple[float, float, float]:
        """Weight, forward and backward seconds of one conversion."""
        pairs = self._pairs.setdefault((kind.dtype, kind.differentiable, kind.is_weight), {})
        found = pairs.get((source, goal))
        if found is None:
            forms = self._form(source, kind.differentiable), self._form(goal, kind.differentiable)
            price = self._priced if forms[0].is_static and forms[1].is_static else self._converted
            found = pairs[source, goal] = price(kind, source, goal)
        return found

    def _converted(self, kind: ValueType, source: int, goal: int) -> tuple[float, float, float]:
        """Step by step; for layouts with sizes that are not known yet."""
        steps = convert(self.layouts[source], self.layouts[goal], self.mesh, differentiable=kind.differentiable)
        times = [
            step_time(step, kind.dtype, self.mesh, self.ranks, self.hardware, differentiable=kind.differentiable)
            for step in steps
        ]
        elements = weight(steps, self.mesh, differentiable=kind.differentiable)
        again = sum(
            time.forward_s for step, time in zip(steps, times, strict=True) if step.kind == "all_gather" and kind.gathers_again
        )
        return elements, sum(time.forward_s for time in times), sum(time.backward_s for time in times) + again

    def _priced(self, kind: ValueType, source: int, goal: int) -> tuple[float, float, float]:
        """The same numbers from the pattern of the pair."""
        differentiable = kind.differentiable
        places, steps = self.patterns.steps(self._form(source, differentiable), self._form(goal, differentiable))
        key = (self._shape(source), places.number, kind.dtype, differentiable)
        prices = self._prices.get(key)
        if prices is None:
            tensor = Pieces(key[0], places.keys, self._sizes)
            prices = self._prices[key] = StepPrices(
                tensor, kind.dtype, self.mesh, self.ranks, self.hardware, differentiable=differentiable
            )
        elements = forward = backward = 0.0
        for step in steps:
            price = prices.of(step)
            elements += price[0]
            forward += price[1]
            backward += price[2]
            if step.kind == "all_gather" and kind.gathers_again:
                backward += price[1]
        return elements + STEP_WEIGHT * len(steps), forward, backward  # added as lowering does, for equal ties

    def _form(self, layout: int, differentiable: bool) -> Form:
        found = self._forms.get((layout, differentiable))
        if found is None:
            form = self.patterns.form(self.layouts[layout], differentiable=differentiable)
            found = self._forms[layout, differentiable] = form
        return found

    def _shape(self, layout: int) -> tuple[int, ...]:
        found = self._shapes.get(layout)
        if found is None:
            found = self._shapes[layout] = tuple(round(estimate(size)) for size in self.layouts[layout].shape)
        return found

    def _name(self, layout: int) -> str:
        """What lowering orders layouts by."""
        found = self._names.get(layout)
        if found is None:
            found = self._names[layout] = str(self.layouts[layout])
        return found


def _from_source(table: _Table, source: int, goals: Ids) -> Seconds:
    """Seconds of all sets of one size, [sets, size] in ascending order, from one source; the source itself is free."""
    total = np.zeros(len(goals))
    has_source = (goals == source).any(axis=1)
    if has_source.any():
        rest = goals[has_source]
        total[has_source] = _trees(table, source, rest[rest != source].reshape(len(rest), -1))
    total[~has_source] = _trees(table, source, goals[~has_source])
    return total


def _trees(table: _Table, source: int, goals: Ids) -> Seconds:
    """Seconds of the tree that lowering takes, per row of ``goals`` [sets, size], none of which is the source."""
    num_goals = goals.shape[1]
    if num_goals == 0 or not len(goals):
        return np.zeros(len(goals))
    if num_goals == 1:
        only: Seconds = table.seconds[source, goals[:, 0]]
        return only
    between = table.weights[goals[:, :, None], goals[:, None, :]]
    chosen = np.argmin(tree_weights(table.weights[source, goals], between), axis=-1)
    parents = _parents(num_goals)[chosen]  # [sets, size]
    starts = np.where(parents < 0, source, np.take_along_axis(goals, np.maximum(parents, 0), axis=1))
    found: Seconds = table.seconds[starts, goals].sum(axis=1)
    return found


@functools.cache
def _parents(num_goals: int) -> npt.NDArray[np.int64]:
    return np.array(trees(num_goals), dtype=np.int64)


def union(sets: Iterable[LayoutSet]) -> LayoutSet:
    """All layouts of some sets."""
    return tuple(sorted({layout for wanted in sets for layout in wanted}))
