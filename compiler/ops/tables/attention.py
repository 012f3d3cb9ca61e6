"""Attention: torch's operator, and attention whose mask follows from marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.nn.functional as F

from shardwright.compiler.ir.op import Arg, AxisRef, IROp
from shardwright.compiler.ir.size import divides, product, quotient
from shardwright.compiler.ir.value import IRValue
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
    TensorRefs,
)
from shardwright.compiler.ops.rule_builder import linear_sets
from shardwright.compiler.ops.terms import (
    DRAW,
    RUNTIME,
    annotation,
    broadcast,
    define_form,
    drawn,
    may_be,
)

_SIGNATURE = (
    "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, "
    "enable_gqa=False"
)
_PLACES = "query_axes=(), key_axes=(), lengths=(0, 0), query_unit=1"
_FORM = define_form("scaled_dot_product_attention", f"{_SIGNATURE}, *, {DRAW}, {_PLACES}")
_SPLIT_FORM = define_form("split_attention", f"{_SIGNATURE}, *, {_PLACES}")


def _attention(op: IROp) -> OpRule:
    """Batch, heads and query positions are free; every query needs all keys. Where they are split,
    causal attention is told where in the sequence the rank's queries lie. Keys may be exchanged for
    queries, ``exchange:k>q``: each rank has the keys of its own piece of the sequence, and they go
    round (ring attention).

    With ``enable_gqa``, query head ``g * r + i`` reads key and value head ``g``: the head dim is
    ``(g r)``. Keys alone may be grouped, or values alone.
    """
    # ``query`` [*, H, S, D], ``key`` and ``value`` [*, Hkv, T, D]: lead dims broadcast.
    query, key, value = op.operands[:3]
    mask = op.operands[3] if len(op.operands) > 3 else None
    leads = [tensor.shape[:-2] for tensor in (query, key, value)]
    heads = [tensor.shape[-3] for tensor in (query, key, value) if len(tensor.shape) > 2]
    # Heads of keys are fewer: 12 heads read 4 with g = 4, r = 3.
    grouped = op.arg("enable_gqa", False) and any(number != heads[0] for number in heads)
    if grouped:
        leads = [lead[:-1] for lead in leads]
    terms, batch = broadcast(leads)
    sizes = {}
    if grouped:
        groups = next(number for number in heads if number != heads[0])
        assert divides(groups, heads[0])
        sizes = {"g": groups, "r": quotient(heads[0], groups)}
        terms = [
            [*term, "g" if number == groups else "(g r)"]
            for term, number in zip(terms, heads, strict=True)
        ]
        batch = [*batch, "(g r)"]
    is_causal = bool(op.arg("is_causal", False))
    # Causal attention counts queries from the start of the sequence, so a piece must say where it
    # is.
    q = "q^" if is_causal else "q"
    operands = [[*terms[0], q, "d^"], [*terms[1], "k^", "d"], [*terms[2], "k", "e"]]
    # A mask lies on the last dims, ``[..., S, T]``, and may have size 1 in some.
    if mask is not None:
        aligned = [*batch, "q", "k"][-mask.ndim :] if mask.ndim else []
        operands.append(
            ["1" if size == 1 else name for size, name in zip(mask.shape, aligned, strict=True)]
        )
    rule = parse_rule(
        annotation(operands, [[*batch, "q", "e"]]),
        op,
        sizes=sizes,
        linear_sets=linear_sets(op, ("value",)),
    )
    # Without heads or queries torch takes another kernel, of several autograd nodes: the backwards
    # of different ranks would then run their collectives in different orders.
    rule = replace(rule, nonempty=True)
    random = may_be(op.arg("dropout_p", 0.0), lambda p: p > 0)
    queries = {"q": ParallelFactor(empty=not random)} if is_causal else {}
    # A mask has rows for queries and columns for keys: each rank needs the rows of its own queries,
    # for all keys that come round.
    rule = replace(rule, exchanges=_ring(rule, follows_queries=(3,)))
    if not random:
        form = ParallelForm(_SPLIT_FORM, queries, {}, _places, knows_runs=True)
        return replace(rule, parallel=form)
    return _drawn(rule, _FORM, queries)


def _drawn(rule: OpRule, target: str, queries: Mapping[str, ParallelFactor]) -> OpRule:
    """The rule with dropout, which draws the same numbers however attention is split."""
    rule = drawn(rule, target, _weights)
    drawn_form = rule.parallel
    assert drawn_form is not None and drawn_form.local_args is not None
    drawn_args = drawn_form.local_args

    def local_args(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
        # Weights have a column for every key, also where keys go round.
        axes = {**local.axes, **{found.source: () for found in local.exchanges}}
        return {**drawn_args(op, replace(local, axes=axes)), **_places(op, local)}

    factors = {**drawn_form.factors, **queries}
    return replace(
        rule,
        parallel=replace(drawn_form, factors=factors, local_args=local_args, knows_runs=True),
    )


def _attention_where(op: IROp) -> OpRule:
    """Attention whose mask follows from marks. These are whole on every rank, also where queries
    are cut or keys go round, so that each knows what the others see.
    """
    # ``query`` [B, H, S, D], ``key`` and ``value`` [B, Hkv, T, D].
    query, key, value = op.operands[:3]
    terms, (batch,) = broadcast([tensor.shape[:1] for tensor in (query, key, value)])
    heads, groups = query.shape[1], key.shape[1]
    grouped = heads != groups
    sizes = {"g": groups, "r": quotient(heads, groups)} if grouped else {}
    names = ["(g r)", "g", "g"] if grouped else ["h", "h", "h"]
    # A dim of size 1 has no factor: there is nothing to split.
    if heads == 1:
        names = ["1", "1", "1"]
    elif groups == 1:
        names, sizes = ["r", "1", "1"], {}
    operands = [
        [*terms[0], names[0], "q^", "d^"],
        [*terms[1], names[1], "k^", "d"],
        [*terms[2], names[2], "k", "e"],
    ]
    follows_queries: tuple[int, ...] = ()
    for mark, parameter in zip(op.operands[3:], op.operand_names[3:], strict=True):
        if parameter == "sinks":
            operands.append([names[0]])
            continue
        if parameter == "attn_mask":
            follows_queries = (len(operands),)
            operands.append(_broadcast_dims(mark, [batch, names[0], "q", "k"]))
            continue
        # ``m`` and ``n`` are the positions of queries and keys once more, under other names: marks
        # stay whole where ``q`` and ``k`` are cut.
        position = "m^" if parameter.startswith("query_marks") else "n^"
        dims = [batch, "1", *((position, "1") if position == "m^" else ("1", position))]
        operands.append(_broadcast_dims(mark, dims))
    rule = parse_rule(
        annotation(operands, [[batch, names[0], "q", "e"]]),
        op,
        sizes=sizes,
        linear_sets=linear_sets(op, ("value",)),
    )
    rule = replace(rule, exchanges=_ring(rule, follows_queries), nonempty=True)
    random = may_be(op.arg("dropout_p", 0.0), lambda p: p > 0)
    queries = {"q": ParallelFactor(empty=not random)}
    if random:
        return _drawn(rule, "attention_where", queries)
    form = ParallelForm("attention_where", queries, {}, _places, knows_runs=True)
    return replace(rule, parallel=form)


def _broadcast_dims(x: IRValue, dims: Sequence[str]) -> list[str]:
    """The last of the dims, as many as a value has; "1" where it has one element for all."""
    aligned = zip(x.shape, dims[len(dims) - x.ndim :], strict=True)
    return ["1" if size == 1 else name for size, name in aligned]


def _ring(rule: OpRule, follows_queries: tuple[int, ...] = ()) -> tuple[Exchange, ...]:
    """The exchange by which keys and values go round, unless keys or queries are one only.
    ``follows_queries``: the operands that stay with the queries.
    """
    if not {"k", "q"} <= {factor.name for factor in rule.factors}:
        return ()
    # Where it matters which position a query has, keys are counted from the same start.
    is_one_dim = rule.frozen("k") and rule.frozen("q")
    return (Exchange("k", "q", ExchangeKind.RING, follows_queries, is_one_dim),)


def _places(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
    """Where in the sequence the queries of a rank lie, if causal attention has them split or keys
    go round.
    """
    assert op.rule is not None, f"{op.name} has no rule"
    queries, keys = op.rule.operands[0][-2], op.rule.operands[1][-2]
    is_split = local.is_split(*(ref.factor for ref in queries))
    places_count = op.target == "attention_where" or op.arg("is_causal", False)
    key_axes = tuple(AxisRef(found.axis) for found in local.exchanges)
    if not is_split or not (places_count or key_axes):
        return {}
    # Positions that are a product, such as rows times columns of patches, are cut by the outermost
    # one; each of its elements is ``unit`` positions.
    outermost, unit = queries[0].factor, product(local.full[ref.factor] for ref in queries[1:])
    return {
        "query_axes": tuple(map(AxisRef, local.axes[outermost])),
        **({"key_axes": key_axes} if key_axes else {}),
        "lengths": (_length(op.rule, queries[:1]), _length(op.rule, keys)),
        **({"query_unit": unit} if unit != 1 else {}),
    }


def _length(rule: OpRule, refs: DimRefs) -> Arg:
    """How many positions a dim has; of positions that lie end to end, how many of each."""
    factors = [rule.factor(ref.factor) for ref in refs]
    if len(factors) == 1 and len(factors[0].segments) > 1:
        return factors[0].segments
    return product(factor.size for factor in factors)


def _weights(rule: OpRule) -> TensorRefs:
    """The attention weights ``[..., q, k]``, for which dropout draws its mask."""
    return (*rule.results[0][:-1], rule.operands[1][-2])


define(
    "attention_where",
    "query, key, value, query_marks=(), key_marks=(), comparisons=(), sinks=None, "
    "attn_mask=None, *, bands=None, scale=None, cap=None, blind='zeros', dropout_p=0.0, "
    "query_axes=(), key_axes=(), lengths=None, "
    f"query_unit=1, {DRAW}",
    f"{RUNTIME}.attention_where",
    _attention_where,
    stand_ins.attention_where,
)
define(
    "scaled_dot_product_attention",
    _SIGNATURE,
    "F.scaled_dot_product_attention",
    _attention,
    F.scaled_dot_product_attention,
)
