"""How one value reaches all the layouts that its readers ask for: a tree of conversions, the
cheapest there is.

Readers that ask for the same layout share one copy. A copy may be made from the value as produced
or from another copy, so that a sliced value wanted as R and as G is gathered once, S -> G -> R, and
both gradients go home in one collective. The tree depends on the set of layouts alone, not on the
order of the readers: planners price a value by the same function that lowering makes its adapters
with.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from shardwright.compiler.cost.communication import steps_elements
from shardwright.compiler.plan.conversion import AdapterStep, canonical, convert
from shardwright.runtime.layout import Layout, Mesh

MAX_EXACT = 4
"""The most copies for which all trees are tried. With more of them the copies are reached one by
one, cheapest first.
"""

STEP_WEIGHT = 1e-3
"""The weight of a step beside its elements, so that of trees that send the same the shortest wins.
"""

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Route:
    """How one copy is made: the steps from ``start``, which is the value as produced or another
    copy.
    """

    start: Layout
    steps: tuple[AdapterStep, ...]


def routes(
    source: Layout,
    targets: Iterable[Layout],
    mesh: Mesh,
    *,
    differentiable: bool,
    takes_gradient: bool,
) -> Mapping[Layout, Route]:
    """A route to every target that is not the source itself, by target in canonical form.

    ``differentiable``: whether a gradient may come back, so that R and G are different layouts.
    ``takes_gradient``: whether one does come back, so that what sends it counts.
    """
    source = canonical(source, mesh, differentiable=differentiable)
    goals = goals_of(
        source, (canonical(target, mesh, differentiable=differentiable) for target in targets)
    )
    return _routes(source, goals, mesh, differentiable, takes_gradient) if goals else {}


@functools.lru_cache(maxsize=4096)
def _routes(
    source: Layout,
    goals: tuple[Layout, ...],
    mesh: Mesh,
    differentiable: bool,
    takes_gradient: bool,
) -> Mapping[Layout, Route]:
    """:func:`routes` of layouts in canonical form, by goal. Values of the layers of a model have
    the same layouts, so the cache answers for most of them.
    """
    # All conversions that a tree could have: from the source or a goal to every other goal.
    stops = (source, *goals)
    steps = {
        (a, b): convert(a, b, mesh, differentiable=differentiable)
        for a in stops
        for b in goals
        if a is not b
    }
    weights = {
        pair: weight(path, mesh, takes_gradient=takes_gradient) for pair, path in steps.items()
    }
    from_source = np.array([weights[source, goal] for goal in goals])
    between = np.array([[weights[a, b] if a is not b else np.inf for b in goals] for a in goals])
    parents = best_tree(from_source, between)
    # Parents are numbers of goals, and -1 stands for the source.
    starts = [source if parent < 0 else goals[parent] for parent in parents]
    return MappingProxyType(
        {goal: Route(start, steps[start, goal]) for goal, start in zip(goals, starts, strict=True)}
    )


def goals_of(source: Layout, targets: Iterable[Layout]) -> tuple[Layout, ...]:
    """The copies to be made: the distinct targets other than the source, in an order that does not
    depend on that of the readers. All layouts are in canonical form.
    """
    goals = {target for target in targets if target != source}
    return tuple(sorted(goals, key=str) if len(goals) > 1 else goals)


def weight(steps: Sequence[AdapterStep], mesh: Mesh, *, takes_gradient: bool) -> float:
    """The weight of a conversion: the elements that a rank sends, those of a gradient included."""
    return steps_elements(steps, mesh, differentiable=takes_gradient) + STEP_WEIGHT * len(steps)


@functools.cache
def trees(num_goals: int) -> tuple[tuple[int, ...], ...]:
    """All trees over the goals. A tree is the parent of each goal: another goal, or -1 for the
    source. By Cayley's formula there are (n + 1) ** (n - 1) of them.

    The star from the source comes first.
    """

    def rooted(parents: tuple[int, ...]) -> bool:
        """Whether every goal comes to the source in at most as many steps as there are goals."""
        # Walk up from every goal. One that has not come to the source by then goes in a circle.
        for goal in range(num_goals):
            for _ in range(num_goals):
                goal = parents[goal] if goal >= 0 else goal
            if goal >= 0:
                return False
        return True

    return tuple(filter(rooted, itertools.product(range(-1, num_goals), repeat=num_goals)))


def tree_weights(from_source: Weights, between: Weights) -> Weights:
    """The weight of every tree, ``[..., trees]``, from the weights of conversions: ``from_source``
    [..., goals], and ``between`` [..., goals, goals] from the first to the second.
    """
    num_goals = from_source.shape[-1]
    columns = []
    for parents in trees(num_goals):
        total = np.zeros(np.broadcast_shapes(from_source.shape[:-1], between.shape[:-2]))
        for goal, parent in enumerate(parents):
            total = total + (from_source[..., goal] if parent < 0 else between[..., parent, goal])
        columns.append(total)
    return np.stack(columns, axis=-1)


def best_tree(from_source: Weights, between: Weights) -> tuple[int, ...]:
    """The parent of every goal in the lightest tree, the first one among equals. The arguments are
    those of :func:`tree_weights`, without leading dims.
    """
    num_goals = len(from_source)
    if num_goals <= MAX_EXACT:
        return trees(num_goals)[int(np.argmin(tree_weights(from_source, between)))]
    # Prim's algorithm: add the goal that is nearest to the tree. (For weights that depend on the
    # direction this is a heuristic.)
    parents = [-1] * num_goals
    reach = from_source.copy()
    left = set(range(num_goals))
    while left:
        goal = min(left, key=lambda index: (reach[index], index))
        left.remove(goal)
        for other in left:
            if between[goal, other] < reach[other]:
                reach[other], parents[other] = between[goal, other], goal
    return tuple(parents)
