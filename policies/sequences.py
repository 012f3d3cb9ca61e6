"""The dims of a model that are its sequence, and what attention may have cut in their place.

A model may have several: an encoder-decoder has one for each side, and a concatenation (of a class
token and patches) is one of its own. They are found by what operators do, not by names: attention
has queries and keys along them, and integer inputs ``[batch, seq]`` hold their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.rule import ATTENTION, Exchange, ExchangeKind, FactorRef
from shardwright.compiler.ops.strategy import Strategy, exchange_strategy, has_factor
from shardwright.policies.batches import batch_classes
from shardwright.runtime.errors import PlanError, did_you_mean


@dataclass(frozen=True)
class Positions:
    """The positions along which an axis for tensors splits what it would leave whole. ``named``:
    the names of their dims, if the user says. ``gathers_again``: what products read is gathered
    again in backward, not kept whole.
    """

    named: tuple[str, ...] = ()
    gathers_again: bool = False

    def classes(self, graph: IRGraph) -> set[int]:
        """The dim classes of a graph that are positions."""
        return sequence_classes(graph, self.named)


def sequence_classes(graph: IRGraph, named: Sequence[str] = ()) -> set[int]:
    """The dim classes of all sequences of a graph; those called so, if any are ``named``."""
    assert graph.dims is not None
    dims = graph.dims
    if named:
        return _continued(graph, {dim.index for dim in dims.classes if dim.name in named})

    def outermost(value: IRValue, dim: int) -> set[int]:
        # Of positions that are a product (rows of patches x columns), the outermost dim.
        return set(dims.values[value.name][dim][:1])

    tokens: set[int] = set()
    for value in graph.inputs:
        if value.ndim == 2 and not value.dtype.is_floating_point:
            tokens |= outermost(value, 1)
    attended: set[int] = set()
    for op in graph.ops:
        for queries, keys in _scores(op):
            attended |= outermost(*queries) | outermost(*keys)
    # Rows of packed documents may have no batch: what the inputs have first is the sequence.
    return _continued(graph, (tokens | attended) - _batch(graph) or attended)


def _continued(graph: IRGraph, classes: set[int]) -> set[int]:
    """The classes, and those that the dims become where slices, padding and strides change their
    length.
    """
    found = set(classes)
    links = [set(pair.values()) for op in graph.ops for pair in _continuations(op, graph)]
    # A dim may change its length several times, and what comes first may be found last.
    while new := [link for link in links if link & found and not link <= found]:
        found.update(*new)
    return found


def _continuations(op: IROp, graph: IRGraph) -> list[dict[str, int]]:
    """The two factors, with their classes, of every dim whose length an operator changes. None of
    integers: labels and positions are computed whole and cut, which sends nothing.
    """
    assert op.rule is not None and graph.dims is not None
    factors = graph.dims.factors
    if not any(value.dtype.is_floating_point for value in op.results):
        return []
    return [
        {factor: factors[op.name, factor] for factor in exchange.pair}
        for exchange in op.rule.exchanges
        if exchange.is_one_dim
    ]


def positions_of(
    split: bool, named: tuple[str, ...], gathers_again: bool, policy: str
) -> Positions | None:
    """What to split beside other dims, if that is asked for.

    Raises :class:`PlanError` for ``gathers_again`` without it.
    """
    if gathers_again and not split:
        raise PlanError(
            f"policy {policy!r} has nothing that gathers_again speaks of",
            why="without sequence_parallel nothing along the sequence is gathered over tp",
            hint="sequence_parallel=True",
        )
    return Positions(named, gathers_again) if split else None


def check_sequence(graph: IRGraph, degree: int, policy: str, named: Sequence[str] = ()) -> None:
    """Raise :class:`PlanError` if the model has no sequence, or none with so many positions."""
    assert graph.dims is not None
    dims = graph.dims
    names = sorted({dim.name for dim in dims.classes})
    for name in named:
        if name not in names:
            raise PlanError(
                f"policy {policy!r} finds no dim {name!r} to split as the sequence",
                hint=did_you_mean(name, names),
            )
    classes = sequence_classes(graph, named)
    if not classes:
        raise PlanError(
            f"policy {policy!r} finds no sequence to split",
            why="this model has no attention over two positions or more, and no integer input "
            f"[batch, seq] with as many; its dims are {', '.join(names)}",
            hint='name the dim of the positions, as in pas_config={"sequence": ["seq"]}, or give '
            "longer dummy arguments",
        )
    longest = max((dims.classes[index].size for index in classes), key=estimate)
    if estimate(longest) < degree:
        raise PlanError(
            f"policy {policy!r} cannot split a sequence of {longest} over {degree} ranks",
            why="some ranks would have no position in any layer",
            hint=f"a degree of at most {longest}, or longer dummy arguments",
        )


def heads_of(graph: IRGraph) -> set[int]:
    """The dim classes of attention heads: what queries have in front of their positions, without
    the batch. Grouped heads have two, the groups and the heads of a group.
    """
    assert graph.dims is not None
    heads: set[int] = set()
    for op in graph.ops:
        for (queries, position), _ in _scores(op):
            for indices in graph.dims.values[queries.name][:position]:
                heads.update(indices)
    return heads - _batch(graph) - sequence_classes(graph)


def attends(op: IROp, graph: IRGraph, sequence: Set[int], heads: Set[int]) -> bool:
    """Whether an operator is part of attention: the kernel of it, whatever heads it has, or one
    step of attention written out, which has queries, keys and heads.
    """
    assert op.rule is not None and graph.dims is not None
    classes = [graph.dims.factors.get((op.name, factor.name)) for factor in op.rule.factors]
    positions = [index for index in classes if index in sequence]
    is_kernel = op.target in ATTENTION
    return len(positions) > 1 and (is_kernel or any(index in heads for index in classes))


def heads_factor(
    op: IROp, graph: IRGraph, heads: Set[int], num_pieces: int, cut: Mapping[str, int]
) -> str | None:
    """The factor of an attention operator that is cut into ``num_pieces`` with its heads: the one
    most tensors have, of those with a piece for each rank. ``cut``: in how many pieces other axes
    have cut its factors.
    """
    assert op.rule is not None and graph.dims is not None
    rule = op.rule
    found = []
    for factor in rule.factors:
        pieces = cut.get(factor.name, 1) * num_pieces
        is_head = graph.dims.factors.get((op.name, factor.name)) in heads
        if is_head and rule.splittable(factor.name, pieces) and least(factor.segments, pieces) > 0:
            found.append(factor)
    tensors = (*rule.operands, *rule.results)
    most = max(found, key=lambda f: sum(has_factor(t, f.name) for t in tensors), default=None)
    return most.name if most else None


def position_split(
    op: IROp, graph: IRGraph, sequence: Set[int], num_pieces: int, cut: Mapping[str, int]
) -> Strategy | None:
    """The strategy that splits an operator along a sequence, if it has one. Of two positions, as
    scores ``[queries, keys]`` have them, the outer one of the result: that of the queries.
    ``cut``: in how many pieces other axes have cut its factors.
    """
    assert op.rule is not None and graph.dims is not None
    rule = op.rule
    found = []
    for factor in rule.factors:
        pieces = cut.get(factor.name, 1) * num_pieces
        is_position = graph.dims.factors.get((op.name, factor.name)) in sequence
        if is_position and rule.splittable(factor.name, pieces):
            found.append(factor.name)
    in_results = [ref.factor for refs in rule.results for dim in refs for ref in dim]
    order = [*in_results, *found]  # what no result has is summed over
    if found:
        return f"split:{min(found, key=order.index)}"
    # A dim that changes its length: ranks exchange edges.
    for classes in _continuations(op, graph):
        if set(classes.values()) <= sequence:
            source, target = classes
            return exchange_strategy((source, target))
    return None


def ring_of(op: IROp) -> Exchange | None:
    """The exchange by which an attention operator has keys and values travel around, if it has one:
    from the positions of keys to those of queries.
    """
    assert op.rule is not None
    rings = (each for each in op.rule.exchanges if each.kind is ExchangeKind.RING)
    return next(rings, None)


def least(segments: Iterable[Size], num_pieces: int) -> float:
    """How many elements the rank with the fewest gets of a dim: segments are cut one by one."""
    return sum(estimate(size) // num_pieces for size in segments)


def positional(graph: IRGraph) -> set[str]:
    """The operators whose results depend on neither weights nor inputs of floating dtype: masks,
    positions, rotary tables. What they compute is cheap, and needs no gradient.
    """
    weighty = {
        value.name
        for value in graph.sources
        if value.kind is ValueKind.PARAMETER
        or (value.kind is ValueKind.INPUT and value.dtype.is_floating_point)
    }
    found: set[str] = set()
    for op in graph.ops:
        if any(value.name in weighty for value in op.operands):
            weighty |= {value.name for value in op.results}
        else:
            found.add(op.name)
    return found


def _scores(op: IROp) -> list[tuple[tuple[IRValue, int], tuple[IRValue, int]]]:
    """The values and dims along which an operator has the positions of queries and of keys."""
    if op.target in ATTENTION:
        query, key = op.operands[:2]
        return [((query, query.ndim - 2), (key, key.ndim - 2))]
    if op.target == "softmax":  # attention written out: [batch, heads, queries, keys]
        scores = op.operands[0]
        if scores.ndim >= 4 and op.arg("dim", -1) in (-1, scores.ndim - 1):
            return [((scores, scores.ndim - 2), (scores, scores.ndim - 1))]
    return []


def _batch(graph: IRGraph) -> set[int]:
    try:
        return batch_classes(graph)
    except PlanError:  # of one row nothing can be told, and nothing need be kept apart
        return set()


def _outermost(refs: tuple[FactorRef, ...]) -> str | None:
    return refs[0].factor if refs else None
