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

import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ortools.sat.python import cp_model

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import Size, product
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import TensorRefs
from shardwright.compiler.ops.strategy import has_factor
from shardwright.compiler.passes.chosen_rows import stored_shares
from shardwright.compiler.passes.dim_names import EXPERTS, is_data
from shardwright.policies.weight_operands import (
    PRODUCTS,
    Sources,
    is_convolution,
    weight_sources,
    weights_of,
)

WORK, MEMORY, TRAFFIC = 1_000_000, 100_000, 600_000
"""What all work, all weight memory, and all traffic that could arise are worth against each other.
What is saved and what is sent both grow with ``1 - 1 / ranks``, so that the choice hardly depends
on their number.
"""

NORMS = frozenset(("layer_norm", "rms_norm", "group_norm"))

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


class _Travel(NamedTuple):
    """A value that is summed where it is made, or where it is read gathered, its gradient summed,
    or both at once.
    """

    value: str
    where: Literal["made", "read"]


@dataclass(frozen=True)
class _Option:
    """One class split in one operator, where it is a factor: the share of the work with it and of
    the weights that a rank is spared, and what travels. ``touched``: the values that would if every
    sum were made at once. ``gathers``: they are gathered, not summed.
    """

    op: IROp
    factor: str
    dim_class: int
    saved: float
    travels: tuple[_Travel, ...]
    touched: tuple[str, ...]
    gathers: bool = False


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
        self.eligible = _weight_classes(graph, graph.dims, self.sources)
        # Everything whole, as the scale of what is saved and sent.
        self.whole = whole = _Sizes(graph, {})
        self.total_work = sum(whole.work(op) for op in graph.ops) or 1.0
        self.total_memory = sum(whole.elements[v.name] for v in graph.parameters) or 1.0
        # The options of every class; traffic is told relative to what any of them would send.
        options = self._options(num_ranks, whole)
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
        classes, products = (
            self.dims.factors,
            (op for op in self.graph.ops if op.target in PRODUCTS),
        )
        return all(
            any(
                classes.get((op.name, factor.name)) in chosen.classes
                and self.whole.work(op, factor.name)
                for factor in (op.rule.factors if op.rule else ())
            )
            # Products with weights are counted elsewhere.
            for op in products
            if not weights_of(op, self.sources) and self.whole.work(op)
        )

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
            _Sizes(self.graph, dict.fromkeys(outer.classes, outer.axis_size))
            if outer
            else self.whole
        )
        options = self._options(axis_size, left)
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
        for index, (classes, loss) in enumerate(losses.items()):
            moved = model.new_bool_var(f"moves {index}")
            for c in classes:
                model.add_implication(chosen[c], moved)
            terms.append(-loss * moved)
        model.maximize(sum(terms))
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = (
            False  # else Ctrl-C ends the process, from the first solution on
        )
        solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
        solver.parameters.max_deterministic_time = 20.0
        solver.parameters.linearization_level = (
            2  # the relaxation is all but integral: 10 ms in the place of 7 s for 32 layers
        )
        solver.solve(model)
        return Chosen(
            axis_size,
            {c for c in candidates if solver.value(chosen[c])},
            round(solver.objective_value),
        )

    def _summed_along(self, outer: Chosen | None) -> dict[_Travel, int]:
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
        options: Sequence[_Option],
        classes: Container[int],
        axis_size: int,
        sizes: _Sizes,
        summed: Mapping[_Travel, int],
    ) -> tuple[dict[int, int], dict[tuple[int, ...], int]]:
        """What splitting each of the classes gains, and what is lost for every set of them that the
        same values travel for.
        ``summed``: what is summed over so many ranks anyway. A sum over those of both axes sends
        little more.
        """
        # By what travels: the classes for which it does.
        travels: dict[_Travel, set[int]] = {}
        gathered: set[_Travel] = set()
        dear: set[_Travel] = set()  # what others than convolutions send, too
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

    def _options(self, axis_size: int, sizes: _Sizes) -> list[_Option]:
        """What may be split, and what that touches."""
        found = (
            option
            for op in self.graph.ops
            for option in _options(op, sizes, axis_size, self.sources)
        )
        return [option for option in found if option.dim_class in self.eligible]

    def _candidates(self, options: Sequence[_Option]) -> list[int]:
        """The classes of which splitting saves something."""
        return sorted({option.dim_class for option in options if option.saved > 0})


