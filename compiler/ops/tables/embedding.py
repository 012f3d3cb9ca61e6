"""Tables looked up by index."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import LocalSizes, OpRule, ParallelFactor, ParallelForm
from shardwright.compiler.ops.rule_builder import linear_sets, whole_rule
from shardwright.compiler.ops.terms import define_form, start_of

_EMBEDDING = (
    "input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, "
    "sparse=False"
)
_FORM = define_form("embedding", f"{_EMBEDDING}, *, vocab_axes=(), start=0, num_embeddings=0")


def _local_rows(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
    assert op.rule is not None, f"{op.name} has no rule"
    padding, rows = op.arg("padding_idx"), op.operands[1].shape[0]
    from_the_end = {} if padding is None or padding >= 0 else {"padding_idx": padding + rows}
    return {
        "start": start_of(op.rule.operands[1][0], local),
        "num_embeddings": rows,
        **from_the_end,
    }


def _embedding(op: IROp) -> OpRule:
    """Split by rows of the table, each rank looks up its own and gives zeros for the others."""
    if op.arg("max_norm") is not None:  # renormalises rows of the table in place
        return parse_rule("?, ? -> ?", op, updates=(1,))
    sets = linear_sets(op, ("weight",))
    # The gradient counts indices, or has a layout of its own.
    if op.arg("scale_grad_by_freq") or op.arg("sparse"):
        text = "*^, v^ h -> * h" if op.arg("scale_grad_by_freq") else "*, v^ h -> * h"
        return parse_rule(text, op, linear_sets=sets)
    form = ParallelForm(_FORM, {"v": ParallelFactor()}, {"v": "vocab_axes"}, _local_rows)
    return parse_rule("*, v+ h -> * h", op, linear_sets=sets, parallel=form)


define("embedding", _EMBEDDING, "F.embedding", _embedding, F.embedding)


def _embedding_bag(op: IROp) -> OpRule:
    """Bags of equal length may be split; bags given by offsets stay together."""
    if op.arg("max_norm") is not None or op.arg("scale_grad_by_freq") or op.operands[0].ndim == 1:
        return whole_rule(op)
    weights = ", n l" if op.has_arg("per_sample_weights") else ""
    mode = op.arg("mode", "mean")
    hidden = "h^" if mode == "max" else "h"
    return parse_rule(
        f"n l^, v^ {hidden}{weights} -> n h",
        op,
        linear_sets=linear_sets(op, ("weight",)) if mode != "max" else (),
    )


define(
    "embedding_bag",
    "input, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, "
    "mode='mean', sparse=False, "
    "per_sample_weights=None, include_last_offset=False, padding_idx=None",
    "F.embedding_bag",
    _embedding_bag,
    F.embedding_bag,
)

define("one_hot", "input, num_classes=-1", "F.one_hot", "* -> * c^", F.one_hot)
