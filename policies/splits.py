"""Make a plan of dims: split chosen dim classes over an axis, and give every other operator P, R or
G.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.cost.work_share import UNEVEN
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import product
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.ops.strategy import Strategy, has_factor, placements
from shardwright.compiler.plan.builder import PlanBuilder, PlannableGraph, classes_in
from shardwright.compiler.plan.plan import AGAIN
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import Chosen, choose_axes, choose_dims
from shardwright.policies.expert_axes import ExpertAxis, exchange_of, experts_of, runs_experts
from shardwright.policies.labels import label
from shardwright.policies.sequence_cut import cut_of_free
from shardwright.policies.sequences import Positions, position_split
from shardwright.policies.weight_operands import PRODUCTS, is_convolution


def inner_axes(
    graph: IRGraph, num_ranks: int, rank_order: str | None = None, channel_price: float = 1.0
) -> dict[str, Chosen]:
    """The axes, by name and from the outermost, over which tensor parallelism splits a model, and
    what it splits: ``tp``, and where one of so many ranks does worse ``tp2``, unless the user
    orders axes of which that is none.
    """
    most = 2 if rank_order is None or "tp2" in rank_order.split("-") else 1
    chosen = choose_axes(graph, num_ranks, most, channel_price)
    return dict(zip(("tp", "tp2"), chosen, strict=False))


@dataclass(frozen=True)
class InsideExperts:
    """What an axis splits of experts, if that is another dim than outside of them. ``experts``:
    their own classes. ``tokens``: the classes that are exchanged for these.
    """

    classes: set[int]
    experts: set[int]
    tokens: set[int] = field(default_factory=set)

    def of(self, body: IRGraph, graph: IRGraph) -> InsideExperts:
        """Translate the classes to those of one body of a graph, which numbers its own."""
        asked = (self.classes, self.experts, self.tokens)
        return InsideExperts(
            *(classes_in(body, graph, found) if found else set() for found in asked)
        )


def split_on_expert_axes(
    builder: PlanBuilder,
    axes: Sequence[ExpertAxis],
    policy: str,
    chosen: set[int] | None = None,
    positions: Positions | None = None,
) -> None:
    """Split the batch over axes for data, ``chosen`` classes over those for tensors, and inside of
    experts what each axis has to split there. Axes of the sequence are left to
    :func:`split_context`. ``positions``: see :func:`split_dims`, of the axes for tensors.
    """
    graph = builder.graph
    experts_of(graph, policy)
    # What tensors have split along the sequence goes to the experts as the batch does.
    sequence = positions.classes(graph) if positions is not None else set[int]()
    for axis in axes:
        if axis.outside == "dp":
            batch = batch_classes(graph)  # where tensors alone are split there may be none
            inside = inside_experts(graph, axis, policy, batch, chosen)
            split_dims(builder, axis.name, batch, inside)
        elif axis.outside == "tp":
            inside = inside_experts(graph, axis, policy, sequence, chosen)
            split_dims(builder, axis.name, chosen or set(), inside, positions)


def inside_experts(
    graph: PlannableGraph, axis: ExpertAxis, policy: str, tokens: set[int], chosen: set[int] | None
) -> InsideExperts:
    """What an axis splits of experts. ``tokens``: what it splits outside of them, if these are
    tokens. ``chosen``: the classes over axes for tensors.
    """
    experts = experts_of(graph, policy)
    if axis.inside == "ep":
        return InsideExperts(experts, experts, tokens)
    if axis.inside == "edp":
        return InsideExperts(batch_classes(graph), experts)
    return InsideExperts(chosen or choose_dims(graph, axis.size), experts)


def split_dims(
    builder: PlanBuilder,
    axis: str,
    classes: set[int],
    inside: InsideExperts | None = None,
    positions: Positions | None = None,
    *,
    alone: bool = False,
) -> None:
    """Add the strategies of every operator along ``axis`` to the builder, the evaluation body
    included. ``alone``: convolutions that have none of the classes, or one that gives a rank much
    more than its part (3 colours on 2 ranks), are split by themselves.
    ``positions``: the dims along which what would be computed on every rank is split,
    where no more is sent for that (sequence parallelism, Korthikanti et al. 2022).
    """
    # In how many pieces a dim is cut by this axis; other axes may cut it as well.
    num_pieces = builder.mesh.axis_size(axis)
    for graph in builder.graph.bodies:
        outside = classes_in(graph, builder.graph, classes)
        own = inside.of(graph, builder.graph) if inside else None
        splits: dict[str, Strategy] = {}
        for op in graph.ops:
            cut = builder.pieces(op)
            split = split_by_rule(op, graph, outside, own, num_pieces, cut)
            if alone and is_convolution(op) and _is_uneven(op, split, num_pieces):
                split = _split_alone(op, num_pieces, cut) or split
            if split is not None:
                splits[op.name] = split
            else:
                is_inside = own is not None and runs_experts(op, graph, own.experts)
                meant = own.classes if own is not None and is_inside else outside
                note_fallback(builder, op, graph, axis, meant)
        # Operators that split nothing pass partial sums on, or compute everywhere: the cheaper one.
        labels = label(graph, splits, num_pieces)
        if positions is not None:
            classes = positions.classes(graph)
            along = _along_positions(builder, graph, classes, axis, splits | labels)
            if positions.gathers_again:
                _gather_again(builder, graph, splits, along)
            splits |= along
            labels = label(graph, splits, num_pieces)
        add_strategies(builder, axis, labels | splits)


def add_strategies(builder: PlanBuilder, axis: str, strategies: Mapping[str, Strategy]) -> None:
    """Give operators their strategies along an axis; R need not be said."""
    builder.strategies(axis, {name: found for name, found in strategies.items() if found != "R"})


def _along_positions(
    builder: PlanBuilder,
    graph: IRGraph,
    sequence: set[int],
    axis: str,
    known: Mapping[str, Strategy],
) -> dict[str, Strategy]:
    """The operators with whole results that are split along a sequence instead."""
    num_pieces = builder.mesh.axis_size(axis)
    free: dict[str, Strategy] = {}
    for op in graph.ops:
        assert op.rule is not None
        if known[op.name] == "R" and op.rule.densities is None:
            split = position_split(op, graph, sequence, num_pieces, builder.pieces(op))
            if split is not None and set(placements(op.rule, split)[1]) == {"S"}:
                free[op.name] = split
    return cut_of_free(graph, {n: s for n, s in known.items() if n not in free}, free, num_pieces)


def _gather_again(
    builder: PlanBuilder,
    graph: IRGraph,
    splits: Mapping[str, Strategy],
    along: Mapping[str, Strategy],
) -> None:
    """Let backward gather again what products with split weights read of the positions."""
    cut = {value.name for op in graph.ops if op.name in along for value in op.results}
    for op in graph.ops:
        if op.target not in PRODUCTS or op.name not in splits:
            continue
        assert op.rule is not None
        letters = placements(op.rule, splits[op.name])[0]
        for value, letter in zip(op.operands, letters, strict=True):
            # ``G``: the product reads it whole, and it lies in pieces: it is gathered in front.
            if letter == "G" and value.name in cut and value.takes_gradient:
                builder.gather(value.name, AGAIN)


def split_by_rule(
    op: IROp,
    graph: IRGraph,
    classes: set[int],
    inside: InsideExperts | None,
    num_pieces: int,
    cut: Mapping[str, int],
) -> Strategy | None:
    """The strategy along an axis that splits these classes, or what is ``inside`` of experts, if
    the operator has one. ``cut``: as in :func:`split_of`.
    """
    if inside is None or not runs_experts(op, graph, inside.experts):
        return split_of(op, graph, classes, num_pieces, cut)
    exchanged = exchange_of(op, graph, inside.tokens, inside.experts)
    return exchanged or split_of(op, graph, inside.classes, num_pieces, cut)


def split_of(
    op: IROp, graph: IRGraph, classes: set[int], num_pieces: int, cut: Mapping[str, int]
) -> Strategy | None:
    """The strategy that splits one of the classes, if the operator has one: by the factor that most
    of its tensors have.
    ``cut``: in how many pieces other axes have cut its factors.
    """
    assert op.rule is not None and graph.dims is not None
    rule = op.rule
    # The factors that may be cut into so many more pieces.
    found = []
    for factor in rule.factors:
        pieces = cut.get(factor.name, 1) * num_pieces
        is_meant = graph.dims.factors.get((op.name, factor.name)) in classes
        if is_meant and rule.splittable(factor.name, pieces):
            found.append(factor.name)

    def spread(name: str) -> tuple[int, int]:
        return sum(has_factor(refs, name) for refs in rule.results), sum(
            has_factor(refs, name) for refs in rule.operands
        )

    if not found:
        return None
    return f"split:{max(found, key=spread) if len(found) > 1 else found[0]}"


def _is_uneven(op: IROp, split: Strategy | None, num_pieces: int) -> bool:
    """Whether a rank does more than :data:`UNEVEN` times its part of an operator: all of it
    without a split.
    """
    assert op.rule is not None
    if split is None:
        return True
    size = estimate(op.rule.factor(split.removeprefix("split:")).size)
    return math.ceil(size / num_pieces) * num_pieces > UNEVEN * size


def _split_alone(op: IROp, num_pieces: int, cut: Mapping[str, int]) -> Strategy | None:
    """The split of a convolution between whole values for which least is sent, if there is one that
    leaves no rank with more than another.

    What has the split factor is gathered, the result forward and the operand's gradient backward.
    What lacks it is summed, which sends twice as much.
    """
    assert op.rule is not None
    sent: dict[str, float] = {}
    for factor in op.rule.factors:
        pieces = cut.get(factor.name, 1) * num_pieces
        in_weight = has_factor(op.rule.operands[op.operands.index(op.arg("weight"))], factor.name)
        even = estimate(factor.size) % pieces == 0
        if not in_weight or not even or not op.rule.splittable(factor.name, pieces):
            continue
        (result,), (refs,) = op.results, op.rule.results
        x, x_refs = op.operands[0], op.rule.operands[0]
        sent[factor.name] = sum(
            # Gathering a result sends it once. Summing it sends it twice: reduce-scatter, then
            # gather.
            estimate(product(value.shape)) * (1 if has_factor(dims, factor.name) else 2)
            for value, dims in ((result, refs), *([(x, x_refs)] if x.takes_gradient else []))
        )
    return f"split:{min(sent, key=lambda name: sent[name])}" if sent else None


def note_fallback(
    builder: PlanBuilder, op: IROp, graph: IRGraph, axis: str, classes: set[int]
) -> None:
    """Say where a split dim has to be gathered or the work of a layer is done by every rank, and
    why.
    """
    assert op.rule is not None and graph.dims is not None
    if not any(value.requires_grad for value in op.results):
        return  # masks and positions: small, and made from whole values
    # A split dim that the operator needs whole.
    for factor in op.rule.factors:
        index = graph.dims.factors.get((op.name, factor.name))
        if index in classes:
            name = graph.dims.classes[index].name
            why = f"{op.target} needs dim {name} whole"
            if not op.rule.known:
                why = f"{op.target} has no rule for dim {name}"
            elif builder.mesh.turns_of(axis) and op.rule.splittable(factor.name):
                why = f"{op.target} needs a piece of dim {name} in one run, and {axis} deals zigzag"
            builder.note(op, axis, f"{why}; it is gathered before it")
            return
    # A product with weights that nothing splits: every rank does all of its work.
    if (
        op.target in PRODUCTS
        and op.target != "embedding"
        and any(v.kind is ValueKind.PARAMETER for v in op.operands)
    ):
        builder.note(
            op,
            axis,
            f"{op.target} has no dim to split: "
            f"{_why_whole(op, graph, builder.mesh.axis_size(axis))}",
        )


def _why_whole(op: IROp, graph: IRGraph, num_pieces: int) -> str:
    """The reasons for which the dims of an operator's weights are not split, in words."""
    assert op.rule is not None and graph.dims is not None
    reasons: dict[str, list[str]] = {}
    weights = [
        refs
        for v, refs in zip(op.operands, op.rule.operands, strict=True)
        if v.kind is ValueKind.PARAMETER
    ]
    # The first reason that holds, for each dim of the weights.
    for factor in op.rule.factors:
        if not any(has_factor(refs, factor.name) for refs in weights):
            continue
        dim = graph.dims.of_factor(op.name, factor.name)
        title = f"{dim.name if dim else factor.name} ({factor.size})"
        if not op.rule.splittable(factor.name):
            why = "must stay whole"
        elif not op.rule.splittable(factor.name, num_pieces):
            why = f"would leave some of the {num_pieces} ranks without a piece"
        else:
            why = "would cost more communication than it saves work"
        reasons.setdefault(why, []).append(title)
    return "; ".join(f"{' and '.join(titles)} {why}" for why, titles in reasons.items())
