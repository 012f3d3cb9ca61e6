"""What it costs to bring a value from the layout it is made in to those its readers want, for all
layouts at once.

A value is converted along the tree that lowering builds
(:mod:`shardwright.compiler.passes.copy_trees`), which is chosen by elements sent; here it is also
given its seconds, as the sum of its adapters'. Tables are shared by all values of one dtype that
have the same layouts to choose from.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.adapter_time import step_time
from shardwright.compiler.cost.time.kept_weights import VIEWS
from shardwright.compiler.passes.copy_trees import (
    MAX_EXACT,
    STEP_WEIGHT,
    best_tree,
    tree_weights,
    trees,
    weight,
)
from shardwright.compiler.plan.conversion import GATHERS, convert
from shardwright.compiler.plan.patterns import Form, Patterns
from shardwright.policies.autodist.placement.pattern_steps import Pieces, StepPrices
from shardwright.policies.autodist.placement.strategies import Ids, LayoutTable, Seconds
from shardwright.runtime.layout import Mesh

LayoutSet = tuple[int, ...]
"""The layouts some readers want of one value: distinct numbers, ascending."""

MAX_GOALS = MAX_EXACT - 1
"""No set of wanted layouts is larger, so that every tree is the one lowering finds, whatever the
source is.
"""


class Again(Enum):
    """Which adapters of a value run again in the backward, as parts of recompute regions."""

    NONE = "none"
    FROM_GATHERS = (
        "those from the first gather on: the others run in front of the region that reads the value"
    )
    ALL = "all"


@dataclass(frozen=True, slots=True)
class ValueType:
    """What conversions depend on beside the layouts. ``microbatches``: how often they run per step.
    ``is_weight``: it is a parameter, whose pieces are gathered for their uses only; ``is_kept``:
    and once more for the backward of those that keep it.
    ``takes_gradient``: whether the backward of its adapters runs, if it is differentiable.
    """

    dtype: torch.dtype
    differentiable: bool
    microbatches: int = 1
    is_weight: bool = False
    again: Again = Again.NONE
    takes_gradient: bool = True
    is_kept: bool = False

    @property
    def has_backward(self) -> bool:
        """Whether the backward of its adapters counts."""
        return self.differentiable and self.takes_gradient


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one adapter of a conversion, and whether it gathers. ``is_kept``: whether what
    keeps its result keeps what it is given: of a weight, a gather or a view.
    """

    forward_s: float
    backward_s: float
    gathers: bool
    is_kept: bool

    @property
    def regathered_s(self) -> float:
        """The cost of gathering a kept weight once more."""
        return self.forward_s if self.gathers and self.is_kept else 0.0


@dataclass(frozen=True, slots=True)
class _Pair:
    """One conversion: its weight among trees, and its seconds. ``gathered_s``: of the forward, from
    the first gather on.
    ``regathered_s``: of gathering a kept weight once more.
    """

    weight: float
    forward_s: float
    backward_s: float
    gathered_s: float
    regathered_s: float
    gathers: bool

    @classmethod
    def of(cls, weight: float, steps: Sequence[StepTime]) -> _Pair:
        # One pass over the steps, as a mesh of two axes has tens of thousands of conversions. From
        # the first gather on, what comes of it is not kept for backward, but made again.
        forward_s = backward_s = gathered_s = 0.0
        gathers = False
        for step in steps:
            gathers = gathers or step.gathers
            forward_s += step.forward_s
            backward_s += step.backward_s
            if gathers:
                gathered_s += step.forward_s
        regathered_s = sum(step.regathered_s for step in kept_steps(steps)) if gathers else 0.0
        return cls(weight, forward_s, backward_s, gathered_s, regathered_s, gathers)

    def seconds(self, kind: ValueType, *, inside: bool = False) -> float:
        """Per step. ``inside``: of a copy made where everything is computed again."""
        again_s = 0.0
        if kind.again is Again.ALL or (kind.again is Again.FROM_GATHERS and inside):
            again_s = self.forward_s
        elif kind.again is Again.FROM_GATHERS:
            again_s = self.gathered_s
        elif kind.is_kept:
            again_s = self.regathered_s
        return kind.microbatches * (self.forward_s + again_s + self.backward_s)