@dataclass(frozen=True)
class _Sizes:
    """What is left on a rank where the classes of ``cut`` are in so many pieces already."""

    graph: IRGraph
    cut: Mapping[int, int]

    @property
    def dims(self) -> ModelDims:
        assert self.graph.dims is not None
        return self.graph.dims

    def pieces(self, index: int | None) -> int:
        return 1 if index is None else self.cut.get(index, 1)

    @functools.cached_property
    def elements(self) -> dict[str, float]:
        """The elements of every value that a rank holds on average, by name."""
        values = (*self.graph.sources, *(result for op in self.graph.ops for result in op.results))
        stored = stored_shares(self.graph)
        return {
            value.name: stored.get(value.name, 1.0)
            * estimate(product(value.shape))
            / self._cuts(value)
            for value in values
        }

    def summed(self, value: IRValue) -> list[_Travel]:
        """What travels to sum a value that is there in summands: of the places to which linear
        operators may pass these on, as :mod:`shardwright.policies.labels` lets them, where least is
        sent. The last such place, for branches meet there.
        """
        # Follow the value through linear operators that alone read it.
        least, found = self.elements[value.name], [_Travel(value.name, "made")]
        others: list[_Travel] = []  # of which the gradients are summands then
        while value.name not in self._outputs and len(uses := self._uses.get(value.name, [])) == 1:
            op, position = uses[0]
            assert op.rule is not None
            sets = [members for members in op.rule.linear_sets if position in members]
            if not sets or op.target in PRODUCTS or len(op.results) > 1:
                break
            # What is added to it is made a summand as well.
            together = max(sets, key=len)
            rest = (v for i, v in enumerate(op.operands) if i not in together)
            others += [_Travel(v.name, "read") for v in rest if v.takes_gradient]
            (value,) = op.results
            # Summing here sends less.
            sent = sum(self.elements[travel.value] for travel in others) + self.elements[value.name]
            if sent <= least:
                least, found = sent, [_Travel(value.name, "made"), *others]
        return found

    @functools.cached_property
    def _uses(self) -> Mapping[str, Sequence[tuple[IROp, int]]]:
        return self.graph.uses()

    @functools.cached_property
    def _outputs(self) -> frozenset[str]:
        return frozenset(value.name for value in self.graph.outputs)

    def _cuts(self, value: IRValue) -> int:
        classes = (
            {index for indices in self.dims.values.get(value.name, ()) for index in indices}
            if self.cut
            else ()
        )
        return math.prod(map(self.pieces, classes))

    def work(self, op: IROp, factor: str | None = None) -> float:
        """Multiply-adds of the operator; with a factor, 0 where one of its products has not got it:
        the kernel that does both products of attention in one wants heads whose values are as wide
        as the keys.
        """
        assert op.rule is not None
        rule, products = op.rule, _products(op)
        if not all(factor is None or factor in names for names in products):
            return 0.0
        density = rule.densities[0][0] if rule.densities is not None else None
        return (1.0 if density is None else density.share) * sum(
            math.prod(self._factor(op, name, rule.factor(name).size) for name in names)
            for names in products
        )

    def _factor(self, op: IROp, name: str, size: Size) -> float:
        return estimate(size) / self.pieces(self.dims.factors.get((op.name, name)))


def _weight_classes(graph: IRGraph, dims: ModelDims, sources: Sources) -> set[int]:
    """The classes that the weights of products have: not batch or sequence, even where a parameter
    of positions has it.
    """
    operands = (
        op.operands[i] for op in graph.ops if op.target in PRODUCTS for i in weights_of(op, sources)
    )
    weights = {v.name for operand in operands for v in sources[operand.name] if v.ndim > 1}
    classes_of_dims = (indices for name in weights for indices in dims.values[name])
    # Which ranks have which experts is asked for by name (``ep``), as their rows may be uneven.
    experts = {dim.index for dim in dims.named(EXPERTS)}
    return {index for indices in classes_of_dims for index in indices} - experts


