"""Reductions, scans, sorting and softmax: operators that treat some dims as a whole.

Sums and means may be split over the dims they reduce; softmax and its relatives communicate there;
the others stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import product
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.aliases import callables, functions, through, without
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.opdef import RuleMaker
from shardwright.compiler.ops.rule import OpRule, ParallelFactor, ParallelForm
from shardwright.compiler.ops.rule_builder import RuleBuilder, all_dims, dim_of, linear_sets
from shardwright.compiler.ops.terms import (
    RUNTIME,
    annotation,
    broadcast,
    define_form,
    names,
    over_count,
)

_PLAIN = without("out", "_stacklevel")
_FORM_AXES = "*, dim_axes=()"


def reduced_term(ndim: int, dims: Sequence[int], mark: str) -> list[str]:
    """The term of an operand whose dims are kept or reduced: ``["a0", "r1+", "a2"]``."""
    return [f"r{dim}{mark}" if dim in dims else f"a{dim}" for dim in range(ndim)]


def reduced_annotation(op: IROp, dims: Sequence[int], mark: str) -> str:
    """The annotation of a reduction of the first operand over ``dims``, with or without
    ``keepdim``.
    """
    term = reduced_term(op.operands[0].ndim, dims, mark)
    kept = [name for dim, name in enumerate(term) if dim not in dims]
    if op.arg("keepdim", False):
        kept = ["1" if dim in dims else name for dim, name in enumerate(term)]
    return annotation([term], [kept] * len(op.results))


def _dims(op: IROp) -> tuple[int, ...]:
    dim = op.arg("dim")
    return all_dims(None if dim == () else dim, op.operands[0].ndim)


# ------------------------------------------------------------------------------------------------
# reductions


def _sum(op: IROp) -> OpRule:
    return parse_rule(
        reduced_annotation(op, _dims(op), "+"), op, linear_sets=linear_sets(op, ("input",))
    )


define(
    "sum",
    "input, dim=None, keepdim=False, *, dtype=None",
    "torch.sum",
    _sum,
    *through(_PLAIN, callables("sum")),
)


def _count(op: IROp) -> OpRule:
    return parse_rule(reduced_annotation(op, _dims(op), "+"), op)


_NANSUM = callables("nansum")
define(
    "nansum",
    "input, dim=None, keepdim=False, *, dtype=None",
    "torch.nansum",
    _count,
    *through(_PLAIN, _NANSUM),
)
define(
    "count_nonzero",
    "input, dim=None",
    "torch.count_nonzero",
    _count,
    *through(_PLAIN, callables("count_nonzero")),
)

_MEAN = "input, dim=None, keepdim=False, *, dtype=None"
_MEAN_FORM = define_form("mean", f"{_MEAN}, count=0")


def _mean(op: IROp) -> OpRule:
    """A mean over a split dim is the local sum over the global count."""
    dims = _dims(op)
    form = over_count(
        _MEAN_FORM, [f"r{dim}" for dim in dims], product(op.operands[0].shape[dim] for dim in dims)
    )
    return parse_rule(
        reduced_annotation(op, dims, "+"),
        op,
        linear_sets=linear_sets(op, ("input",)),
        parallel=form,
    )


define("mean", _MEAN, "torch.mean", _mean, *through(_PLAIN, callables("mean")))


def _whole(op: IROp) -> OpRule:
    """The dims reduced stay whole."""
    return parse_rule(reduced_annotation(op, _dims(op), "^"), op)


def _truth(op: IROp) -> OpRule:
    """Unlike its neighbours, this one takes ``dim=()`` at its word: it reduces nothing."""
    if op.arg("dim") == ():
        term = reduced_term(op.operands[0].ndim, (), "")
        return parse_rule(annotation([term], [term]), op)
    return _whole(op)


for _name in ("any", "all"):
    define(
        _name,
        "input, dim=None, keepdim=False",
        f"torch.{_name}",
        _truth,
        *through(_PLAIN, callables(_name)),
    )
for _name in ("amax", "amin", "argmax", "argmin", "aminmax", "nanmean", "prod"):
    _dtype = ", *, dtype=None" if _name in ("nanmean", "prod") else ""
    define(
        _name,
        f"input, dim=None, keepdim=False{_dtype}",
        f"torch.{_name}",
        _whole,
        *through(_PLAIN, callables(_name)),
    )


def _correction(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``unbiased``, given by name or in the place of ``dim`` or after it, as ``correction``."""
    keywords = {key: value for key, value in kwargs.items() if key != "out"}
    positional = list(args)
    # ``x.var(False)`` and ``x.var(1, False)``: a bool cannot be a dim.
    if len(positional) > 1 and isinstance(positional[1], bool):
        keywords["unbiased"] = positional.pop(1)
    elif len(positional) > 2:
        keywords["unbiased"] = positional.pop(2)
        keywords |= dict(zip(["keepdim"], positional[2:], strict=False))
        positional = positional[:2]
    if "unbiased" in keywords:
        keywords["correction"] = int(keywords.pop("unbiased"))
    if keywords.get("correction", 1) is None:
        del keywords["correction"]
    return tuple(positional), keywords