@dataclass(frozen=True, eq=False)
class _Table:
    """Conversions between the layouts of a universe, [from, to]. ``inside``: their seconds from a
    copy that is computed again itself, if they differ; ``gathers``: which gather something.
    """

    position: dict[int, int]
    weights: Seconds
    seconds: Seconds
    inside: Seconds | None
    gathers: npt.NDArray[np.bool_]


class Conversions:
    """Prices on one mesh. ``ranks``: the global ranks the mesh lies on, in its order."""

    def __init__(
        self, mesh: Mesh, ranks: Sequence[int], hardware: Hardware, layouts: LayoutTable
    ) -> None:
        self.mesh, self.ranks, self.hardware, self.layouts = mesh, tuple(ranks), hardware, layouts
        self._pairs: dict[Hashable, dict[tuple[int, int], _Pair]] = {}
        self._tables: dict[Hashable, _Table] = {}
        self._prices: dict[Hashable, StepPrices] = {}
        self._names: dict[int, str] = {}
        self._forms: dict[tuple[int, bool], Form] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._sizes = dict(mesh.axes)
        self.patterns = Patterns(mesh)

    def seconds(
        self, kind: ValueType, sources: Sequence[int], sets: Sequence[LayoutSet]
    ) -> Seconds:
        """``[sources, sets]``: seconds of making all layouts of a set, for each layout the value
        may be made in.
        """
        goals_of_all = {goal for wanted in sets for goal in wanted}
        universe = tuple(sorted({*sources, *goals_of_all}, key=self._name))
        # A copy is made from another one only where a reader wants both: most sets are of one
        # layout, and most pairs of goals are never asked for.
        several = {goal for wanted in sets if len(wanted) > 1 for goal in wanted}
        # Seconds and weights of the pairs of these layouts, computed once.
        table = self._table(
            kind, universe, frozenset({*sources, *several}), frozenset(goals_of_all)
        )
        where = table.position
        # Sets of one size are priced together, as arrays.
        by_size: dict[int, list[int]] = {}
        for index, wanted in enumerate(sets):
            by_size.setdefault(len(wanted), []).append(index)
        found = np.zeros((len(sources), len(sets)))
        for size, members in by_size.items():
            goals = np.sort(
                np.array([[where[g] for g in sets[i]] for i in members], dtype=np.int64), axis=1
            )
            for row, source in enumerate(sources):
                found[row, members] = _from_source(
                    table, where[source], goals.reshape(len(members), size)
                )
        return found

    def exact(self, kind: ValueType, source: int, goals: LayoutSet) -> float:
        """Seconds of making a value in all of some layouts, however many."""
        tree = self.tree(kind, source, goals)
        pairs = {goal: self._pair(kind, start, goal) for goal, start in tree.items()}

        def inside(goal: int) -> bool:
            return goal in tree and (pairs[goal].gathers or inside(tree[goal]))

        return sum(pairs[goal].seconds(kind, inside=inside(start)) for goal, start in tree.items())

    def tree(self, kind: ValueType, source: int, goals: Iterable[int]) -> dict[int, int]:
        """Every layout to be made, to the one it is made from."""
        # In a fixed order, so that plans do not depend on the order of sets.
        left = sorted({goal for goal in goals if goal != source}, key=self._name)
        if not left:
            return {}
        universe = tuple(sorted({source, *left}, key=self._name))
        table = self._table(kind, universe, frozenset(universe), frozenset(left))
        start, ends = table.position[source], [table.position[goal] for goal in left]
        # The cheapest arborescence: from the source, or from a copy that is made anyway.
        parents = best_tree(table.weights[start, ends], table.weights[np.ix_(ends, ends)])
        return {
            goal: source if parent < 0 else left[parent]
            for goal, parent in zip(left, parents, strict=True)
        }

    def steps(self, kind: ValueType, source: int, goal: int) -> tuple[StepTime, ...]:
        """The adapters of one conversion, one after the other."""
        return self._weighed(kind, source, goal)[1]

    def gathers(self, kind: ValueType, source: int, goal: int) -> bool:
        """Whether a conversion gathers pieces."""
        layouts = self.layouts[source], self.layouts[goal]
        return any(
            step.kind == "all_gather"
            for step in convert(*layouts, self.mesh, differentiable=kind.differentiable)
        )

    def _table(
        self,
        kind: ValueType,
        universe: tuple[int, ...],
        starts: frozenset[int],
        goals: frozenset[int],
    ) -> _Table:
        """The conversions from some layouts of a universe to others of it; the rest is no
        number.
        """
        key = (kind, universe, starts, goals)
        found = self._tables.get(key)
        if found is None:
            # ``[from, to]``: the weight that lowering chooses by, the seconds, and whether a weight
            # is gathered.
            size = len(universe)
            weights, seconds, gathers = (
                np.full((size, size), np.nan),
                np.full((size, size), np.nan),
                np.zeros((size, size), dtype=bool),
            )
            for known in (weights, seconds):
                np.fill_diagonal(known, 0.0)
            inside = np.zeros((size, size)) if kind.again is Again.FROM_GATHERS else None
            for i, source in enumerate(universe):
                for j, goal in enumerate(universe):
                    if i != j and source in starts and goal in goals:
                        pair = self._pair(kind, source, goal)
                        weights[i, j], seconds[i, j], gathers[i, j] = (
                            pair.weight,
                            pair.seconds(kind),
                            pair.gathers,
                        )
                        if inside is not None:
                            inside[i, j] = pair.seconds(kind, inside=True)
            found = self._tables[key] = _Table(
                {g: i for i, g in enumerate(universe)}, weights, seconds, inside, gathers
            )
        return found

    def _pair(self, kind: ValueType, source: int, goal: int) -> _Pair:
        pairs = self._pairs.setdefault(
            (kind.dtype, kind.differentiable, kind.is_weight, kind.takes_gradient), {}
        )
        found = pairs.get((source, goal))
        if found is None:
            found = pairs[source, goal] = _Pair.of(*self._weighed(kind, source, goal))
        return found

    def _weighed(
        self, kind: ValueType, source: int, goal: int
    ) -> tuple[float, tuple[StepTime, ...]]:
        """The weight of a conversion, and its steps."""
        forms = self._form(source, kind.differentiable), self._form(goal, kind.differentiable)
        # Patterns know places, not which rows are left out.
        dense = self.layouts[source].density is None
        is_static = forms[0].is_static and forms[1].is_static
        return (self._priced if dense and is_static else self._converted)(kind, source, goal)

    def _converted(
        self, kind: ValueType, source: int, goal: int
    ) -> tuple[float, tuple[StepTime, ...]]:
        """Step by step; for layouts with sizes that are not known yet."""
        steps = convert(
            self.layouts[source], self.layouts[goal], self.mesh, differentiable=kind.differentiable
        )
        times = []
        for step in steps:
            time = step_time(
                step,
                kind.dtype,
                self.mesh,
                self.ranks,
                self.hardware,
                differentiable=kind.differentiable,
            )
            times.append(_step(kind, step.kind, time.forward_s, time.backward_s))
        return weight(steps, self.mesh, takes_gradient=kind.has_backward), tuple(times)

    def _priced(
        self, kind: ValueType, source: int, goal: int
    ) -> tuple[float, tuple[StepTime, ...]]:
        """The costs of a conversion, from the pattern of the pair instead of the pair itself."""
        differentiable = kind.differentiable
        # Conversions of the same kind differ in sizes only: pattern first, then its price for this
        # tensor.
        places, steps = self.patterns.steps(
            self._form(source, differentiable), self._form(goal, differentiable)
        )
        key = (self._shape(source), places.number, kind.dtype, kind.has_backward)
        prices = self._prices.get(key)
        if prices is None:
            tensor = Pieces(key[0], places.keys, self._sizes)
            prices = self._prices[key] = StepPrices(
                tensor,
                kind.dtype,
                self.mesh,
                self.ranks,
                self.hardware,
                differentiable=kind.has_backward,
            )
        found = [prices.of(step) for step in steps]
        times = tuple(
            _step(kind, step.kind, *price[1:]) for step, price in zip(steps, found, strict=True)
        )
        return sum(price[0] for price in found) + STEP_WEIGHT * len(
            steps
        ), times  # added as lowering does, for equal ties

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

    def _name(self, layout: int) -> str:
        """What lowering orders layouts by."""
        found = self._names.get(layout)
        if found is None:
            found = self._names[layout] = str(self.layouts[layout])
        return found


