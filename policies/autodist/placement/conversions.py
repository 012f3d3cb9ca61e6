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

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.kept_weights import VIEWS
from shardwright.compiler.passes.copy_trees import (
    MAX_EXACT,
    best_tree,
    tree_weights,
    trees,
)
from shardwright.compiler.plan.conversion import GATHERS, convert
from shardwright.policies.autodist.placement.routes import Route, Routes, Traits
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
    keeps its result keeps what it is given: of a weight, a gather or a view. ``forward_s``: each
    time that it runs, without what counts nothing as the program begins it ahead.
    """

    forward_s: float
    backward_s: float
    gathers: bool
    is_kept: bool

    @property
    def regathered_s(self) -> float:
        """The cost of gathering a kept weight once more."""
        return self.forward_s if self.gathers and self.is_kept else 0.0


@dataclass(frozen=True, eq=False)
class _Prices:
    """Conversions of some pairs of layouts, ``[pair]``: their weights among trees, and their
    seconds. ``forward_s``: of a forward, without what is hidden of gathers; ``gathered_s``: of one,
    from the first gather on. ``regathered_s``: of gathering a kept weight once more.
    """

    weights: Seconds
    forward_s: Seconds
    backward_s: Seconds
    gathered_s: Seconds
    regathered_s: Seconds
    gathers: npt.NDArray[np.bool_]

    def seconds(self, kind: ValueType, *, inside: bool = False) -> Seconds:
        """Per step. ``inside``: of a copy made where everything is computed again."""
        again_s = np.zeros(())
        if kind.again is Again.ALL or (kind.again is Again.FROM_GATHERS and inside):
            again_s = self.forward_s
        elif kind.again is Again.FROM_GATHERS:
            again_s = self.gathered_s
        elif kind.is_kept:
            again_s = self.regathered_s
        found: Seconds = kind.microbatches * (self.forward_s + again_s + self.backward_s)
        return found


@dataclass(eq=False)
class _Steps:
    """What each step takes on the ranks of a mesh, by number, ``[step]``; the last one is none,
    which takes nothing. ``is_kept``, ``hidden_s``: of a weight, whether it is kept, and what of its
    forward is hidden.
    """

    forward_s: Seconds
    backward_s: Seconds
    gathers: npt.NDArray[np.bool_]
    is_kept: npt.NDArray[np.bool_]
    hidden_s: Seconds

    @classmethod
    def of(cls, kinds: Sequence[str], times: Sequence[OpTime], hidden_s: Sequence[float]) -> _Steps:
        return cls(
            np.array([*(time.forward_s for time in times), 0.0]),
            np.array([*(time.backward_s for time in times), 0.0]),
            np.array([*(kind in GATHERS for kind in kinds), False]),
            np.array([*map(_keeps, kinds), True]),
            np.array([*hidden_s, 0.0]),
        )

    def added_up(self, kind: ValueType, routes: Sequence[Route]) -> _Prices:
        """The routes of values of one kind: their steps one after the other."""
        longest, nothing = max((len(route.steps) for route in routes), default=0), [-1]
        rows = [[*route.steps, *nothing * (longest - len(route.steps))] for route in routes]
        steps = np.array(rows, dtype=np.int64).reshape(len(routes), longest)  # [pair, place]
        forward_s = self.forward_s[steps]
        backward_s = self.backward_s[steps] * float(kind.has_backward)
        # From the first gather on, what comes of it is not kept for backward, but made again.
        gathers = self.gathers[steps]
        since = np.logical_or.accumulate(gathers, axis=1)
        regathered_s = np.zeros_like(forward_s)
        if kind.is_weight:
            forward_s = forward_s - self.hidden_s[steps]
            # The last steps, as far as what keeps the result keeps what they make.
            kept = np.logical_and.accumulate(self.is_kept[steps][:, ::-1], axis=1)[:, ::-1]
            regathered_s = np.where(kept & gathers, forward_s, 0.0)
        return _Prices(
            np.array([route.weight for route in routes]),
            _sums(forward_s),
            _sums(backward_s),
            _sums(np.where(since, forward_s, 0.0)),
            _sums(regathered_s),
            np.asarray(gathers.any(axis=1)),
        )


def _sums(values: Seconds) -> Seconds:
    """``[pair, place]``, added up one place after the other, as a program's steps are."""
    total = np.zeros(len(values))
    for column in values.T:
        total = total + column
    return total


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
    """Prices on one mesh. ``ranks``: the global ranks the mesh lies on, in its order. ``routes``:
    those of the mesh, shared with other ranks that it lies on. ``hidden``: the share of the message
    of each gather of a weight that costs nothing where the program may begin it ahead.
    """

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        hardware: Hardware,
        layouts: LayoutTable,
        routes: Routes | None = None,
        hidden: float = 0.0,
    ) -> None:
        self.mesh, self.ranks, self.hardware, self.layouts = mesh, tuple(ranks), hardware, layouts
        self.routes = routes or Routes(mesh, layouts)
        self._hidden = hidden
        self._times: list[OpTime] = []  # of steps, by number
        self._hidden_s: list[float] = []
        self._steps: _Steps | None = None
        self._tables: dict[Hashable, _Table] = {}
        self._names: dict[int, str] = {}

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
        prices = self._priced(kind, [(start, goal) for goal, start in tree.items()])
        gathers = dict(zip(tree, prices.gathers.tolist(), strict=True))

        def inside(goal: int) -> bool:
            return goal in tree and (gathers[goal] or inside(tree[goal]))

        outside_s, inside_s = (
            prices.seconds(kind, inside=where).tolist() for where in (False, True)
        )
        total = 0.0
        for start, once_s, again_s in zip(tree.values(), outside_s, inside_s, strict=True):
            total += again_s if inside(start) else once_s
        return total

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
        (route,) = self.routes.of(_traits(kind), [(source, goal)])
        return self.times_of(kind, route)

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
            weights, seconds = np.full((size, size), np.nan), np.full((size, size), np.nan)
            gathers = np.zeros((size, size), dtype=bool)
            for known in (weights, seconds):
                np.fill_diagonal(known, 0.0)
            inside = np.zeros((size, size)) if kind.again is Again.FROM_GATHERS else None
            places = [
                (i, j)
                for i, source in enumerate(universe)
                if source in starts
                for j, goal in enumerate(universe)
                if i != j and goal in goals
            ]
            if places:
                prices = self._priced(kind, [(universe[i], universe[j]) for i, j in places])
                at = tuple(np.array(places, dtype=np.int64).T)
                weights[at], gathers[at] = prices.weights, prices.gathers
                seconds[at] = prices.seconds(kind)
                if inside is not None:
                    inside[at] = prices.seconds(kind, inside=True)
            found = self._tables[key] = _Table(
                {g: i for i, g in enumerate(universe)}, weights, seconds, inside, gathers
            )
        return found

    def _priced(self, kind: ValueType, pairs: Sequence[tuple[int, int]]) -> _Prices:
        """The conversions of some pairs of layouts, from and to."""
        routes = self.routes.of(_traits(kind), pairs)
        self._time_steps()
        assert self._steps is not None
        return self._steps.added_up(kind, routes)

    def times_of(self, kind: ValueType, route: Route) -> tuple[StepTime, ...]:
        """The adapters of a route, one after the other."""
        self._time_steps()
        found = []
        for number in route.steps:
            name, time = self.routes.steps[number].kind, self._times[number]
            backward_s = time.backward_s if kind.has_backward else 0.0
            is_kept = kind.is_weight and _keeps(name)
            hidden_s = self._hidden_s[number] if kind.is_weight else 0.0
            forward_s = time.forward_s - hidden_s
            found.append(StepTime(forward_s, backward_s, name in GATHERS, is_kept))
        return tuple(found)

    def _time_steps(self) -> None:
        """Time the steps that routes have met since the last call."""
        first = len(self._times)
        if self._steps is None or first < len(self.routes.steps):
            further = range(first, len(self.routes.steps))
            self._times += [
                self.routes.time(number, self.ranks, self.hardware) for number in further
            ]
            self._hidden_s += [
                self._hidden * self.routes.message_s(number, self.ranks, self.hardware)
                for number in further
            ]
            kinds = [step.kind for step in self.routes.steps]
            self._steps = _Steps.of(kinds, self._times, self._hidden_s)

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


def _traits(kind: ValueType) -> Traits:
    """What routes depend on."""
    return Traits(kind.dtype, kind.differentiable, kind.has_backward)


def _keeps(name: str) -> bool:
    """Whether what keeps the result of a step of a weight keeps what it is given."""
    return name == "all_gather" or name in VIEWS


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
