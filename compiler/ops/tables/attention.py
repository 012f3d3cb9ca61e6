"""Scaled dot-product attention."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import divides, quotient
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.builder import linear_sets
from shardwright.compiler.ops.registry import define
from shardwright.compiler.ops.rule import OpRule, TensorRefs
from shardwright.compiler.ops.terms import DRAWN, annotation, broadcast, define_form, drawn, may_be

_SIGNATURE = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
_FORM = define_form("scaled_dot_product_attention", f"{_SIGNATURE}, {DRAWN}")


def _attention(op: IROp) -> OpRule:
    """Batch and heads are free, query positions too unless causal; every query needs all keys.

    With ``enable_gqa``, query head ``g * r + i`` reads key and value head ``g``: the head dim is ``(g r)``.
    """
    query, key, value = op.operands[:3]
    mask = op.operands[3] if len(op.operands) > 3 else None
    leads = [tensor.shape[:-2] for tensor in (query, key, value)]
    grouped = op.arg("enable_gqa", False) and query.shape[-3] != key.shape[-3]
    if grouped:
        leads = [lead[:-1] for lead in leads]
    terms, batch = broadcast(leads)
    sizes = {}
    if grouped:
        assert divides(key.shape[-3], query.shape[-3])
        sizes = {"g": key.shape[-3], "r": quotient(query.shape[-3], key.shape[-3])}
        terms = [[*term, heads] for term, heads in zip(terms, ("(g r)", "g", "g"), strict=True)]
        batch = [*batch, "(g r)"]
    q = "q^" if op.arg("is_causal", False) else "q"
    operands = [[*terms[0], q, "d^"], [*terms[1], "k^", "d"], [*terms[2], "k", "e"]]
    if mask is not None:
        aligned = [*batch, "q", "k"][-mask.ndim :] if mask.ndim else []
        operands.append(["1" if size == 1 else name for size, name in zip(mask.shape, aligned, strict=True)])
    rule = parse_rule(annotation(operands, [[*batch, "q", "e"]]), op, sizes=sizes, linear_sets=linear_sets(op, ("value",)))
    # Without heads or queries torch takes another kernel, of several autograd nodes: the backwards of different ranks would
    # then run their collectives in different orders.
    rule = replace(rule, nonempty=True)
    random = may_be(op.arg("dropout_p", 0.0), lambda p: p > 0)
    return drawn(rule, _FORM, _weights) if random else rule


def _weights(rule: OpRule) -> TensorRefs:
    """The attention weights ``[..., q, k]``, for which dropout draws its mask."""
    return (*rule.results[0][:-1], rule.operands[1][-2])


define("scaled_dot_product_attention", _SIGNATURE, "F.scaled_dot_product_attention", _attention, F.scaled_dot_product_attention)