def _options(op: IROp, sizes: _Sizes, axis_size: int, sources: Sources) -> Iterable[_Option]:
    """Every class that splitting would touch this operator by, with what it saves and what
    travels.
    """
    assert op.rule is not None
    graph, dims = sizes.graph, sizes.dims
    is_product = op.target in PRODUCTS
    weights = weights_of(op, sources) if is_product else []
    for factor in op.rule.factors:
        index = dims.factors.get((op.name, factor.name))
        if index is None:
            continue
        pieces = sizes.pieces(index)
        # Gathered before this operator, its gradient scattered. A norm could exchange sums over a
        # dim that is cut, but a plan as by hand keeps what is normalised whole.
        is_normalised = op.target in NORMS and op.rule.frozen(factor.name)
        if is_normalised or not op.rule.splittable(factor.name, pieces * axis_size):
            touched = [
                v.name
                for v, refs in zip(op.operands, op.rule.operands, strict=True)
                if has_factor(refs, factor.name) and v.requires_grad
            ]
            travels = tuple(_Travel(name, "read") for name in touched)
            yield _Option(op, factor.name, index, 0.0, travels, tuple(touched), gathers=True)
            continue
        if not is_product or (
            op.target == "embedding" and not _worth_splitting(op, factor.name, graph)
        ):
            # An option is of use where a weight has the factor.
            continue
        if weights and not any(has_factor(op.rule.operands[i], factor.name) for i in weights):
            continue
        # Operands without the factor get a gradient in summands, results without it are summands.
        whole = [
            v.name
            for i, (v, refs) in enumerate(zip(op.operands, op.rule.operands, strict=True))
            if i not in weights and not has_factor(refs, factor.name) and v.takes_gradient
        ]
        partial = [
            v
            for v, refs in zip(op.results, op.rule.results, strict=True)
            if not has_factor(refs, factor.name)
        ]
        travels = (
            *(_Travel(name, "read") for name in whole),
            *(travel for v in partial for travel in sizes.summed(v)),
        )
        touched = [*whole, *(v.name for v in partial)]
        # How much of the work is saved: with 3 heads on 2 ranks one has 2 of 3.
        size = max(estimate(dims.classes[index].size) / pieces, 1.0)
        saved = 1.0 - math.ceil(size / axis_size) / size
        yield _Option(op, factor.name, index, saved, travels, tuple(touched))


def _worth_splitting(op: IROp, factor: str, graph: IRGraph) -> bool:
    """A table is split over its rows if it is looked up by what the user passes in and has more
    rows than columns: a vocabulary; positions and token types are small and looked up by everyone.
    """
    assert op.rule is not None
    weight, indices = op.arg("weight"), op.arg("input")
    if not has_factor(op.rule.operands[op.operands.index(indices)], factor):
        columns = has_factor(op.rule.results[0], factor)
        return columns or (
            is_data(indices, graph) and estimate(weight.shape[0]) >= estimate(weight.shape[1])
        )
    return False


def _products(op: IROp) -> list[frozenset[str]]:
    """The factors of each product that the operator is made of; attention is scores (query x key),
    then weights x value.
    """
    assert op.rule is not None
    rule = op.rule
    if op.target not in PRODUCTS or op.target == "embedding":
        return []

    def factors(refs: TensorRefs) -> frozenset[str]:
        return frozenset(ref.factor for dim in refs for ref in dim)

    if op.target == "scaled_dot_product_attention":
        query, key, value = (factors(refs) for refs in rule.operands[:3])
        return [query | key, factors(rule.results[0]) | value]
    multiplied = (
        i for i, v in enumerate(op.operands) if v.dtype.is_floating_point and i not in rule.additive
    )
    tensors = [factors(refs) for refs in (*(rule.operands[i] for i in multiplied), *rule.results)]
    every = frozenset[str]().union(*tensors)
    if is_convolution(op):
        # Its space is not counted, whether it keeps its size, and is one factor, or is two: all
        # convolutions of a network are measured alike.
        every = frozenset(name for name in every if not rule.frozen(name))
    # what only one tensor has is not multiplied: the experts of grouped rows
    return [frozenset(name for name in every if sum(name in tensor for tensor in tensors) > 1)]
