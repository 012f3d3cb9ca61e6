"""Experts: rows of tokens that routing sends to the experts it chose, and their sums.

Between :func:`dispatch` and :func:`combine` a tensor has a row for every pair of an expert and a
token, of which only the chosen ones are stored (``Density``). So experts and tokens are two factors
of one dim, and all ways to run experts in parallel are strategies like others:

    dispatch         ``t h^, t k^, t k^ -> (e t) h, (e t), e t``
    grouped_linear   ``(e t) k+, e n k, e t -> (e t) n``
    combine          ``(e+ t) h, e t -> t h``

Split ``t``: each rank runs all experts for its tokens, and their weights are G. Split ``e``: each
rank runs its experts for all tokens, and results are P. Exchange ``t`` for ``e``: expert
parallelism with an all-to-all each way. Over several axes each has its own of these; those that
exchange may cut one dim of the tokens or several, as the batch and the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.ir.op import Arg, AxisRef, IROp
from shardwright.compiler.ir.size import product
from shardwright.compiler.ops import stand_ins
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import (
    DimRefs,
    Exchange,
    ExchangeKind,
    LocalSizes,
    OpRule,
    ParallelFactor,
    ParallelForm,
)
from shardwright.compiler.ops.rule_builder import linear_sets
from shardwright.compiler.ops.terms import RUNTIME, indices
from shardwright.runtime.layout import Density

IMBALANCE = 1.25
"""How many times its even share of rows the busiest rank is assumed to get."""

_ROWS, _ROUTING = Density(1, 1.0, IMBALANCE), Density(2, 1.0, IMBALANCE)
"""Rows, and what tells which they are. The share that is chosen follows from the dispatch."""

_EXCHANGE = "exchange=(), token_dims=()"


def _exchange_args(local: LocalSizes, tokens: DimRefs) -> Mapping[str, Arg]:
    """What an exchange is told: its axes, and the dims of the tokens, each with the axes that cut
    it outside of the experts alone.
    """
    if local.uncut is None:
        return {}
    cut_by: dict[str, tuple[AxisRef, ...]] = {ref.factor: () for ref in tokens}
    for found in local.exchanges:
        factor = found.source if found.source in cut_by else found.target
        cut_by[factor] += (AxisRef(found.axis),)
    dims: list[tuple[Arg, ...]] = []
    for ref in tokens:
        axes, size = cut_by[ref.factor], local.uncut.ref_size(ref)
        if axes:
            dims.append((*local.uncut.segments[ref.factor], *axes))
        # Dims that nothing cuts are one.
        elif dims and len(dims[-1]) == 1:
            dims[-1] = (product((dims[-1][0], size)),)
        else:
            dims.append((size,))
    exchange = tuple(AxisRef(found.axis) for found in local.exchanges)
    return {"exchange": exchange, "token_dims": tuple(dims)}


def _dispatch(op: IROp) -> OpRule:
    chosen = op.arg("chosen")
    num_experts, weighted = op.arg("num_experts"), op.has_arg("weights")
    # t tokens of size h, each with k choices, become rows of e experts.
    text = "t h^, t k^, t k^ -> (e t) h, (e t), e t" if weighted else "t h^, t k^ -> (e t) h, e t"

    def local_args(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
        assert op.rule is not None
        return _exchange_args(local, op.rule.operands[0][0])

    form = ParallelForm(
        "dispatch",
        {"e": ParallelFactor()},
        {"e": "expert_axes"},
        local_args,
        knows_runs=True,
    )
    rule = parse_rule(text, op, sizes={"e": num_experts}, parallel=form)
    # A token chooses k of e experts, so that share of all pairs is stored.
    share = chosen.shape[1] / num_experts
    rows, routing = replace(_ROWS, share=share), replace(_ROUTING, share=share)
    results = (rows, rows, routing) if weighted else (rows, routing)
    return replace(
        rule,
        exchanges=_tokens(rule, "t", "e"),
        densities=((None,) * len(op.operands), results),
    )


def _grouped_linear(op: IROp) -> OpRule:
    weight = "e k n" if op.arg("transposed", False) else "e n k"
    bias = ", e n" if op.has_arg("bias") else ""
    return parse_rule(
        f"(e t) k+, {weight}, e t{bias} -> (e t) n",
        op,
        additive=indices(op, "bias"),
        linear_sets=linear_sets(op, ("rows", "bias"), ("weight", "bias")),
        densities=((_ROWS, None, _ROUTING, *((None,) if bias else ())), (_ROWS,)),
    )


def _combine(op: IROp) -> OpRule:
    def local_args(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
        assert op.rule is not None
        return _exchange_args(local, op.rule.results[0][0])

    form = ParallelForm("combine", {"e": ParallelFactor()}, {}, local_args, knows_runs=True)
    rule = parse_rule(
        "(e+ t) h, e t -> t h", op, linear_sets=linear_sets(op, ("rows",)), parallel=form
    )
    return replace(rule, exchanges=_tokens(rule, "e", "t"), densities=((_ROWS, _ROUTING), (None,)))


def _tokens(rule: OpRule, source: str, target: str) -> tuple[Exchange, ...]:
    """The exchange of two factors, unless one of them has size 1 and is none."""
    if not {source, target} <= {factor.name for factor in rule.factors}:
        return ()
    return (Exchange(source, target, ExchangeKind.TOKENS),)


define(
    "dispatch",
    f"x, chosen, weights=None, *, num_experts, expert_axes=(), {_EXCHANGE}",
    f"{RUNTIME}.dispatch",
    _dispatch,
    stand_ins.dispatch,
)
define(
    "grouped_linear",
    "rows, weight, routing, bias=None, *, transposed=False, autocast=False",
    f"{RUNTIME}.grouped_linear",
    _grouped_linear,
    stand_ins.grouped_linear,
)
define(
    "combine",
    f"rows, routing, *, dtype=None, {_EXCHANGE}",
    f"{RUNTIME}.combine",
    _combine,
    stand_ins.combine,
)
