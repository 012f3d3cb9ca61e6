"""What splitting a dim of an operator saves, and which values have to travel for it.

``choice.py`` chooses among these options. An example: ``up``, a linear layer from 128 to 64
features on two ranks, may be split in its 64 outputs or in its 128 inputs. Both save half of its
work and of its weight. The first makes the gradient of its input a sum over the ranks, so the input
travels; the second does so to its result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp, once
from shardwright.compiler.ir.size import Size, product
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import ATTENTION, TensorRefs
from shardwright.compiler.ops.strategy import has_factor
from shardwright.compiler.passes.chosen_rows import stored_shares
from shardwright.compiler.passes.dim_names import EXPERTS, is_data
from shardwright.policies.weight_operands import (
    PRODUCTS,
    Sources,
    is_convolution,
    weights_of,
)

NORMS = frozenset(("layer_norm", "rms_norm", "group_norm"))
"""Operators that could be split in the dim they normalise, which plans made by hand keep whole."""


class Travel(NamedTuple):
    """A value that communication moves: summed where it is ``made``, or where it is ``read``
    gathered, or its gradient summed.
    """

    value: str
    where: Literal["made", "read"]


@dataclass(frozen=True)
class Option:
    """A dim class split in one operator, whose rule calls it ``factor``.

    ``saved``: the part of the operator's work and weights that a rank is spared. ``travels``: what
    is communicated for it. ``touched``: the values that would be, if every sum were made where its
    summands are. ``gathers``: they are gathered, not summed.
    """

    op: IROp
    factor: str
    dim_class: int
    saved: float
    travels: tuple[Travel, ...]
    touched: tuple[str, ...]
    gathers: bool = False


@dataclass(frozen=True)
class Sizes:
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
        found = {}
        for value in values:
            whole = stored.get(value.name, 1.0) * estimate(product(value.shape))
            found[value.name] = whole / self._cuts(value)
        return found

    def summed(self, value: IRValue) -> list[Travel]:
        """What travels to sum a value that is there in summands: of the places to which linear
        operators may pass these on, as :mod:`shardwright.policies.labels` lets them, where least is
        sent. The last such place, for branches meet there.
        """
        # Follow the value through linear operators that alone read it.
        least, found = self.elements[value.name], [Travel(value.name, "made")]
        others: list[Travel] = []  # of which the gradients are summands then
        while value.name not in self._outputs and len(uses := self._uses.get(value.name, [])) == 1:
            op, position = uses[0]
            assert op.rule is not None
            sets = [members for members in op.rule.linear_sets if position in members]
            if not sets or op.target in PRODUCTS or len(op.results) > 1:
                break
            # What is added to it is made a summand as well.
            together = max(sets, key=len)
            rest = (v for i, v in enumerate(op.operands) if i not in together)
            others += [Travel(v.name, "read") for v in rest if v.takes_gradient]
            (value,) = op.results
            # Summing here sends less.
            sent = sum(self.elements[travel.value] for travel in others) + self.elements[value.name]
            if sent <= least:
                least, found = sent, [Travel(value.name, "made"), *others]
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
        # Of all pairs of token and expert only those are multiplied that routing chose.
        density = rule.densities[0][0] if rule.densities is not None else None
        return (1.0 if density is None else density.share) * sum(
            math.prod(self._factor(op, name, rule.factor(name).size) for name in names)
            for names in products
        )

    def _factor(self, op: IROp, name: str, size: Size) -> float:
        return estimate(size) / self.pieces(self.dims.factors.get((op.name, name)))


def weight_classes(graph: IRGraph, dims: ModelDims, sources: Sources) -> set[int]:
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


def options_of(op: IROp, sizes: Sizes, axis_size: int, sources: Sources) -> Iterable[Option]:
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
            travels = tuple(Travel(name, "read") for name in touched)
            yield Option(op, factor.name, index, 0.0, travels, tuple(touched), gathers=True)
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
            *(Travel(name, "read") for name in whole),
            *(travel for v in partial for travel in sizes.summed(v)),
        )
        touched = [*whole, *(v.name for v in partial)]
        # How much of the work is saved: with 3 heads on 2 ranks one has 2 of 3.
        size = max(estimate(dims.classes[index].size) / pieces, 1.0)
        saved = 1.0 - math.ceil(size / axis_size) / size
        yield Option(op, factor.name, index, saved, travels, tuple(touched))


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


@once
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

    if op.target in ATTENTION:
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
