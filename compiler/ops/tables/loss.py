"""Losses. Their sums may be split over rows; their means too, as local sums over the global count.

Cross entropy may be split over the classes as well, where the ranks exchange maxima and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch.nn import _reduction

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, product
from shardwright.compiler.ops.aliases import callables, through
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import LocalSizes, OpRule, ParallelFactor, ParallelForm
from shardwright.compiler.ops.rule_builder import linear_sets, whole_rule
from shardwright.compiler.ops.terms import (
    RUNTIME,
    annotation,
    broadcast,
    define_form,
    names,
    over_count,
    start_of,
)


def _modern(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``reduction`` in the place of the old ``size_average`` and ``reduce``."""
    keywords = dict(kwargs)
    size_average, reduce = keywords.pop("size_average", None), keywords.pop("reduce", None)
    if size_average is not None or reduce is not None:
        keywords["reduction"] = _reduction.legacy_get_string(
            size_average, reduce, emit_warning=False
        )
    return args, keywords


def _summed(term: Sequence[str]) -> list[str]:
    return [name if name == "1" or name[-1] in "+^" else f"{name}+" for name in term]


def _per_row(
    op: IROp,
    operands: list[list[str]],
    rows: list[str],
    form: str,
    count: Size,
    linear: tuple[frozenset[int], ...] = (),
) -> OpRule:
    """The rule of a loss computed row by row, then kept, summed, or averaged over ``count``."""
    reduction = op.arg("reduction", "mean")
    if reduction == "none":
        return parse_rule(annotation(operands, [rows]), op, linear_sets=linear)
    mean = (
        over_count(form, [row for row in rows if row != "1"], count) if reduction != "sum" else None
    )
    return parse_rule(
        annotation(map(_summed, operands), [[]]), op, linear_sets=linear, parallel=mean
    )


# ------------------------------------------------------------------------------------------------
# elementwise losses


def _elementwise(form: str, *joint: tuple[str, ...]) -> Callable[[IROp], OpRule]:
    """Operands are broadcast against each other, as far as the loss allows it."""

    def rule(op: IROp) -> OpRule:
        shapes = [value.shape for value in op.operands]
        operands, rows = broadcast(shapes)
        _, whole = _broadcast_shape(shapes)
        count = shapes[0][0] if op.arg("reduction") == "batchmean" else product(whole)
        return _per_row(op, operands, rows, form, count, linear_sets(op, *joint))

    return rule


def _broadcast_shape(shapes: Sequence[Sequence[Size]]) -> tuple[int, list[Size]]:
    ndim = max(len(shape) for shape in shapes)
    whole: list[Size] = [1] * ndim
    for shape in shapes:
        for dim, size in enumerate(shape, start=ndim - len(shape)):
            whole[dim] = size if whole[dim] == 1 else whole[dim]
    return ndim, whole


_ELEMENTWISE: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "mse_loss": ("input, target, reduction='mean', weight=None", (("weight",),)),
    "l1_loss": ("input, target, reduction='mean', weight=None", (("weight",),)),
    "smooth_l1_loss": ("input, target, reduction='mean', beta=1.0", ()),
    "huber_loss": ("input, target, reduction='mean', delta=1.0, weight=None", (("weight",),)),
    "binary_cross_entropy": ("input, target, weight=None, reduction='mean'", (("weight",),)),
    "binary_cross_entropy_with_logits": (
        "input, target, weight=None, reduction='mean', pos_weight=None",
        (("weight",),),
    ),
    "kl_div": ("input, target, reduction='mean', log_target=False", ()),
    "poisson_nll_loss": (
        "input, target, log_input=True, full=False, eps=1e-08, reduction='mean'",
        (),
    ),
    "soft_margin_loss": ("input, target, reduction='mean'", ()),
    "hinge_embedding_loss": ("input, target, margin=1.0, reduction='mean'", ()),
    "margin_ranking_loss": ("input1, input2, target, margin=0, reduction='mean'", ()),
}
for _name, (_signature, _joint) in _ELEMENTWISE.items():
    _form = define_form(_name, f"{_signature}, *, count=0")
    define(
        _name, _signature, f"F.{_name}", _elementwise(_form, *_joint), (getattr(F, _name), _modern)
    )

_GAUSSIAN = "input, target, var, full=False, eps=1e-06, reduction='mean'"
_GAUSSIAN_FORM = define_form("gaussian_nll_loss", f"{_GAUSSIAN}, *, count=0")


def _gaussian_nll_loss(op: IROp) -> OpRule:
    """The variance has the input's shape, or lacks its last dim, or has size 1 there."""
    values = [value.shape for value in op.operands]
    if len(values) > 2 and len(values[2]) == len(values[0]) - 1:
        operands, rows = broadcast(values[:2])
        operands.append(
            [("1" if size == 1 else name) for size, name in zip(values[2], rows, strict=False)]
        )
    else:
        operands, rows = broadcast(values)
    return _per_row(op, operands, rows, _GAUSSIAN_FORM, product(_broadcast_shape(values[:2])[1]))