def _from_source(table: _Table, source: int, goals: Ids) -> Seconds:
    """Seconds of all sets of one size, [sets, size] in ascending order, from one source; the source
    itself is free.
    """
    total = np.zeros(len(goals))
    has_source = (goals == source).any(axis=1)
    if has_source.any():
        rest = goals[has_source]
        total[has_source] = _trees(table, source, rest[rest != source].reshape(len(rest), -1))
    total[~has_source] = _trees(table, source, goals[~has_source])
    return total


def _trees(table: _Table, source: int, goals: Ids) -> Seconds:
    """Seconds of the tree that lowering takes, per row of ``goals`` [sets, size], none of which is
    the source.
    """
    num_goals = goals.shape[1]
    if num_goals == 0 or not len(goals):
        return np.zeros(len(goals))
    # A single copy is made from the value as produced.
    if num_goals == 1:
        only: Seconds = table.seconds[source, goals[:, 0]]
        return only
    # ``[sets, size, size]``: from each copy of a set to each other.
    between = table.weights[goals[:, :, None], goals[:, None, :]]
    chosen = np.argmin(tree_weights(table.weights[source, goals], between), axis=-1)
    # The tree of least weight for each set; then the seconds of its branches.
    parents = _parents(num_goals)[chosen]  # [sets, size]
    starts = np.where(
        parents < 0, source, np.take_along_axis(goals, np.maximum(parents, 0), axis=1)
    )
    found = table.seconds[starts, goals]
    if table.inside is not None:
        again = _computed_again(parents, table.gathers[starts, goals])
        found = np.where(again, table.inside[starts, goals], found)
    total: Seconds = found.sum(axis=1)
    return total