for _name in ("std", "var", "std_mean", "var_mean"):
    _signature = "input, dim=None, *, correction=1, keepdim=False"
    define(_name, _signature, f"torch.{_name}", _whole, *through(_correction, callables(_name)))


def _max(op: IROp) -> OpRule:
    """Three operators of one name: the largest of all, the largest along a dim with its index, the
    larger of two.
    """
    if isinstance(op.arg("dim"), IRValue):
        operands, result = broadcast([value.shape for value in op.operands])
        return parse_rule(annotation(operands, [result]), op)
    return _whole(op)


for _name in ("max", "min"):
    define(
        _name,
        "input, dim=None, keepdim=False",
        f"torch.{_name}",
        _max,
        *through(_PLAIN, callables(_name)),
        renames={"other": "dim"},
    )
for _name in ("median", "nanmedian"):
    define(
        _name,
        "input, dim=None, keepdim=False",
        f"torch.{_name}",
        _whole,
        *through(_PLAIN, callables(_name)),
    )


def _ranked(op: IROp) -> OpRule:
    return parse_rule(
        reduced_annotation(op, (dim_of(op, op.operands[0].ndim, default=-1),), "^"), op
    )


define(
    "mode",
    "input, dim=-1, keepdim=False",
    "torch.mode",
    _ranked,
    *through(_PLAIN, callables("mode")),
)
define(
    "kthvalue",
    "input, k, dim=-1, keepdim=False",
    "torch.kthvalue",
    _ranked,
    *through(_PLAIN, callables("kthvalue")),
)


def _quantile(op: IROp) -> OpRule:
    """The dims are whole; a tensor of several quantiles gives the result one more dim, in front."""
    build = RuleBuilder()
    whole, keepdim = _dims(op), op.arg("keepdim", False)
    source = build.tensor(op.operands[0].shape, frozen=whole)
    left = [
        () if dim in whole else refs
        for dim, refs in enumerate(source)
        if keepdim or dim not in whole
    ]
    numbers = [build.whole(value.shape) for value in op.operands[1:]]
    front = build.whole(op.results[0].shape[: op.results[0].ndim - len(left)])
    return replace(build.rule([source, *numbers], [(*front, *left)]), nonempty=True)


for _name in ("quantile", "nanquantile"):
    _signature = "input, q, dim=None, keepdim=False, *, interpolation='linear'"
    define(_name, _signature, f"torch.{_name}", _quantile, *through(_PLAIN, callables(_name)))


def _histc(op: IROp) -> OpRule:
    """Counts of pieces add up, if the bins are told and do not follow from the elements."""
    mark = "^" if op.arg("min", 0) == op.arg("max", 0) else "+"
    return parse_rule(annotation([names(op.operands[0].ndim, "r", mark)], [["b^"]]), op)


define(
    "histc",
    "input, bins=100, min=0, max=0",
    "torch.histc",
    _histc,
    *through(_PLAIN, callables("histc")),
)


def _norm(op: IROp) -> OpRule:
    matrix = op.arg("p", op.arg("ord")) == "nuc" or op.arg("ord") is not None
    # Of a tensor that is one matrix (or, with an order that is a number, one vector).
    if matrix and op.arg("dim") is None:
        return parse_rule(
            annotation([names(op.operands[0].ndim, "r", "^")], [["1"] * op.results[0].ndim]), op
        )
    return _whole(op)