define(
    "gaussian_nll_loss",
    _GAUSSIAN,
    "F.gaussian_nll_loss",
    _gaussian_nll_loss,
    (F.gaussian_nll_loss, _modern),
)

# -------------------------------------------------------------------------------------------------
# losses of whole rows


def _of_vectors(form: str) -> Callable[[IROp], OpRule]:
    """The last dim of the inputs is one vector, which stays whole; a target has one entry per
    vector.
    """

    def rule(op: IROp) -> OpRule:
        ndim = max(value.ndim for value in op.operands)
        lead = [value.shape[:-1] if value.ndim == ndim else value.shape for value in op.operands]
        # ``n0, n1, ...``: the dims of the vectors, one loss for each.
        terms, rows = broadcast(lead, "n")
        operands = []
        for term, value in zip(terms, op.operands, strict=True):
            operands.append([*term])
            if value.ndim == ndim:
                operands[-1].append("1" if value.shape[-1] == 1 else "d^")
        return _per_row(op, operands, rows, form, product(_broadcast_shape(lead)[1]))

    return rule


_OF_VECTORS = {
    "cosine_embedding_loss": "input1, input2, target, margin=0, reduction='mean'",
    "triplet_margin_loss": "anchor, positive, negative, margin=1.0, p=2, "
    "eps=1e-06, swap=False, reduction='mean'",
}
for _name, _signature in _OF_VECTORS.items():
    define(
        _name,
        _signature,
        f"F.{_name}",
        _of_vectors(define_form(_name, f"{_signature}, *, count=0")),
        (getattr(F, _name), _modern),
    )


def _of_classes(form: str) -> Callable[[IROp], OpRule]:
    """Losses over all classes of a row, which stay whole."""

    def rule(op: IROp) -> OpRule:
        # One row is a sample; a name for each dim in front of the classes.
        rows = names(op.operands[0].ndim - 1, "n")
        terms = {
            "input": [*rows, "c^"],
            "target": rows if op.target == "multi_margin_loss" else [*rows, "c^"],
            "weight": ["c^"],
        }
        found = _per_row(
            op,
            [terms[name] for name in op.operand_names],
            rows,
            form,
            product(op.operands[0].shape[:-1]),
        )
        return replace(found, nonempty=True)  # without rows torch returns memory that nobody wrote

    return rule


def _of_labels(form: str) -> Callable[[IROp], OpRule]:
    """The last dim of the operands, which are broadcast against each other, is one row of labels
    and stays whole.
    """

    def rule(op: IROp) -> OpRule:
        shapes = [value.shape for value in op.operands]
        terms, rows = broadcast(shapes, "n")
        operands = [
            [*term[:-1], *("1" if name == "1" else "c^" for name in term[-1:])] for term in terms
        ]
        return _per_row(op, operands, rows[:-1], form, product(_broadcast_shape(shapes)[1][:-1]))

    return rule


_OF_CLASSES = {
    "multi_margin_loss": (
        "input, target, p=1, margin=1.0, weight=None, reduction='mean'",
        _of_classes,
    ),
    "multilabel_margin_loss": ("input, target, reduction='mean'", _of_classes),
    "multilabel_soft_margin_loss": ("input, target, weight=None, reduction='mean'", _of_labels),
}
for _name, (_signature, _rule) in _OF_CLASSES.items():
    _form = define_form(_name, f"{_signature}, *, count=0")
    define(_name, _signature, f"F.{_name}", _rule(_form), (getattr(F, _name), _modern))

# -------------------------------------------------------------------------------------------------
# cross entropy


def _class_terms(op: IROp) -> tuple[list[list[str]], list[str]]:
    """Terms of input ``[n, c, y...]``, target (classes per row, or probabilities) and weight; and
    the row dims.
    """
    values = dict(zip(op.operand_names, op.operands, strict=True))
    ndim = values["input"].ndim
    rows = ["n", *names(ndim - 2, "y")] if ndim > 1 else []
    whole = [*rows[:1], "c", *rows[1:]]
    terms = {
        "input": whole,
        "target": whole if values["target"].dtype.is_floating_point else rows,
        "weight": ["c"],
    }
    return [terms[name] for name in op.operand_names], rows