def _computed_again(parents: Ids, gathers: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """``[sets, size]``: which copies are made from one that some gather before them makes inside of
    the region.
    """
    found = np.zeros_like(gathers)
    for _ in range(parents.shape[1] - 1):  # as deep as trees are
        found = (parents >= 0) & np.take_along_axis(found | gathers, np.maximum(parents, 0), axis=1)
    return found


def _step(kind: ValueType, name: str, forward_s: float, backward_s: float) -> StepTime:
    """The time of one adapter."""
    is_kept = kind.is_weight and (name == "all_gather" or name in VIEWS)
    return StepTime(forward_s, backward_s if kind.takes_gradient else 0.0, name in GATHERS, is_kept)


def kept_steps(steps: Sequence[StepTime]) -> Sequence[StepTime]:
    """The last ones, as far as what keeps the result of a conversion keeps what they make."""
    first = next((index for index in reversed(range(len(steps))) if not steps[index].is_kept), -1)
    return steps[first + 1 :]


@functools.cache
def _parents(num_goals: int) -> npt.NDArray[np.int64]:
    return np.array(trees(num_goals), dtype=np.int64)


def union(sets: Iterable[LayoutSet]) -> LayoutSet:
    """All layouts of some sets."""
    return tuple(sorted({layout for wanted in sets for layout in wanted}))
