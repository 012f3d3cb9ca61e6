"""Choose which dims of the model tensor parallelism splits: a small exact program over dim classes.

Every product with weights (linear, convolution, embedding) may have one of its dims split: an output dim (column parallel:
the input's gradient is all-reduced) or a summed dim (row parallel: the result is all-reduced). Splitting a class splits all
operators that have it. Variables are the classes; at most one class of an operator is split; the objective is the share of
all work and memory that is spared, less the share of all possible communication that it causes. On a transformer this gives
heads, ffn and vocabulary, never the hidden dim: Megatron's plan, without knowing what a transformer is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import product
from shardwright.compiler.ops.rule import TensorRefs
from shardwright.compiler.ops.strategy import has_factor
from shardwright.compiler.passes.dim_names import is_data
from shardwright.policies.weights import PRODUCTS, Sources, weight_sources, weights_of

WORK, MEMORY, TRAFFIC = 1_000_000, 100_000, 600_000
"""What all work, all weight memory, and all traffic that could arise are worth against each other. What is saved and what is
sent both grow with ``1 - 1 / ranks``, so that the choice hardly depends on their number.
"""

TABLE = 1_000_000
"""What all weight memory would be worth in tables that are looked up: a vocabulary is split for the memory alone, as its lookup
has no work to share out."""


@dataclass(frozen=True)
class _Option:
    """One class split in one operator: the work that has it, the share of that and of the weights that a rank is spared, and
    the values that travel.
    """

    op: IROp
    dim_class: int
    work: float
    saved: float
    travels: tuple[str, ...]


def choose_dims(graph: IRGraph, axis_size: int) -> set[int]:
    """The indices of the dim classes to split over an axis of that many ranks."""
    dims = graph.dims
    assert dims is not None
    sources = weight_sources(graph)
    eligible = _weight_classes(graph, dims, sources)
    options = [o for op in graph.ops for o in _options(op, graph, dims, axis_size, sources) if o.dim_class in eligible]
    candidates = sorted({option.dim_class for option in options if option.saved > 0})
    if not candidates:
        return set()
    model = cp_model.CpModel()
    chosen = {c: model.new_bool_var(dims.classes[c].name) for c in candidates}
    by_op: dict[str, set[int]] = {}
    for option in options:
        if option.dim_class in chosen and option.saved > 0:
            by_op.setdefault(option.op.name, set()).add(option.dim_class)
    for classes in dict.fromkeys(tuple(sorted(found)) for found in by_op.values()):  # repeated layers say the same
        if len(classes) > 1:
            model.add_at_most_one(chosen[c] for c in classes)
    sizes = _value_sizes(graph)
    memory = {v.name: estimate(product(v.shape)) for v in graph.parameters}
    total_work, total_memory = sum(_work(op) for op in graph.ops) or 1.0, sum(memory.values()) or 1.0
    travels: dict[str, set[int]] = {}
    gains = dict.fromkeys(candidates, 0)
    for option in options:
        if option.dim_class not in chosen:
            continue
        weights = sum(memory[name] for name in {v.name for o in option.op.operands for v in sources.get(o.name, ())})
        worth = TABLE if option.op.target == "embedding" else MEMORY
        gain = WORK * option.work / total_work + worth * weights / total_memory
        if option.saved > 0:
            gains[option.dim_class] += round(gain * option.saved)
        for name in option.travels:
            travels.setdefault(name, set()).add(option.dim_class)
    total_traffic = sum(sizes[name] for name in travels) or 1.0
    losses: dict[tuple[int, ...], int] = {}
    for name, found in sorted(travels.items()):
        classes = tuple(sorted(found))
        loss = max(1, round(TRAFFIC * (1 - 1 / axis_size) * sizes[name] / total_traffic))
        losses[classes] = losses.get(classes, 0) + loss  # values that the same classes move are moved together
    terms = [gain * chosen[c] for c, gain in gains.items()]
    for index, (classes, loss) in enumerate(losses.items()):
        moved = model.new_bool_var(f"moves {index}")
        for c in classes:
            model.add_implication(chosen[c], moved)
        terms.append(-loss * moved)
    model.maximize(sum(terms))
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends the process, from the first solution on
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_deterministic_time = 20.0
    solver.parameters.linearization_level = 2  # the relaxation is all but integral: 10 ms in the place of 7 s for 32 layers
    solver.solve(model)
    return {c for c in candidates if solver.value(chosen[c])}


def _weight_classes(graph: IRGraph, dims: ModelDims, sources: Sources) -> set[int]:
    """The classes that the weights of products have: not batch or sequence, even where a parameter of positions has it."""
    operands = (op.operands[i] for op in graph.ops if op.target in PRODUCTS for i in weights_of(op, sources))
    weights = {v.name for operand in operands for v in sources[operand.name] if v.ndim > 1}
    return {index for name in weights for indices in dims.values[name] for index in indices}


def _options(op: IROp, graph: IRGraph, dims: ModelDims, axis_size: int, sources: Sources) -> Iterable[_Option]:
    """Every class that splitting would touch this operator by, with what it saves and what travels."""
    assert op.rule is not None
    is_product = op.target in PRODUCTS
    weights = weights_of(op, sources) if is_product else []
    for factor in op.rule.factors:
        index = dims.factors.get((op.name, factor.name))
        if index is None:
            continue
        if not op.rule.splittable(factor.name, axis_size):  # gathered in front of this operator, and its gradient scattered
            touched = [
                v.name
                for v, refs in zip(op.operands, op.rule.operands, strict=True)
                if has_factor(refs, factor.name) and v.requires_grad
            ]
            yield _Option(op, index, 0.0, 0.0, tuple(touched))
            continue
        if not is_product or (op.target == "embedding" and not _worth_splitting(op, factor.name, graph)):
            continue
        if weights and not any(has_factor(op.rule.operands[i], factor.name) for i in weights):
            continue
        whole = [
            v.name
            for i, (v, refs) in enumerate(zip(op.operands, op.rule.operands, strict=True))
            if i not in weights and not has_factor(refs, factor.name) and v.takes_gradient
        ]
        summed = [v.name for v, refs in zip(op.results, op.rule.results, strict=True) if not has_factor(refs, factor.name)]
        size = max(estimate(dims.classes[index].size), 1.0)
        yield _Option(op, index, _work(op, factor.name), 1.0 - math.ceil(size / axis_size) / size, tuple(whole + summed))


def _worth_splitting(op: IROp, factor: str, graph: IRGraph) -> bool:
    """A table is split over its rows if it is looked up by what the user passes in and has more rows than columns: a
    vocabulary; positions and token types are small and looked up by everyone.
    """
    assert op.rule is not None
    weight, indices = op.arg("weight"), op.arg("input")
    if not has_factor(op.rule.operands[op.operands.index(indices)], factor):
        columns = has_factor(op.rule.results[0], factor)
        return columns or (is_data(indices, graph) and estimate(weight.shape[0]) >= estimate(weight.shape[1]))
    return False


def _products(op: IROp) -> list[frozenset[str]]:
    """The factors of each product that the operator is made of; attention is scores (query x key), then weights x value."""
    assert op.rule is not None
    rule = op.rule
    if op.target not in PRODUCTS or op.target == "embedding":
        return []

    def factors(refs: TensorRefs) -> frozenset[str]:
        return frozenset(ref.factor for dim in refs for ref in dim)

    if op.target == "scaled_dot_product_attention":
        query, key, value = (factors(refs) for refs in rule.operands[:3])
        return [query | key, factors(rule.results[0]) | value]
    multiplied = (i for i, v in enumerate(op.operands) if v.dtype.is_floating_point and i not in rule.additive)
    tensors = [factors(refs) for refs in (*(rule.operands[i] for i in multiplied), *rule.results)]
    every = frozenset[str]().union(*tensors)
    # what only one tensor has is not multiplied: the pixels of a convolution before its stride, the experts of grouped rows
    return [frozenset(name for name in every if sum(name in tensor for tensor in tensors) > 1)]


def _work(op: IROp, factor: str | None = None) -> float:
    """Multiply-adds of the operator, or of those of its products that have a factor."""
    assert op.rule is not None
    rule = op.rule
    found = (names for names in _products(op) if factor is None or factor in names)
    return sum(math.prod(estimate(rule.factor(name).size) for name in names) for names in found)


def _value_sizes(graph: IRGraph) -> dict[str, float]:
    values = (*graph.sources, *(result for op in graph.ops for result in op.results))
    return {value.name: estimate(product(value.shape)) for value in values}