def _cross_entropy(form: str) -> Callable[[IROp], OpRule]:
    def local_args(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
        assert op.rule is not None, f"{op.name} has no rule"
        shape, class_dim = op.operands[0].shape, min(1, op.operands[0].ndim - 1)
        # Over how many rows the mean goes, the ones on other ranks included.
        count = product(size for dim, size in enumerate(shape) if dim != class_dim)
        start = start_of(op.rule.operands[0][class_dim], local)
        return {
            **({"start": start} if start != 0 else {}),
            "num_classes": shape[class_dim],
            **({"count": count} if op.target == "cross_entropy" else {}),
        }

    def rule(op: IROp) -> OpRule:
        operands, rows = _class_terms(op)
        reduction = op.arg("reduction", "mean")
        # Classes are split by the parallel form alone.
        operands = [[f"{name}^" if name == "c" else name for name in term] for term in operands]
        if reduction != "none":
            operands = [_summed(term) for term in operands]
        # along the classes every rank gets the whole loss
        factors = {"c": ParallelFactor(results=("R",))}
        keywords = {"c": "class_axes"}
        # A mean over split rows counts those of all ranks.
        if reduction == "mean":
            factors |= {row: ParallelFactor(anywhere=True) for row in rows}
            keywords |= dict.fromkeys(rows, "row_axes")
        parallel = ParallelForm(form, factors, keywords, local_args)
        return parse_rule(
            annotation(operands, [rows if reduction == "none" else []]), op, parallel=parallel
        )

    return rule


_CROSS_ENTROPY = (
    "input, target, weight=None, ignore_index=-100, reduction='mean', label_smoothing=0.0"
)
_NLL = "input, target, weight=None, ignore_index=-100, reduction='mean'"
_AXES = "*, class_axes=(), row_axes=(), start=0, num_classes=0"
_FORM = define_form("cross_entropy", f"{_CROSS_ENTROPY}, {_AXES}, count=0")
define(
    "cross_entropy",
    _CROSS_ENTROPY,
    "F.cross_entropy",
    _cross_entropy(_FORM),
    (F.cross_entropy, _modern),
)
_FORM = define_form("nll_loss", f"{_NLL}, {_AXES}")
define("nll_loss", _NLL, "F.nll_loss", _cross_entropy(_FORM), (F.nll_loss, _modern))


def _row_weights(op: IROp) -> OpRule:
    rows = names(op.operands[0].ndim, "n", "+")
    return parse_rule(annotation([rows, ["c^"]][: len(op.operands)], [[]]), op)


define(
    "row_weights",
    "target, weight=None, ignore_index=-100",
    f"{RUNTIME}.row_weights",
    _row_weights,
)

_LINEAR = (
    "input, linear_weight, target, linear_bias=None, weight=None, reduction='mean', "
    "ignore_index=-100, label_smoothing=0.0, chunk_rows=None"
)


def _linear_cross_entropy(op: IROp) -> OpRule:
    values = dict(zip(op.operand_names, op.operands, strict=True))
    if values["linear_weight"].ndim != 2:  # classes along several dims
        return whole_rule(op)
    rows = ["n"] if values["input"].ndim == 2 else []
    mark = "" if op.arg("reduction", "mean") == "none" else "+"
    marked = [f"{row}{mark}" for row in rows]
    soft = values["target"].dtype.is_floating_point
    terms = {
        "input": [*marked, "k^"],
        "linear_weight": ["c^", "k"],
        "target": [*marked, "c^"] if soft else marked,
        "linear_bias": ["c^"],
        "weight": ["c^"],
    }

    def local_args(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
        assert op.rule is not None
        matrix = op.operand_names.index("linear_weight")
        start = start_of(op.rule.operands[matrix][0], local)
        return {
            **({"start": start} if start != 0 else {}),
            "num_classes": op.operands[matrix].shape[0],
            "count": product(op.operands[0].shape[:-1]),
        }

    # Along the classes every rank gets the whole loss.
    factors = {"c": ParallelFactor(results=("R",))}
    keywords = {"c": "class_axes"}
    if op.arg("reduction", "mean") == "mean":
        factors |= {row: ParallelFactor(anywhere=True) for row in rows}
        keywords |= dict.fromkeys(rows, "row_axes")
    form = ParallelForm(op.target, factors, keywords, local_args)
    text = annotation([terms[name] for name in op.operand_names], [[] if mark else rows])
    return parse_rule(text, op, parallel=form)


def _chunked(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``chunk_rows`` in the place of torch's object, which source cannot say.
    Where that leaves the size to torch, the logits of a chunk are as many numbers as the matrix
    has.
    """
    keywords = dict(kwargs)
    options, ignored = keywords.pop("options", None), keywords.get("ignore_index")
    if ignored is None:
        keywords["ignore_index"] = -100
    if options is not None:
        matrix = args[1] if len(args) > 1 else keywords["linear_weight"]
        keywords["chunk_rows"] = options.batch_chunk_size or int(matrix.shape[1])
    return args, keywords


define(
    "linear_cross_entropy",
    f"{_LINEAR}, {_AXES}, count=0",
    f"{RUNTIME}.linear_cross_entropy",
    _linear_cross_entropy,
    *through(_chunked, callables("linear_cross_entropy")),  # the oldest torch has none
)


def _ctc_loss(op: IROp) -> OpRule:
    return parse_rule(annotation([["?"]] * len(op.operands), [["?"]]), op)


define(
    "ctc_loss",
    "log_probs, targets, input_lengths, target_lengths, blank=0, reduction='mean', "
    "zero_infinity=False",
    "F.ctc_loss",
    _ctc_loss,
    F.ctc_loss,
)
