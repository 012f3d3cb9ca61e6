"""Choose which dims of the model tensor parallelism splits: a small exact program over dim classes.

Every product with weights (linear, convolution, embedding) may have one of its dims split: an
output dim (column parallel: the input's gradient is all-reduced) or a summed dim (row parallel: the
result is all-reduced). Splitting a class splits all operators that have it. Variables are the
classes; at most one class of an operator is split; the objective is the share of all work and
memory that is spared, less the share of all possible communication that it causes. On a transformer
this gives heads, ffn and vocabulary, never the hidden dim: Megatron's plan, without knowing what a
transformer is. Within an axis a second one pays for what it adds to the sums along the first, as
both are one all-reduce. What linear operators pass on in summands is priced where it is summed at
last: of experts, once for all that a token meets; of parallel branches, where they are added.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass

from ortools.sat.python import cp_model

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.policies.dim_options import Option, Sizes, Travel, options_of, weight_classes
from shardwright.policies.weight_operands import (
    PRODUCTS,
    is_convolution,
    weight_sources,
    weights_of,
)

WORK, MEMORY, TRAFFIC = 1_000_000, 100_000, 600_000
"""What all work, all weight memory, and all traffic that could arise are worth against each other.
What is saved and what is sent both grow with ``1 - 1 / ranks``, so that the choice hardly depends
on their number.
"""


TABLE = 1_000_000
"""What all weight memory would be worth in tables that are looked up: a vocabulary is split for the
memory alone, as its lookup has no work to share out.
"""


@dataclass(frozen=True)
class Chosen:
    """The indices of the dim classes to split over an axis of ``axis_size`` ranks, and what that is
    worth: the objective.
    """

    axis_size: int
    classes: set[int]
    worth: int


def choose_dims(graph: IRGraph, axis_size: int) -> set[int]:
    """The indices of the dim classes to split over one axis of that many ranks."""
    return Chooser(graph, axis_size).choose(axis_size).classes


def choose_axes(
    graph: IRGraph, num_ranks: int, most: int = 2, channel_price: float = 1.0
) -> list[Chosen]:
    """The axes over which to split the model on that many ranks, and what over each: one; or two
    where dims have fewer elements than there are ranks, and more is gained so. The second then
    splits the same dims, as far as that is worth it, and in the place of those that are used up
    what is multiplied with them. 4 groups of heads on 8 ranks are split over 4; the feed-forward
    part and the vocabulary over 4 and 2; and the heads of a group over 2, whose ranks compute its
    keys and values alike, or not at all. ``most``: axes there may be. ``channel_price``: see
    :class:`Chooser`.
    """
    if num_ranks == 1:
        return []
    chooser = Chooser(graph, num_ranks, channel_price)
    best = [chooser.choose(num_ranks)]
    if most > 1 and chooser.is_short() and not chooser.shares_all(best[0]):
        for outer in (size for size in range(num_ranks - 1, 1, -1) if num_ranks % size == 0):
            best = max(best, chooser.pair(outer), key=lambda axes: sum(axis.worth for axis in axes))
    return best


class Chooser:
    """Chooses for axes of one model. What all work, memory and traffic are is counted as if there
    were one axis of ``num_ranks``, so that the worth of its axes adds up.

    ``channel_price``: what traffic that convolutions alone cause costs, as a part of its share. The
    first images of a stack of convolutions are so large that they make up nearly all traffic of a
    model, whatever the machine.
    """

    def __init__(self, graph: IRGraph, num_ranks: int, channel_price: float = 1.0) -> None:
        assert graph.dims is not None
        self.channel_price = channel_price
        self.graph, self.dims, self.num_ranks = graph, graph.dims, num_ranks
        self.sources = weight_sources(graph)
        self.eligible = weight_classes(graph, graph.dims, self.sources)
        # Everything whole, as the scale of what is saved and sent.
        self.whole = whole = Sizes(graph, {})
        self.total_work = sum(whole.work(op) for op in graph.ops) or 1.0
        self.total_memory = sum(whole.elements[v.name] for v in graph.parameters) or 1.0
        # The options of every class; traffic is told relative to what any of them would send.
        self.of_whole = options = self._options(num_ranks, whole)
        candidates = self._candidates(options)
        touched = {
            name for option in options if option.dim_class in candidates for name in option.touched
        }
        self.total_traffic = sum(whole.elements[name] for name in touched) or 1.0

    def is_short(self) -> bool:
        """Whether a dim that might be split has fewer elements than there are ranks, and more than
        one.
        """
        return any(map(self._is_short, self.eligible))

    def shares_all(self, chosen: Chosen) -> bool:
        """Whether the ranks of an axis share the work of every product of activations, as of
        queries and keys.
        """
        classes = self.dims.factors

        def is_shared(op: IROp) -> bool:
            factors = [factor.name for factor in op.rule.factors] if op.rule else []
            chosen_here = (f for f in factors if classes.get((op.name, f)) in chosen.classes)
            return any(self.whole.work(op, factor) for factor in chosen_here)

        products = (op for op in self.graph.ops if op.target in PRODUCTS)
        # Products with weights are counted elsewhere.
        without_weights = (op for op in products if not weights_of(op, self.sources))
        return all(is_shared(op) for op in without_weights if self.whole.work(op))

    def _is_short(self, index: int) -> bool:
        return 1 < estimate(self.dims.classes[index].size) < self.num_ranks

    def related(self, classes: Set[int]) -> set[int]:
        """Classes, and those that stand in one dim of a weight with one of them that is short."""
        short = {index for index in classes if self._is_short(index)}
        dims = [set(indices) for v in self.graph.parameters for indices in self.dims.values[v.name]]
        return set(classes).union(*(found for found in dims if found & short))

    def pair(self, outer: int) -> list[Chosen]:
        """An axis of ``outer`` ranks, and within it one of the others; :func:`choose_axes` chooses
        one of these.
        """
        first = self.choose(outer)
        return [first, self.choose(self.num_ranks // outer, first, self.related(first.classes))]

    def choose(
        self, axis_size: int, outer: Chosen | None = None, among: Set[int] | None = None
    ) -> Chosen:
        """The dim classes for an axis of that many ranks, of those in ``among``, within an
        ``outer`` axis.
        """
        left = (
            Sizes(self.graph, dict.fromkeys(outer.classes, outer.axis_size))
            if outer
            else self.whole
        )
        is_whole = outer is None and axis_size == self.num_ranks
        options = self.of_whole if is_whole else self._options(axis_size, left)
        candidates = [c for c in self._candidates(options) if among is None or c in among]
        if not candidates:
            return Chosen(axis_size, set(), 0)
        model = cp_model.CpModel()
        chosen = {c: model.new_bool_var(self.dims.classes[c].name) for c in candidates}
        by_op: dict[str, set[int]] = {}
        for option in options:
            if option.dim_class in chosen and option.saved > 0:
                by_op.setdefault(option.op.name, set()).add(option.dim_class)
        # Repeated layers say the same.
        for classes in dict.fromkeys(tuple(sorted(found)) for found in by_op.values()):
            if len(classes) > 1:
                model.add_at_most_one(chosen[c] for c in classes)
        gains, losses = self._weighed(options, chosen, axis_size, left, self._summed_along(outer))
        terms = [gain * chosen[c] for c, gain in gains.items()]
        # A value travels once, however many of the classes that it travels for are split.
        for index, (classes, loss) in enumerate(losses.items()):
            moved = model.new_bool_var(f"moves {index}")
            for c in classes:
                model.add_implication(chosen[c], moved)
            terms.append(-loss * moved)
        model.maximize(sum(terms))
        solver = cp_model.CpSolver()
        # Else Ctrl-C ends the process, from the first solution on.
        solver.parameters.catch_sigint_signal = False
        solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
        solver.parameters.max_deterministic_time = 20.0
        # The relaxation is all but integral: 10 ms in the place of 7 s for 32 layers.
        solver.parameters.linearization_level = 2
        solver.solve(model)
        return Chosen(
            axis_size,
            {c for c in candidates if solver.value(chosen[c])},
            round(solver.objective_value),
        )

    def _summed_along(self, outer: Chosen | None) -> dict[Travel, int]:
        """What is summed over the ranks of an axis, and how many these are."""
        if outer is None:
            return {}
        options = (
            option
            for option in self._options(outer.axis_size, self.whole)
            if option.dim_class in outer.classes
        )
        return {
            travel: outer.axis_size
            for option in options
            if not option.gathers
            for travel in option.travels
        }

    def _weighed(
        self,
        options: Sequence[Option],
        classes: Container[int],
        axis_size: int,
        sizes: Sizes,
        summed: Mapping[Travel, int],
    ) -> tuple[dict[int, int], dict[tuple[int, ...], int]]:
        """What splitting each of the classes gains, and what is lost for every set of them that the
        same values travel for.
        ``summed``: what is summed over so many ranks anyway. A sum over those of both axes sends
        little more.
        """
        # By what travels: the classes for which it does.
        travels: dict[Travel, set[int]] = {}
        gathered: set[Travel] = set()
        dear: set[Travel] = set()  # what others than convolutions send, too
        gains: dict[int, int] = {}
        for option in options:
            if option.dim_class not in classes:
                continue
            names = {v.name for o in option.op.operands for v in self.sources.get(o.name, ())}
            weights = sum(sizes.elements[name] for name in names)
            worth = TABLE if option.op.target == "embedding" else MEMORY
            # Worth is work shared out, and memory of weights.
            gain = (
                WORK * sizes.work(option.op, option.factor) / self.total_work
                + worth * weights / self.total_memory
            )
            gains[option.dim_class] = gains.get(option.dim_class, 0) + round(gain * option.saved)
            for travel in option.travels:
                travels.setdefault(travel, set()).add(option.dim_class)
            gathered.update(option.travels if option.gathers else ())
            dear.update(() if is_convolution(option.op) else option.travels)
        # Traffic is lost once for a set of classes, not for each of them.
        losses: dict[tuple[int, ...], int] = {}
        for travel, found in sorted(travels.items()):
            key = tuple(sorted(found))
            # What a rank sends of a value in a ring.
            sent = (1 - 1 / axis_size) * sizes.elements[travel.value]
            sent /= 1 if travel in gathered else summed.get(travel, 1)
            sent *= 1.0 if travel in dear else self.channel_price
            loss = max(1, round(TRAFFIC * sent / self.total_traffic))
            # Values that the same classes move are moved together.
            losses[key] = losses.get(key, 0) + loss
        return gains, losses

    def _options(self, axis_size: int, sizes: Sizes) -> list[Option]:
        """What may be split, and what that touches."""
        found = (
            option
            for op in self.graph.ops
            for option in options_of(op, sizes, axis_size, self.sources)
        )
        return [option for option in found if option.dim_class in self.eligible]

    def _candidates(self, options: Sequence[Option]) -> list[int]:
        """The classes of which splitting saves something."""
        return sorted({option.dim_class for option in options if option.saved > 0})
