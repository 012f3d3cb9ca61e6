"""Which operators of a model run in pieces, one after the other, so that the largest activations
are never whole: the loss with the projection onto the vocabulary, and feed-forward layers.

Both are found by what operators do with dims, not by names. A loss is taken from its logits back to
the product that makes their classes. A feed-forward layer is a product that makes a dim of its
weight, products that sum over it, and between them operators that treat its elements alone; so
attention is none. They run along the longest dim that all of them have, usually the sequence.

Example: logits of ``[2, 131072, 128256]`` take 67 GB in bfloat16, and three times that on the way
to their gradient; with ``loss_pieces=32`` one piece of them is there at a time, 2 GB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.passes.loops import MEANS, runs_in_pieces
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan, PlannedLoop
from shardwright.policies.weight_operands import PRODUCTS
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

LOSS, MLP = "loss", "mlp"
"""The names of the loops."""


@dataclass(frozen=True, kw_only=True)
class PieceOptions:
    """Options of policies that split what a rank computes over time. ``loss_pieces``: the logits
    and the loss are computed in so many pieces, each again in backward, so that logits are never
    whole. ``mlp_pieces``: so is every feed-forward layer.
    """

    loss_pieces: int = 1
    mlp_pieces: int = 1


def in_pieces(
    graph: PlannableGraph, plan: Plan, options: PieceOptions, config: ComputeConfig, policy: str
) -> Plan:
    """The plan with the loops that the options ask for. Where the config leaves outputs to the
    plan, a training step leaves out what would have to be joined of its pieces, such as logits.

    Raises :class:`PlanError` for a number below 1, or where the model has no such part that can run
    in so many pieces.
    """
    loops = dict(plan.loops)
    for name, count, parts in (
        (LOSS, options.loss_pieces, losses),
        (MLP, options.mlp_pieces, feed_forwards),
    ):
        if count < 1:
            raise PlanError(
                f"policy {policy!r} cannot run in {count} pieces",
                hint=f"{name}_pieces=1 or more; 1 leaves it whole",
            )
        if count > 1:
            # An operator is in one loop at most; the loss comes first.
            taken = {op for loop in loops.values() for op in loop.strategies}
            free = [ops for ops in parts(graph) if taken.isdisjoint(op.name for op in ops)]
            loops[name] = _loop(graph, free, count, name, policy)
    return replace(plan, loops=loops, outputs={**_joined(graph, loops, config), **plan.outputs})


def _joined(
    graph: PlannableGraph, loops: Mapping[str, PlannedLoop], config: ComputeConfig
) -> dict[str, str]:
    """The outputs that loops make, but for numbers, as left out of training steps."""
    if config.outputs != "auto" or config.inference_only:
        return {}
    inside = {name for loop in loops.values() for name in loop.strategies}
    made = {v.name for op in graph.ops if op.name in inside for v in op.results if v.shape}
    return {
        path: "eval"
        for path, value in graph.output.leaves()
        if isinstance(value, IRValue) and value.name in made
    }


def _loop(
    graph: PlannableGraph, parts: Sequence[Sequence[IROp]], count: int, name: str, policy: str
) -> PlannedLoop:
    """The loop that runs each part in pieces."""
    option = f"{name}_pieces={count}"
    if not parts:
        words = {LOSS: "cross entropy of logits", MLP: "feed-forward layer"}
        raise PlanError(
            f"policy {policy!r} finds no {words[name]} for {option}",
            why="the operators that it looks for are those of most language models",
            hint="leave the option out, or name the operators in a policy of your own: "
            "b.in_pieces(ops, count, dim)",
        )
    strategies: dict[str, str] = {}
    for ops in parts:
        found = along_longest(graph, ops, count)
        if found is None:
            raise PlanError(
                f"policy {policy!r} cannot run {_listed(ops)} in {count} pieces",
                where=ops[0].place,
                why="they have no dim in common that is so long and that all of them can be cut in",
                hint=f"a smaller number than {option}, or longer dummy arguments",
            )
        strategies |= found
    return PlannedLoop(count, strategies)


def along_longest(graph: IRGraph, ops: Sequence[IROp], count: int) -> dict[str, str] | None:
    """The strategies that cut operators in ``count`` pieces along the longest dim that all of them
    have and can be cut in; ``None`` without one.
    """
    assert graph.dims is not None
    candidates: set[int] | None = None
    for op in ops:
        assert op.rule is not None
        own = set()
        for factor in op.rule.factors:
            index = graph.dims.factors.get((op.name, factor.name))
            if index is not None and runs_in_pieces(op, f"split:{factor.name}", count) is None:
                own.add(index)
        candidates = own if candidates is None else candidates & own
    # Of equally long ones the inner dim, which is the sequence and not the batch.
    lengths = {i: estimate(graph.dims.classes[i].size) for i in candidates or ()}
    # A dim of the weights is none of the places that tokens have.
    weights = {
        index
        for value in graph.parameters
        for dim in graph.dims.values[value.name]
        for index in dim
    }
    fitting = [i for i, length in lengths.items() if length >= count and i not in weights]
    if not fitting:
        return None
    chosen = max(fitting, key=lambda i: (lengths[i], i))
    strategies = {}
    for op in ops:
        assert op.rule is not None
        strategies[op.name] = next(
            f"split:{factor.name}"
            for factor in op.rule.factors
            if graph.dims.factors.get((op.name, factor.name)) == chosen
        )
    return strategies


def losses(graph: IRGraph) -> list[list[IROp]]:
    """The operators of each loss over classes, from the product that makes the logits on."""
    dims, producers = _dims(graph), graph.producers()
    found = []
    for loss in graph.ops:
        logits = loss.operands[0] if loss.operands else None
        if loss.target not in MEANS or logits is None:
            continue
        if loss.target == "linear_cross_entropy":  # its product is inside
            found.append([loss])
            continue
        if logits.ndim < 2:
            continue
        # From the loss back to what makes the vocabulary: as long as a value has that dim.
        classes = set(dims.values[logits.name][1])
        ops = {loss.name: loss}
        reached = [logits]
        while reached:
            value = reached.pop()
            if value.name not in producers or not classes <= _classes(value, dims):
                continue
            op = producers[value.name][0]
            if op.name not in ops:
                ops[op.name] = op
                reached += op.operands
        if len(ops) > 1:
            found.append([op for op in graph.ops if op.name in ops])
    return found


def feed_forwards(graph: IRGraph) -> list[list[IROp]]:
    """The operators of each feed-forward layer, from the products that make its inner dim to those
    that sum over it.
    """
    dims = _dims(graph)
    having: dict[int, set[str]] = {}
    for (name, _), index in dims.factors.items():
        having.setdefault(index, set()).add(name)
    found: list[list[IROp]] = []
    taken: set[str] = set()
    for index in sorted(having):
        ops = [op for op in graph.ops if op.name in having[index]]
        makes = [op for op in ops if _makes(op, index, dims)]
        sums = [op for op in ops if _sums(op, index, dims)]
        if not makes or not sums or taken & {op.name for op in ops}:
            continue
        # Nothing else brings the dim in, as a residual stream does.
        made = {v.name for op in ops for v in op.results}
        read = [v for op in ops for v in op.operands if not _is_weight(v)]
        if any(index in _classes(v, dims) and v.name not in made for v in read):
            continue
        # Everything else takes the elements of what the products make one by one.
        shapes = {frozenset(_classes(v, dims)) for op in makes for v in op.results}
        between = [op for op in ops if op not in makes and op not in sums]
        alone = all(
            frozenset(_classes(v, dims)) in shapes for op in between for v in op.results
        ) and not any(op.target in PRODUCTS or _is_weight_only(op) for op in between)
        if alone and not any(op.rule is not None and op.rule.densities for op in ops):
            found.append(ops)
            taken |= {op.name for op in ops}
    return found


def _makes(op: IROp, index: int, dims: ModelDims) -> bool:
    """Whether a product makes a dim of its weight."""
    return (
        op.target in PRODUCTS
        and op.target != "embedding"
        and any(index in _classes(v, dims) for v in op.results)
        and any(index in _classes(v, dims) for v in op.operands if _is_weight(v))
        and not any(index in _classes(v, dims) for v in op.operands if not _is_weight(v))
    )


def _sums(op: IROp, index: int, dims: ModelDims) -> bool:
    """Whether a product sums over a dim of its weight."""
    return (
        op.target in PRODUCTS
        and not any(index in _classes(v, dims) for v in op.results)
        and any(index in _classes(v, dims) for v in op.operands if _is_weight(v))
        and any(index in _classes(v, dims) for v in op.operands if not _is_weight(v))
    )


def _is_weight(value: IRValue) -> bool:
    return value.kind is ValueKind.PARAMETER


def _is_weight_only(op: IROp) -> bool:
    """Whether an operator changes weights, such as a transposition of one."""
    return bool(op.operands) and all(map(_is_weight, op.operands))


def _classes(value: IRValue, dims: ModelDims) -> set[int]:
    return {index for dim in dims.values.get(value.name, ()) for index in dim}


def _dims(graph: IRGraph) -> ModelDims:
    assert graph.dims is not None
    return graph.dims


def _listed(ops: Iterable[IROp]) -> str:
    names = [op.name for op in ops]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