_VECTOR_NORM = "x, ord=2, dim=None, keepdim=False, *, dtype=None"
define(
    "norm",
    "input, p='fro', dim=None, keepdim=False, *, dtype=None",
    "torch.norm",
    _norm,
    *through(_PLAIN, callables("norm")),
)
define(
    "linalg.vector_norm",
    _VECTOR_NORM,
    "torch.linalg.vector_norm",
    _whole,
    (torch.linalg.vector_norm, _PLAIN),
    renames={"input": "x"},
)
define(
    "linalg.norm",
    "A, ord=None, dim=None, keepdim=False, *, dtype=None",
    "torch.linalg.norm",
    _norm,
    (torch.linalg.norm, _PLAIN),
    renames={"input": "A"},
)

# -------------------------------------------------------------------------------------------------
# along one dim


def _along_rule(op: IROp, dim_default: int, *joint: tuple[str, ...]) -> OpRule:
    """The rule of an operator that works along one dim, which stays whole; the result may have
    another size there.
    """
    ndim = op.operands[0].ndim
    dim = dim_of(op, ndim, default=dim_default)
    operand = [f"c{i}^" if i == dim else f"a{i}" for i in range(ndim)]
    result = [f"k{i}^" if i == dim else f"a{i}" for i in range(ndim)]
    same = not ndim or op.operands[0].shape[dim] == op.results[0].shape[dim]
    return parse_rule(
        annotation([operand], [operand if same else result] * len(op.results)),
        op,
        linear_sets=linear_sets(op, *joint),
    )


def _along(dim_default: int = -1) -> RuleMaker:
    """:func:`_along_rule` of an operator that has this dim by default."""
    return lambda op: _along_rule(op, dim_default)


def _scan(*joint: tuple[str, ...]) -> RuleMaker:
    """The rule of a scan: the dim may be split, as ranks tell each other what their pieces come
    to.
    """

    def rule(op: IROp) -> OpRule:
        found = _along_rule(op, 0, *joint)
        # The form has a place for every axis that cuts the dim, frozen but for it.
        scanned = [factor.name for factor in found.factors if found.frozen(factor.name)]
        form = ParallelForm(
            f"{RUNTIME}.{op.target}",
            dict.fromkeys(scanned, ParallelFactor()),
            dict.fromkeys(scanned, "dim_axes"),
        )
        return replace(found, parallel=form)

    return rule


for _name in ("cumsum", "cumprod", "logcumsumexp"):
    _options = "" if _name == "logcumsumexp" else ", *, dtype=None"
    _joint = [("input",)] if _name == "cumsum" else []
    define(
        _name,
        f"input, dim{_options}",
        f"torch.{_name}",
        _scan(*_joint),
        *through(_PLAIN, callables(_name)),
    )
    _options = _options or ", *"
    define_form(_name, f"input, dim{_options}, dim_axes=()")
for _name in ("cummax", "cummin"):
    define(_name, "input, dim", f"torch.{_name}", _along(0), *through(_PLAIN, callables(_name)))
define(
    "topk",
    "input, k, dim=-1, largest=True, sorted=True",
    "torch.topk",
    _along(),
    *through(_PLAIN, callables("topk")),
)
define(
    "sort",
    "input, dim=-1, descending=False, *, stable=None",
    "torch.sort",
    _along(),
    *through(_PLAIN, callables("sort")),
)
define(
    "argsort",
    "input, dim=-1, descending=False, stable=False",
    "torch.argsort",
    _along(),
    *callables("argsort"),
)


def _renorm(op: IROp) -> OpRule:
    """Every slice along ``dim`` is one vector: all other dims stay whole."""
    dim = dim_of(op, op.operands[0].ndim)
    term = ["a" if i == dim else f"r{i}^" for i in range(op.operands[0].ndim)]
    return parse_rule(annotation([term], [term]), op)


define(
    "renorm",
    "input, p, dim, maxnorm",
    "torch.renorm",
    _renorm,
    *through(_PLAIN, callables("renorm")),
)


