"""Operators for which it matters where along a dim an element stands: triangles, padding, rolls,
diagonals, windows.

Such dims stay whole, but for those whose places are moved and can be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ops.aliases import callables, methods, through
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.edges import Way, with_edges
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import (
    FROZEN,
    RuleBuilder,
    all_dims,
    dim_of,
    linear_sets,
)
from shardwright.compiler.ops.terms import RUNTIME, define_form


def _moved(op: IROp, windows: Mapping[int, tuple[Size, ...]]) -> OpRule:
    """The rule of an operator that moves the places of some dims, each as its window says. The
    result has the shape of the input.
    """
    build = RuleBuilder()
    refs = build.tensor(op.operands[0].shape, frozen=windows)
    rule = build.rule([refs], [refs], linear=linear_sets(op, ("input",)))
    ways = [Way(dim, dim, window) for dim, window in windows.items()]
    return with_edges(rule, f"{RUNTIME}.{op.target}", ways, knows_runs=True)


def _flip(op: IROp) -> OpRule:
    shape = op.operands[0].shape
    dims = all_dims(op.arg("dims"), len(shape)) if shape else ()
    return _moved(op, {dim: (-1, 1 - shape[dim], 1) for dim in dims})


def _roll(op: IROp) -> OpRule:
    shape, shifts, dims = op.operands[0].shape, op.arg("shifts"), op.arg("dims")
    if dims is None or dims == ():  # rolls what it is as one long dim
        build = RuleBuilder()
        refs = build.whole(shape)
        return build.rule([refs], [refs], linear=linear_sets(op, ("input",)))
    amounts: dict[int, Size] = {}
    for amount, dim in zip(*map(_as_tuple, (shifts, dims)), strict=True):
        amounts[dim % len(shape)] = amounts.get(dim % len(shape), 0) + amount
    return _moved(op, {dim: (1, amount, 1, 1, True) for dim, amount in amounts.items()})


def _as_tuple(argument: Any) -> tuple[Any, ...]:
    return tuple(argument) if isinstance(argument, tuple | list) else (argument,)


def _triangle(op: IROp) -> OpRule:
    build = RuleBuilder()
    ndim = op.operands[0].ndim
    refs = build.tensor(op.operands[0].shape, frozen=(ndim - 2, ndim - 1))
    return build.rule([refs], [refs], linear=linear_sets(op, ("input",)))


def _pad(op: IROp) -> OpRule:
    """Padded dims are frozen. Reflected, repeated and zero padding are linear, other constants are
    not.
    """
    build = RuleBuilder()
    old, new = op.operands[0].shape, op.results[0].shape
    amounts = op.arg("pad")
    padded = {len(old) - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    constant = op.arg("mode", "constant") == "constant"
    frozen = padded
    if not constant:
        # The other modes are made for [N, C, ...], and refuse tensors that are empty in any dim but
        # N. There are amounts for all dims but N and C.
        has_batch = len(old) == len(amounts) // 2 + 2
        frozen = set(range(1 if has_batch else 0, len(old)))
    operand = build.tensor(old, frozen)
    result = tuple(
        build.dim(new[dim], FROZEN) if dim in padded else refs for dim, refs in enumerate(operand)
    )
    linear = not constant or op.arg("value") in (None, 0)
    rule = build.rule([operand], [result], linear=linear_sets(op, ("input",)) if linear else ())
    if not constant:
        return rule
    before = {dim: amounts[2 * (len(old) - 1 - dim)] for dim in padded}
    ways = [Way(dim, dim, (1, amount, 1)) for dim, amount in sorted(before.items())]
    return with_edges(rule, f"{RUNTIME}.pad_dims", ways, knows_runs=True)


def _diff(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.results[0].shape
    dim = dim_of(op, len(shape), default=-1)
    result = build.tensor(shape, frozen=(dim,))
    operands = [
        (*result[:dim], build.dim(value.shape[dim], FROZEN), *result[dim + 1 :])
        for value in op.operands
    ]
    return build.rule(operands, [result], linear=linear_sets(op, ("input", "prepend", "append")))


def _diagonal(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dims = (dim_of(op, len(shape), "dim1", 0), dim_of(op, len(shape), "dim2", 1))
    operand = build.tensor(shape, frozen=dims)
    rest = tuple(refs for dim, refs in enumerate(operand) if dim not in dims)
    return build.rule(
        [operand],
        [(*rest, build.dim(op.results[0].shape[-1], FROZEN))],
        linear=linear_sets(op, ("input",)),
    )


def _diag_embed(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.results[0].shape
    dims = (dim_of(op, len(shape), "dim1", -2), dim_of(op, len(shape), "dim2", -1))
    result = build.tensor(shape, frozen=dims)
    rest = tuple(refs for dim, refs in enumerate(result) if dim not in dims)
    return build.rule(
        [(*rest, build.dim(op.operands[0].shape[-1], FROZEN))],
        [result],
        linear=linear_sets(op, ("input",)),
    )


def _unfold(op: IROp) -> OpRule:
    """Even windows that tile the dim freeze it: a rank without any could not say so."""
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape), "dimension")
    source = build.tensor(shape, frozen=(dim,))
    windows = build.dim(op.results[0].shape[dim], FROZEN)
    window = build.dim(op.arg("size"), FROZEN)
    rule = build.rule(
        [source],
        [(*source[:dim], windows, *source[dim + 1 :], window)],
        linear=linear_sets(op, ("input",)),
    )
    way = Way(dim, dim, (op.arg("step"), 0, op.arg("size")))
    return with_edges(rule, f"{RUNTIME}.unfold", [way], knows_runs=True)


define("roll", "input, shifts, dims=None", "torch.roll", _roll, *callables("roll"))
define_form("roll", "input, shifts, dims=None, *, edges=()")
define(
    "flip",
    "input, *dims",
    ".flip",
    _flip,
    *callables("flip"),
    *through(lambda args, kwargs: ((*args, 0), kwargs), callables("flipud")),
    *through(lambda args, kwargs: ((*args, 1), kwargs), callables("fliplr")),
)
define_form("flip", "input, *dims, edges=()")
define("tril", "input, diagonal=0", "torch.tril", _triangle, *callables("tril"))
define("triu", "input, diagonal=0", "torch.triu", _triangle, *callables("triu"))
define("pad", "input, pad, mode='constant', value=None", "F.pad", _pad, F.pad)
define_form("pad_dims", "input, pad, mode='constant', value=None, *, edges=()")
define(
    "diff", "input, n=1, dim=-1, prepend=None, append=None", "torch.diff", _diff, *callables("diff")
)
define(
    "diagonal", "input, offset=0, dim1=0, dim2=1", ".diagonal", _diagonal, *callables("diagonal")
)
define(
    "diag_embed",
    "input, offset=0, dim1=-2, dim2=-1",
    "torch.diag_embed",
    _diag_embed,
    *callables("diag_embed"),
)
define("unfold", "input, dimension, size, step", ".unfold", _unfold, *methods("unfold"))
define_form("unfold", "input, dimension, size, step, *, edges=()")
