"""Find the loops of a plan in a graph: which operators run together piece by piece, and where.

Operators of a loop that hand values to each other are one loop. They are put side by side: what
they need comes before them, what needs them behind. So a loop must have no way from one of its
operators to another that leads outside, and what cannot run in pieces is refused.

A mean over the places that a loop cuts is no sum of means, where some places do not count: labels
that are ignored, weights of classes. Its divisor would be known behind the last piece only. So it
becomes a sum inside of the loop, and a division behind it: ``loss = cross_entropy(x, y)`` with the
rows of ``x`` in pieces is ``total = cross_entropy(x, y, reduction="sum")``, ``n = row_weights(y)``
and ``loss = total / n``.

A product may gather what it sums over piece by piece, one piece of each operand at a time. Over the
ranks of ``c`` a dim of 768 lies in blocks, two of 384 where ``c`` has two ranks. A loop in four
pieces takes 96 of each block, so that each rank has a part of each piece. In the rule of the
product the dim is then two factors, ``2`` and ``384``, of which the loop cuts the second one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import product
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.rule import Factor, OpRule
from shardwright.compiler.ops.strategy import (
    Assignment,
    allowed,
    exchange,
    has_factor,
    split_factor,
    split_place,
    split_strategy,
)
from shardwright.compiler.passes.unify_dims import Node, piece_names, refine
from shardwright.compiler.plan.conversion import canonical
from shardwright.compiler.plan.plan import Plan
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh

MEANS = frozenset(("cross_entropy", "nll_loss", "linear_cross_entropy"))
"""Losses whose mean divides by the weights of the rows that count."""

CLASS_AXES = "class_axes"
"""The keyword of the axes that cut the classes of a loss."""


@dataclass(frozen=True)
class LoopOps:
    """The operators of one loop along ``axis``, in order."""

    axis: str
    ops: tuple[IROp, ...]


@dataclass(frozen=True)
class Looped:
    """A graph whose means are sums where a loop needs it. ``assignments``: the strategies of its
    operators that are not those of the plan: along loops, and of those that were added.
    """

    graph: IRGraph
    assignments: Mapping[str, Assignment] = field(default_factory=dict)


def with_sums(graph: IRGraph, plan: Plan) -> Looped:
    """The graph for the loops of its plan. Raises :class:`PlanError` for operators that cannot run
    in pieces.
    """
    along = {
        name: (axis, strategy)
        for axis, loop in plan.loops.items()
        for name, strategy in loop.strategies.items()
    }
    if not along:
        return Looped(graph)
    ops: list[IROp] = []
    assignments: dict[str, Assignment] = {}
    for op in graph.ops:
        if op.name not in along:
            ops.append(op)
            continue
        axis, strategy = along[op.name]
        assignment = plan.assignment(op.name)
        blocks = plan.loops[axis].blocks.get(op.name, 1)
        op, assignment, strategy = in_blocks(op, assignment, strategy, blocks)
        check_in_pieces(op, axis, {**assignment, axis: strategy}, plan)
        # Means of pieces do not add up where pieces have different numbers of rows that count. Sums
        # do.
        if is_mean_over(op, strategy):
            op, *behind = _as_sum(op, graph)
            ops += [op, *behind]
            for added in behind:
                assignments[added.name] = _assignment_behind(added, op, assignment)
        else:
            ops.append(op)
        assignments[op.name] = {**assignment, axis: strategy}
    return Looped(graph.with_ops(tuple(ops)), assignments)


def in_blocks(
    op: IROp, assignment: Assignment, strategy: str, blocks: int
) -> tuple[IROp, Assignment, str]:
    """An operator whose rule says that the dim which a loop cuts lies in blocks, with its
    strategies along the mesh, which cut the blocks, and along the loop, which cuts inside of them.

    Raises :class:`PlanError` if the dim does not lie in so many blocks.
    """
    if blocks == 1:
        return op, assignment, strategy
    rule, cut = _rule(op), split_factor(strategy)
    factor = next((factor for factor in rule.factors if factor.name == cut), None)
    size = factor.size if factor is not None and len(factor.segments) == 1 else None
    if factor is None or not isinstance(size, int) or size % blocks or rule.parallel is not None:
        raise PlanError(
            f"operator {op.name} ({op.target}) has no dim in {blocks} blocks for {strategy!r}",
            where=op.place,
            why=f"its rule is {rule.annotation!r}, and the dim has the size {size}",
            hint="leave it out of the loop, or name a number of blocks that divides the dim",
        )

    def nodes(one: Factor) -> list[Node]:
        if one.name == cut:
            return [Node(blocks), Node(size // blocks)]
        return [Node(one.size, parts=[Node(part) for part in one.segments[1:] and one.segments])]

    pieces = {one.name: nodes(one) for one in rule.factors}
    outer, inner = piece_names(factor, pieces[factor.name])
    renamed = {
        axis: split_strategy(outer, split_place(given)) if split_factor(given) == cut else given
        for axis, given in assignment.items()
    }
    return replace(op, rule=refine(rule, pieces)), renamed, f"split:{inner}"


def before_gathers(
    produced: Layout, needed: Layout, axis: str, mesh: Mesh, *, differentiable: bool
) -> Layout | None:
    """How a piece of a value lies before it is gathered: over the mesh as the value is produced,
    and cut along the loop ``axis`` as it is needed. ``None`` where the loop does not cut the value,
    where it lies in other blocks, and where it is a sum still to be made.
    """
    if produced.partial or axis not in needed.cut_axes:
        return None
    dims = list(produced.dims)
    for number, dim in enumerate(needed.dims):
        if not any(axis in atom.axes for atom in dim):
            continue
        # Blocks are dealt over the ranks, and each piece has a part of every block.
        blocks, *inside = (replace(atom, axes=()) for atom in dim)
        dims[number] = (replace(blocks, axes=produced.dim_axes(number)), *inside)
    laid = replace(produced, dims=tuple(dims))
    same = (canonical(one, mesh, differentiable=differentiable) for one in (produced, laid))
    if len(set(same)) > 1:
        return None
    for number, dim in enumerate(needed.dims):
        if any(axis in atom.axes for atom in dim):
            *outer, last = dims[number]
            if not outer and last.axes:
                return None
            dims[number] = (*outer, replace(last, axes=(*last.axes, axis)))
    return replace(produced, dims=tuple(dims))


def runs_in_pieces(op: IROp, strategy: str, count: int) -> str | None:
    """The reason for which an operator cannot run in ``count`` pieces by a strategy; ``None`` if it
    can.
    """
    rule, factor = _rule(op), split_factor(strategy)
    if exchange(strategy) or not (factor or strategy.startswith("linear:")):
        return f"{strategy!r} cuts no dim of it"
    if not allowed(rule, {"pieces": strategy}, Mesh((("pieces", count),))):
        return f"its rule is {rule.annotation!r}"
    if rule.updates:
        return "it updates a buffer, once for all places"
    if op.only_in is not None:
        return "it runs in training only"
    keywords = rule.parallel.keywords if rule.parallel is not None else {}
    if factor in keywords and not is_mean_over(op, strategy):
        return f"along {factor!r} its pieces depend on each other"
    return None


def check_in_pieces(op: IROp, axis: str, assignment: Assignment, plan: Plan) -> None:
    """Refuse an operator that cannot run in pieces as its strategies say."""
    count = plan.loops[axis].count
    why = runs_in_pieces(op, assignment[axis], count)
    if why is None and not allowed(_rule(op), assignment, plan.computing_mesh):
        others = {a: s for a, s in assignment.items() if a != axis}
        why = f"beside {others} its pieces are too small, or it has no such form"
    if why is not None:
        raise PlanError(
            f"operator {op.name} ({op.target}) cannot run in {count} pieces of loop {axis!r} by "
            f"{assignment[axis]!r}",
            where=op.place,
            why=why,
            hint="leave it out of the loop, or cut another dim",
        )


def find_loops(
    ops: Sequence[IROp], along: Mapping[str, str], apart: Collection[str] = ()
) -> tuple[LoopOps, ...]:
    """The loops among operators. ``along``: the axis of the loop of each operator in one.
    ``apart``: the axes along which each operator is a loop by itself.
    """
    import networkx  # only plans with loops need it, and importing it takes a while

    # What hands a value on along one axis belongs together.
    flow = networkx.Graph()
    producer: dict[str, str] = {}
    for op in ops:
        if op.name not in along:
            continue
        flow.add_node(op.name)
        for value in op.operands:
            other = producer.get(value.name)
            if other is not None and along[other] == along[op.name] not in apart:
                flow.add_edge(other, op.name)
        producer |= {result.name: op.name for result in op.results}
    loops = []
    for names in networkx.connected_components(flow):
        members = tuple(op for op in ops if op.name in names)
        loops.append(LoopOps(along[members[0].name], members))
    return tuple(loops)


def side_by_side(ops: Sequence[IROp], loops: Iterable[LoopOps]) -> tuple[IROp, ...]:
    """The operators in an order in which those of each loop follow each other; else as they were.

    Raises :class:`PlanError` for a loop whose operators cannot: something between them needs the
    one and makes what the other needs; or of which a part only is recomputed in backward.
    """
    loop_of = {op.name: loop for loop in loops for op in loop.ops}
    for loop in {id(loop): loop for loop in loop_of.values()}.values():
        _check_region(loop)
    if not loop_of:
        return tuple(ops)
    import networkx  # as above

    # A loop is one node, known by its first operator. Nodes come as soon as all they need is there,
    # earliest first.
    node_of = {
        op.name: loop_of[op.name].ops[0].name if op.name in loop_of else op.name for op in ops
    }
    members: dict[str, list[IROp]] = {}
    makes: dict[str, str] = {}
    for op in ops:
        members.setdefault(node_of[op.name], []).append(op)
        makes |= {result.name: node_of[op.name] for result in op.results}
    needs = networkx.DiGraph()
    needs.add_nodes_from(members)
    for op in ops:
        for value in op.operands:
            source, node = makes.get(value.name), node_of[op.name]
            if source is not None and source != node:
                needs.add_edge(source, node)
    place = {node: number for number, node in enumerate(members)}
    ordered: list[IROp] = []
    try:
        for node in networkx.lexicographical_topological_sort(needs, key=place.__getitem__):
            ordered += members[node]
    except networkx.NetworkXUnfeasible:
        raise _interrupted(ops, ordered, loop_of) from None
    return tuple(ordered)


def _interrupted(
    ops: Sequence[IROp], ordered: Sequence[IROp], loop_of: Mapping[str, LoopOps]
) -> PlanError:
    """What to say of a loop with an operator between its own."""
    done = {op.name for op in ordered}
    rest = [op for op in ops if op.name not in done]
    loop = next(loop_of[op.name] for op in rest if op.name in loop_of)
    inside = {op.name for op in loop.ops}
    # Whatever depends on the loop and is needed by it.
    below = {result.name for op in loop.ops for result in op.results}
    between = []
    for op in rest:
        if op.name not in inside and any(value.name in below for value in op.operands):
            below |= {result.name for result in op.results}
            between.append(op)
    needed = {value.name for op in loop.ops for value in op.operands}
    culprit = next((op for op in between if any(r.name in needed for r in op.results)), between[0])
    return PlanError(
        f"loop {loop.axis!r} cannot run as one",
        where=culprit.place,
        why=f"operator {culprit.name} ({culprit.target}) is not in it, needs what it makes, and "
        "makes what it needs",
        hint="let the loop have this operator too, or end before it",
    )


def _check_region(loop: LoopOps) -> None:
    regions = {op.region for op in loop.ops}
    if len(regions) > 1:
        op = loop.ops[0]
        raise PlanError(
            f"loop {loop.axis!r} lies in part in what backward recomputes",
            where=op.place,
            why=f"its operators are of the regions {', '.join(sorted(map(str, regions)))}",
            hint="recompute modules that hold the whole loop, or none of it: a loop recomputes "
            "itself",
        )


# -------------------------------------------------------------------------------------------------
# means as sums


def is_mean_over(op: IROp, strategy: str) -> bool:
    """Whether a loss is a mean over rows that a loop cuts."""
    factor, form = split_factor(strategy), _rule(op).parallel
    is_row = form is not None and form.keywords.get(factor or "", CLASS_AXES) != CLASS_AXES
    return op.target in MEANS and op.arg("reduction", "mean") == "mean" and is_row


def _as_sum(op: IROp, graph: IRGraph) -> list[IROp]:
    """The sum of a loss, the weights of its rows unless that is their number, and the mean."""
    (result,) = op.results
    rule, names = _rule(op), _names(graph)
    assert rule.parallel is not None
    form = rule.parallel
    classes = [name for name, keyword in form.keywords.items() if keyword == CLASS_AXES]
    summed = replace(
        form,
        factors={name: form.factors[name] for name in classes},
        keywords=dict.fromkeys(classes, CLASS_AXES),
    )
    total = replace(result, name=_fresh(f"{result.name}_sum", names))
    sum_op = replace(
        op.with_args(reduction="sum"), results=(total,), rule=replace(rule, parallel=summed)
    )
    targets = op.arg("target")
    behind: list[IROp] = []
    if targets.dtype.is_floating_point:  # probabilities: every row counts
        divisor: object = product(
            factor.size
            for factor in rule.factors
            if factor.name in form.keywords and factor.name not in classes
        )
    else:
        weights_op = _row_weights(op, result, names)
        behind.append(weights_op)
        divisor = weights_op.results[0]
    mean_op = replace(
        op,
        name=_fresh(f"{op.name}_mean", names),
        target="div",
        args=(("input", total), ("other", divisor)),
        rule=None,
        autocast=None,
    )
    opdef = registry.get("div")
    assert opdef is not None
    return [sum_op, *behind, replace(mean_op, rule=instantiate(opdef, mean_op))]


def _row_weights(op: IROp, result: IRValue, names: set[str]) -> IROp:
    """The call that gives the sum of the weights of all rows that count. Its rows are cut as those
    of the loss.
    """
    rule, targets = _rule(op), op.arg("target")
    weight = op.arg("weight")
    kept = [targets, *([weight] if weight is not None else [])]
    operands = tuple(
        rule.operands[op.operand_names.index(name)] for name in ("target", "weight")[: len(kept)]
    )
    factors = tuple(f for f in rule.factors if any(has_factor(refs, f.name) for refs in operands))
    value = IRValue(
        _fresh(f"{result.name}_weights", names),
        (),
        torch.int64 if weight is None else weight.dtype,
        kind=ValueKind.ACTIVATION,
    )
    args = (("target", targets), *([("weight", weight)] if weight is not None else []))
    return replace(
        op,
        name=_fresh(f"{op.name}_weights", names),
        target="row_weights",
        args=(*args, ("ignore_index", op.arg("ignore_index", -100))),
        results=(value,),
        rule=OpRule(f"the rows of {rule.annotation}", factors, operands, ((),), grad_linear=False),
        autocast=None,
    )


def _assignment_behind(added: IROp, loss: IROp, assignment: Assignment) -> Assignment:
    """The strategies of what was put behind the sum of a loss, from those of the loss."""
    rule = _rule(loss)
    found = {}
    for axis, strategy in assignment.items():
        factor = split_factor(strategy)
        is_class = rule.parallel is not None and factor in rule.parallel.keywords
        if added.target == "row_weights":
            found[axis] = strategy if factor and not is_class else "R"
        elif factor and not is_class:
            found[axis] = "linear:0"  # a summand of the total, over what all ranks count
        else:
            found[axis] = strategy if strategy == "G" else "R"
    return found


def _names(graph: IRGraph) -> set[str]:
    return {v.name for v in graph.sources} | {
        name for op in graph.ops for name in (op.name, *(r.name for r in op.results))
    }


def _fresh(wish: str, names: set[str]) -> str:
    name, count = wish, 1
    while name in names:
        count += 1
        name = f"{wish}_{count}"
    names.add(name)
    return name


def _rule(op: IROp) -> OpRule:
    assert op.rule is not None, f"{op.name} has no rule"
    return op.rule
