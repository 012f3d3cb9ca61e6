"""Dims that an operator may have cut though it reads beyond the cut: parallel forms that exchange
edges.

A dim of one length before and after (a convolution with padding) is one factor of the rule, frozen
but for the form: ``split:y``. A dim that changes its length (a stride, a slice, padding) is two
factors, and ``exchange:y>z`` cuts the operand in the one and the result in the other. The pieces of
both are those that :func:`~shardwright.runtime.runs.dealt` deals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.compiler.ir.op import Arg, AxisRef, IROp
from shardwright.compiler.ir.size import Size, product
from shardwright.compiler.ops.rule import (
    DimRefs,
    Exchange,
    ExchangeKind,
    FactorKind,
    LocalSizes,
    OpRule,
    ParallelFactor,
    ParallelForm,
)


@dataclass(frozen=True, slots=True)
class Way:
    """A dim of the first operand, the dim of the first result that it becomes, and what a place of
    the latter reads: the fields of a :class:`~shardwright.runtime.windows.Window`.
    """

    dim: int
    result_dim: int
    window: tuple[Size, ...]


def with_edges(
    rule: OpRule, target: str, ways: Sequence[Way], *, knows_runs: bool = False
) -> OpRule:
    """The rule with a parallel form that cuts these dims. Dims that are cut anyway, or that the
    form cannot cut, are left as they are. ``knows_runs``: the pieces may be several runs.
    """
    same: dict[str, ParallelFactor] = {}
    exchanges: list[Exchange] = []
    used = []
    for way in ways:
        before, after = rule.operands[0][way.dim], rule.results[0][way.result_dim]
        if len(before) != 1 or len(after) != 1:
            continue  # size 1: there is nothing to cut
        source, target_factor = before[0].factor, after[0].factor
        if not all(_frozen(rule, name) for name in (source, target_factor)):
            continue
        # A dim that keeps its size is one factor (a convolution of stride 1 with padding). Else the
        # result has a dim of its own, and cutting one means cutting the other: an exchange.
        if source == target_factor:
            same[source] = ParallelFactor(empty=True)
        else:
            edges = Exchange(source, target_factor, ExchangeKind.EDGES, is_one_dim=True)
            exchanges.append(edges)
        used.append(way)
    if not used:
        return rule

    def local_args(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
        assert op.rule is not None
        cut = (_edge(op.rule, way, local) for way in used)
        return {"edges": tuple(edge for edge in cut if edge is not None)}

    return replace(
        rule,
        parallel=ParallelForm(target, same, {}, local_args, knows_runs),
        exchanges=(*rule.exchanges, *exchanges),
    )


def with_picks(rule: OpRule, target: str, places: Mapping[int, Size]) -> OpRule:
    """The rule with a form that reads one place of each of these dims of the first operand, though
    it is cut: the rank that holds it has a summand, the others zeros.
    """
    found = {dim: place for dim, place in places.items() if rule.operands[0][dim]}
    # Truth values have no sum, and a rule without linear sets says that results have none.
    if not found or not rule.linear_sets:
        return rule
    edges = rule.parallel
    names = [rule.operands[0][dim][0].factor for dim in found]

    def local_args(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
        assert op.rule is not None
        # A slice of one dim and a pick from another: the form passes the words of both.
        words = dict(edges.local_args(op, local)) if edges and edges.local_args else {}
        picked = []
        for dim, place in found.items():
            refs = op.rule.operands[0][dim]
            axes = local.axes.get(refs[0].factor, ())
            if axes:
                picked.append((dim, _size(refs, local), place, tuple(map(AxisRef, axes))))
        words["picked"] = tuple(picked)
        return {name: word for name, word in words.items() if word}

    form = ParallelForm(
        target,
        {
            **(edges.factors if edges else {}),
            **dict.fromkeys(names, ParallelFactor(empty=True)),
        },
        {},
        local_args,
    )
    return replace(rule, parallel=form)


def _frozen(rule: OpRule, name: str) -> bool:
    factor = rule.factor(name)
    return factor.kind is FactorKind.FROZEN and len(factor.segments) == 1


def _edge(rule: OpRule, way: Way, local: LocalSizes) -> Arg | None:
    """What generated code says of a dim that is cut."""
    before, after = rule.operands[0][way.dim], rule.results[0][way.result_dim]
    axes = local.axes.get(before[0].factor, ())
    if not axes:
        return None
    sizes = (_size(before, local), _size(after, local))
    return (way.dim, *sizes, way.window, tuple(map(AxisRef, axes)))


def _size(refs: DimRefs, local: LocalSizes) -> Arg:
    """The size of a dim of which the outermost factor is cut: a number, or with the product of the
    others.
    """
    unit = product(local.full[ref.factor] for ref in refs[1:])
    size = local.full[refs[0].factor]
    return size if unit == 1 else (size, unit)


def space(op: IROp, num_dims: int) -> tuple[list[str], list[str]]:
    """The names of the last dims in the first operand and in the first result, all frozen. A dim
    that keeps its length has one name.
    """
    sizes = (op.operands[0].shape[-num_dims:], op.results[0].shape[-num_dims:])
    before = [f"y{i}^" for i in range(num_dims)]
    after = [
        f"y{i}^" if size == result_size else f"z{i}^"
        for i, (size, result_size) in enumerate(zip(*sizes, strict=True))
    ]
    return before, after


def over_space(
    op: IROp,
    rule: OpRule,
    target: str,
    windows: Sequence[tuple[Size, ...]],
    *,
    knows_runs: bool = False,
) -> OpRule:
    """The rule with a form that cuts the last dims, of which ``windows`` tells what a place
    reads.
    """
    before, after = (value.ndim - len(windows) for value in (op.operands[0], op.results[0]))
    ways = [Way(before + i, after + i, window) for i, window in enumerate(windows)]
    return with_edges(rule, target, ways, knows_runs=knows_runs)


def per_dim(numbers: Any, num_dims: int) -> tuple[Size, ...]:
    """An argument that is one number for all dims of space, or one for each."""
    given = tuple(numbers) if isinstance(numbers, tuple | list) else (numbers,)
    return given * num_dims if len(given) == 1 else given