def _softmax(target: str) -> RuleMaker:
    """Free in all dims but one, where the parallel form exchanges maxima and sums."""

    def rule(op: IROp) -> OpRule:
        ndim = op.operands[0].ndim
        dim = dim_of(op, ndim, default=implicit_softmax_dim(ndim))
        term = ["c^" if i == dim else f"a{i}" for i in range(ndim)]
        form = ParallelForm(
            target,
            # Maxima and sums do not care which places a rank has.
            {"c": ParallelFactor(anywhere=True)},
            {"c": "dim_axes"},
            lambda op, local: {"dim": op.arg("dim", dim)},
        )
        return parse_rule(annotation([term], [term]), op, parallel=form)

    return rule


def implicit_softmax_dim(ndim: int) -> int:
    """The dim that torch takes when none is given."""
    return 0 if ndim in (0, 1, 3) else 1


_SOFTMAX = "input, dim=None, dtype=None"
for _name in ("softmax", "log_softmax"):
    _form = define_form(_name, f"{_SOFTMAX}, {_FORM_AXES}")
    define(_name, _SOFTMAX, f"F.{_name}", _softmax(_form), *through(_PLAIN, callables(_name)))


def _softmin(op: IROp) -> OpRule:
    ndim = op.operands[0].ndim
    dim = dim_of(op, ndim, default=implicit_softmax_dim(ndim))
    term = ["c^" if i == dim else f"a{i}" for i in range(ndim)]
    return parse_rule(annotation([term], [term]), op)


define("softmin", _SOFTMAX, "F.softmin", _softmin, *through(_PLAIN, callables("softmin")))
# Zeros, not nan, where all of a row is minus infinity.
define(
    "safe_softmax",
    "input, dim, dtype=None",
    "torch._safe_softmax",
    _softmin,
    *functions("_safe_softmax"),
)

_LOGSUMEXP = "input, dim, keepdim=False"
_LOGSUMEXP_FORM = define_form("logsumexp", f"{_LOGSUMEXP}, {_FORM_AXES}")


def _logsumexp(op: IROp) -> OpRule:
    dims = _dims(op)
    factors = {f"r{dim}": ParallelFactor(results=("R",), anywhere=True) for dim in dims}
    form = ParallelForm(_LOGSUMEXP_FORM, factors, dict.fromkeys(factors, "dim_axes"))
    return parse_rule(reduced_annotation(op, dims, "^"), op, parallel=form)


define(
    "logsumexp", _LOGSUMEXP, "torch.logsumexp", _logsumexp, *through(_PLAIN, callables("logsumexp"))
)

# -------------------------------------------------------------------------------------------------
# distances


def _cdist(op: IROp) -> OpRule:
    left, right = op.operands
    (first, second), batch = broadcast([left.shape[:-2], right.shape[:-2]])
    return parse_rule(
        annotation([[*first, "m", "d^"], [*second, "n", "d"]], [[*batch, "m", "n"]]), op
    )


define(
    "cdist",
    "x1, x2, p=2.0, compute_mode='use_mm_for_euclid_dist_if_necessary'",
    "torch.cdist",
    _cdist,
    *functions("cdist"),
)


def _cosine_similarity(op: IROp) -> OpRule:
    left, right = op.operands
    operands, whole = broadcast([left.shape, right.shape])
    dim = dim_of(op, len(whole), default=1)
    for term in (*operands, whole):
        position = dim - len(whole) + len(term)
        if position >= 0 and term[position] != "1":
            term[position] += "^"
    return parse_rule(annotation(operands, [whole[:dim] + whole[dim + 1 :]]), op)


define(
    "cosine_similarity",
    "x1, x2, dim=1, eps=1e-08",
    "F.cosine_similarity",
    _cosine_similarity,
    F.cosine_similarity,
)


def _pairwise_distance(op: IROp) -> OpRule:
    operands, whole = broadcast([value.shape for value in op.operands])
    for term in (*operands, whole):
        if term[-1] != "1":
            term[-1] += "^"
    return parse_rule(
        annotation(operands, [[*whole[:-1], *(["1"] if op.arg("keepdim", False) else [])]]), op
    )


define(
    "pairwise_distance",
    "x1, x2, p=2.0, eps=1e-06, keepdim=False",
    "F.pairwise_distance",
    _pairwise_distance,
    F.pairwise_distance,
)
