"""Normalisations. The dims that statistics are taken over stay whole; but batch norm, layer norm
and RMS norm can exchange their statistics, and group norm those over space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import product, quotient
from shardwright.compiler.ops.aliases import callables, through, without
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import LocalSizes, OpRule, ParallelFactor, ParallelForm
from shardwright.compiler.ops.rule_builder import dim_of, linear_sets
from shardwright.compiler.ops.terms import annotation, define_form, indices, may_be, names

_PLAIN = without("out", "cudnn_enable", "cudnn_enabled")


def _affine(op: IROp) -> tuple[frozenset[int], ...]:
    """The operands in which the result is linear together: weight and bias, if it has a weight."""
    return linear_sets(op, ("weight", "bias")) if op.has_arg("weight") else ()


_LAYER_NORM = "input, normalized_shape, weight=None, bias=None, eps=1e-05"
_RMS_NORM = "input, normalized_shape, weight=None, eps=None"


def _norm_of_rows(form: str) -> Callable[[IROp], OpRule]:
    """The rule of layer norm, and of RMS norm, which has no bias. The dims that it normalises may
    be split: then sums of whole rows are exchanged.
    """

    def rule(op: IROp) -> OpRule:
        normalised = names(len(op.arg("normalized_shape")), "h")
        term = ["*", *(f"{name}^" for name in normalised)]
        pieces = [f"{name}^" for name in normalised]
        return parse_rule(
            annotation([term, *[pieces] * (len(op.operands) - 1)], [term]),
            op,
            linear_sets=_affine(op),
            parallel=ParallelForm(
                form,
                # The sums do not depend on where a piece begins.
                {name: ParallelFactor(anywhere=True) for name in normalised},
                dict.fromkeys(normalised, "norm_axes"),
            ),
        )

    return rule


define(
    "layer_norm",
    _LAYER_NORM,
    "F.layer_norm",
    _norm_of_rows(define_form("layer_norm", f"{_LAYER_NORM}, *, norm_axes=()")),
    *through(_PLAIN, callables("layer_norm")),
)
define(
    "rms_norm",
    _RMS_NORM,
    "F.rms_norm",
    _norm_of_rows(define_form("rms_norm", f"{_RMS_NORM}, *, norm_axes=()")),
    *callables("rms_norm"),
)


def _local_groups(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    channels_per_group = quotient(op.operands[0].shape[1], op.arg("num_groups"))
    return {"num_groups": quotient(local.shape(rule.operands[0])[1], channels_per_group)}


_GROUP_NORM = "input, num_groups, weight=None, bias=None, eps=1e-05"
_GROUP_NORM_FORM = define_form("group_norm", f"{_GROUP_NORM}, *, space_axes=(), count=0")


def _group_norm(op: IROp) -> OpRule:
    """Whole groups of channels may be split off. Where space is split, statistics are
    exchanged.
    """
    groups, shape = op.arg("num_groups"), op.operands[0].shape
    space = names(len(shape) - 2, "y")
    term = ["n", f"(g={groups} c^)", *(f"{name}^" for name in space)]
    text = annotation([term, *[["(g c)"]] * (len(op.operands) - 1)], [term])
    form = ParallelForm(
        _GROUP_NORM_FORM,
        dict.fromkeys(space, ParallelFactor(anywhere=True, empty=True)),
        dict.fromkeys(space, "space_axes"),
        lambda op, local: {"count": quotient(product(shape[1:]), groups)},
    )
    # torch refuses to normalise no groups
    return parse_rule(
        text,
        op,
        linear_sets=_affine(op),
        localise=_local_groups,
        nonempty=True,
        parallel=form if space else None,
    )


define(
    "group_norm",
    _GROUP_NORM,
    "F.group_norm",
    _group_norm,
    *through(_PLAIN, callables("group_norm")),
)

_BATCH_NORM = (
    "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, "
    "eps=1e-05"
)
_BATCH_NORM_FORM = define_form("batch_norm", f"{_BATCH_NORM}, *, batch_axes=(), count=0")


def _batch_norm(op: IROp) -> OpRule:
    """Channels are free. Batch and space are too in evaluation; in training the statistics are
    exchanged.
    """
    shape = op.operands[0].shape
    # ``[n, c, y0, y1]``: in training batch and space go into the statistics.
    rows = ["n", *names(len(shape) - 2, "y")]
    training = (
        may_be(op.arg("training", False), bool)
        or not op.has_arg("running_mean")
        or op.arg("running_mean") is None
    )
    term = [rows[0], "c", *rows[1:]]
    form = ParallelForm(
        _BATCH_NORM_FORM,
        {row: ParallelFactor(anywhere=True) for row in rows},
        dict.fromkeys(rows, "batch_axes"),
        lambda op, local: {"count": product(size for dim, size in enumerate(shape) if dim != 1)},
    )
    return parse_rule(
        annotation([term, *[["c"]] * (len(op.operands) - 1)], [term]),
        op,
        linear_sets=_affine(op),
        parallel=form if training else None,
        updates=indices(op, "running_mean", "running_var") if training else (),
        nonempty=True,
    )


define("batch_norm", _BATCH_NORM, "F.batch_norm", _batch_norm, F.batch_norm)


def _instance_norm(op: IROp) -> OpRule:
    """Statistics are those of one sample and channel; running ones average over the batch, which
    then stays whole.
    """
    uses_input = may_be(op.arg("use_input_stats", True), bool)
    running = indices(op, "running_mean", "running_var")
    batch = "n^" if running and uses_input else "n"
    term = [batch, "c", *names(op.operands[0].ndim - 2, "y", "^" if uses_input else "")]
    text = annotation([term, *[["c"]] * (len(op.operands) - 1)], [term])
    return parse_rule(
        text, op, linear_sets=_affine(op), updates=running if uses_input else (), nonempty=True
    )


define(
    "instance_norm",
    "input, running_mean=None, running_var=None, weight=None, bias=None, "
    "use_input_stats=True, momentum=0.1, eps=1e-05",
    "F.instance_norm",
    _instance_norm,
    F.instance_norm,
)


def _local_response_norm(op: IROp) -> OpRule:
    """Averages over neighbouring channels."""
    term = ["n", "c^", *names(op.operands[0].ndim - 2, "y")]
    return parse_rule(annotation([term], [term]), op)


define(
    "local_response_norm",
    "input, size, alpha=0.0001, beta=0.75, k=1.0",
    "F.local_response_norm",
    _local_response_norm,
    F.local_response_norm,
)


def _weight_norm(op: IROp) -> OpRule:
    """``v`` with the norms ``g`` over all dims but those that ``g`` has, too."""
    v, g = op.operands
    kept = (
        [of_g == size != 1 for of_g, size in zip(g.shape, v.shape, strict=True)]
        if g.ndim
        else [False] * v.ndim
    )
    # A dim that ``g`` has may be split: each of its places has a norm of its own. Over the others
    # the norm is taken.
    term = [f"a{i}" if keeps else f"r{i}^" for i, keeps in enumerate(kept)]
    norms: list[str] = []
    if g.ndim:
        norms = [name if keeps else "1" for name, keeps in zip(term, kept, strict=True)]
    return parse_rule(
        annotation([term, norms], [term]), op, linear_sets=linear_sets(op, ("g",)), nonempty=True
    )


define("weight_norm", "v, g, dim=0", "torch._weight_norm", _weight_norm, *callables("_weight_norm"))


def _normalize(op: IROp) -> OpRule:
    ndim = op.operands[0].ndim
    dim = op.arg("dim", 1)
    whole = (
        {d % ndim for d in dim} if isinstance(dim, tuple | list) else {dim_of(op, ndim, default=1)}
    )
    term = [f"r{i}^" if i in whole else f"a{i}" for i in range(ndim)]
    return parse_rule(annotation([term], [term]), op)


define(
    "normalize", "input, p=2.0, dim=1, eps=1e-12", "F.normalize", _normalize, (F.normalize, _PLAIN)
)
