"""Operators that read or write chosen places of a tensor.

A dim that is indexed is frozen in the source: its places have meaning. One that is sliced, or of
which one place is read, may be cut nevertheless: ranks send each other what they lack. The dims of
index tensors are free for reading, as each place is read by itself. Writes that add up are a sum
over their pieces; others have an order, and are frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, is_static
from shardwright.compiler.ops.aliases import Kwargs, callables, methods, rewriting, through
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.edges import Way, with_edges, with_picks
from shardwright.compiler.ops.index_expressions import Item, pick, read_index, slice_bounds
from shardwright.compiler.ops.opdef import RuleMaker
from shardwright.compiler.ops.rule import DimRefs, FactorKind, LocalSizes, OpRule, TensorRefs
from shardwright.compiler.ops.rule_builder import (
    FROZEN,
    SUMMED,
    RuleBuilder,
    broadcast,
    dim_of,
    linear_sets,
    whole_rule,
)
from shardwright.compiler.ops.terms import RUNTIME, define_form

# -------------------------------------------------------------------------------------------------
# brackets


def _getitem(op: IROp) -> OpRule:
    source = op.operands[0]
    items = read_index(op.arg("index"), source.shape)
    if items is None:
        return whole_rule(op, ("input",))
    build = RuleBuilder()
    picked = pick(build, items, source.shape, op.results[0].shape)
    rule = build.rule(
        [picked.source, *picked.indices],
        [picked.result],
        linear=linear_sets(op, ("input",)),
        localise=_open_slices,
    )
    if picked.indices:
        return rule
    ways, places, result_dim = [], {}, 0
    for item in items:
        if item.kind == "slice":
            start, stop = slice_bounds(item.arg, source.shape[item.dim])
            if picked.result[result_dim]:
                ways.append(Way(item.dim, result_dim, (item.arg.step or 1, -start, 1)))
            elif stop != start:
                places[item.dim] = start
        elif item.kind == "int" and is_static(source.shape[item.dim]):
            places[item.dim] = item.arg % source.shape[item.dim]
        # A number takes its dim out of the result.
        result_dim += item.kind != "int"
    form = f"{RUNTIME}.getitem"
    return with_picks(with_edges(rule, form, ways, knows_runs=True), form, places)


def _open_slices(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    """Slices that take all of a dim, or a place of every group, lose their end, which counts the
    whole dim.
    """
    items = read_index(op.arg("index"), op.operands[0].shape)
    assert items is not None

    def opened(item: Item) -> Arg:
        if item.kind not in ("full", "strided"):
            return item.arg
        return slice(None) if item.kind == "full" else slice(item.arg.start, None, item.arg.step)

    return {"index": tuple(map(opened, items))}


def _brackets(self: Any, index: Any) -> Kwargs:
    return {"input": self, "index": index if isinstance(index, tuple) else (index,)}


define(
    "getitem",
    "input, index",
    "[]",
    _getitem,
    *through(rewriting(_brackets), methods("__getitem__")),
)
define_form("getitem", "input, index, *, edges=(), picked=()")
define_form("narrow_dim", "input, dim, start, length, *, edges=()")
define_form("select", "input, dim, index, *, picked=()")

# -------------------------------------------------------------------------------------------------
# reading along one dim


def _replaced(refs: TensorRefs, dim: int, by: DimRefs) -> TensorRefs:
    return (*refs[:dim], by, *refs[dim + 1 :])


def _index_select(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape))
    source = build.tensor(shape, frozen=(dim,))
    # Which places are read is up to values, so all of the dim is needed; the list of places may be
    # split.
    places = build.dim(op.results[0].shape[dim]) if shape else ()
    index = (places,) * op.operands[1].ndim
    return build.rule(
        [source, index],
        [_replaced(source, dim, places) if shape else ()],
        linear=linear_sets(op, ("input",)),
    )


def _gather(op: IROp) -> OpRule:
    """Along the other dims the index may be shorter than the input: such dims are frozen."""
    build = RuleBuilder()
    source, index = op.operands[0].shape, op.operands[1].shape
    dim = dim_of(op, len(source))
    frozen = {d for d in range(len(index)) if d != dim and index[d] != source[d]}
    places = build.tensor(index, frozen=frozen)
    operand = tuple(
        build.dim(source[d], FROZEN) if d == dim or d in frozen else refs
        for d, refs in enumerate(places)
    )
    return build.rule([operand, places], [places], linear=linear_sets(op, ("input",)))


def _take_along_dim(op: IROp) -> OpRule:
    """Like ``gather``, but the other dims broadcast; without ``dim`` both are read as one long
    dim.
    """
    if op.arg("dim") is None:
        return whole_rule(op, ("input",))
    build = RuleBuilder()
    source, index = op.operands[0].shape, op.operands[1].shape
    # ``dim`` is indexed, so it stays whole; the others broadcast to the result.
    dim = dim_of(op, len(source))
    result = build.tensor(op.results[0].shape)
    operand = _replaced(
        broadcast((*source[:dim], 1, *source[dim + 1 :]), result),
        dim,
        build.dim(source[dim], FROZEN),
    )
    return build.rule(
        [operand, broadcast(index, result)], [result], linear=linear_sets(op, ("input",))
    )


def _take(op: IROp) -> OpRule:
    build = RuleBuilder()
    places = build.tensor(op.results[0].shape)
    return build.rule(
        [build.whole(op.operands[0].shape), places], [places], linear=linear_sets(op, ("input",))
    )


def _narrow(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape))
    # It takes everything.
    if op.results[0].shape == shape:
        refs = build.tensor(shape)
        return build.rule(
            [refs], [refs], linear=linear_sets(op, ("input",)), localise=_whole_length
        )
    source = build.tensor(shape, frozen=(dim,))
    rule = build.rule(
        [source],
        [_replaced(source, dim, build.dim(op.results[0].shape[dim], FROZEN))],
        linear=linear_sets(op, ("input",)),
    )
    start, _ = slice_bounds(slice(op.arg("start"), None), shape[dim])
    way = Way(dim, dim, (1, -start, 1))
    return with_edges(rule, f"{RUNTIME}.narrow_dim", [way], knows_runs=True)


def _whole_length(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    return {"length": local.dim_size(rule.results[0][dim_of(op, len(rule.results[0]))])}


def _select(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape))
    source = build.tensor(shape, frozen=(dim,))
    rule = build.rule(
        [source], [source[:dim] + source[dim + 1 :]], linear=linear_sets(op, ("input",))
    )
    index = op.arg("index")
    if not is_static(index) or not is_static(shape[dim]):
        return rule
    return with_picks(rule, f"{RUNTIME}.select", {dim: index % shape[dim]})


def _lookup(op: IROp) -> OpRule:
    """Each element of the first argument is looked up in the second; either may be a number."""
    build = RuleBuilder()
    result = build.tensor(op.results[0].shape)
    table = ("boundaries", "test_elements")
    named = zip(op.operand_names, op.operands, strict=True)
    return build.rule(
        [build.whole(value.shape) if name in table else result for name, value in named], [result]
    )


define(
    "index_select",
    "input, dim, index",
    "torch.index_select",
    _index_select,
    *callables("index_select"),
)
define(
    "gather",
    "input, dim, index",
    "torch.gather",
    _gather,
    *through(
        lambda args, kwargs: (
            args,
            {key: value for key, value in kwargs.items() if key != "sparse_grad"},
        ),
        callables("gather"),
    ),
)
define(
    "take_along_dim",
    "input, indices, dim=None",
    "torch.take_along_dim",
    _take_along_dim,
    *callables("take_along_dim"),
)
define("take", "input, index", "torch.take", _take, *callables("take"))
define("narrow", "input, dim, start, length", ".narrow", _narrow, *callables("narrow"))
define("select", "input, dim, index", ".select", _select, *callables("select"))
define(
    "isin",
    "elements, test_elements, *, assume_unique=False, invert=False",
    "torch.isin",
    _lookup,
    torch.isin,
)
define(
    "bucketize",
    "input, boundaries, *, out_int32=False, right=False",
    "torch.bucketize",
    _lookup,
    torch.bucketize,
)

# -------------------------------------------------------------------------------------------------
# writing along one dim


def _scatter(places: FactorKind) -> RuleMaker:
    """The rule of writing along one dim. ``places``: the kind of the indexed dim of index and
    source.
    """

    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        shapes = [value.shape for value in op.operands]
        target = shapes[0]
        # Dims of the target stay whole where they are indexed, or where the others have other
        # sizes.
        dim = dim_of(op, len(target))
        whole = build.tensor(
            target,
            frozen={d for d in range(len(target)) if d == dim or len({s[d] for s in shapes}) > 1},
        )
        # Index and source have one size along the indexed dim: places that belong together.
        aligned = len({shape[dim] for shape in shapes[1:]}) == 1
        along = build.dim(shapes[1][dim], places) if aligned and target else ()
        operands = [whole]
        for shape in shapes[1:]:
            refs = []
            for d, size in enumerate(shape):
                if d == dim and aligned:
                    refs.append(along)
                elif size == target[d] and d != dim:
                    refs.append(whole[d])
                else:
                    refs.append(build.dim(size, FROZEN))
            operands.append(tuple(refs))
        # Adding commutes, so pieces of the places may be summed; writing does not.
        additive = (0,) if places is SUMMED else ()
        joint = () if op.has_arg("reduce") else (("input", "src"),)
        return build.rule(operands, [whole], linear=linear_sets(op, *joint), additive=additive)

    return rule


def _index_write(places: FactorKind, source: str) -> RuleMaker:
    """The slices of ``source`` are written to the places ``index`` along one dim."""

    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        shape = op.operands[0].shape
        dim = dim_of(op, len(shape))
        whole = build.tensor(shape, frozen=(dim,))
        # Without a dim the index names one place.
        index = op.operands[1]
        along = build.dim(index.shape[0] if index.ndim else 1, places)
        written = (_replaced(whole, dim, along) if value.ndim else () for value in op.operands[2:])
        operands = [whole, (along,) * index.ndim, *written]
        additive = (0,) if places is SUMMED else ()
        return build.rule(
            operands, [whole], linear=linear_sets(op, ("input", source)), additive=additive
        )

    return rule


def _slice_scatter(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape))
    linear = linear_sets(op, ("input", "src"))
    start, stop = slice_bounds(slice(op.arg("start"), op.arg("end")), shape[dim])
    # It writes all of the dim.
    if op.arg("step", 1) == 1 and start == 0 and stop == shape[dim]:
        refs = build.tensor(shape)
        return build.rule(
            [refs, refs],
            [refs],
            linear=linear,
            localise=lambda op, rule, local: {"start": None, "end": None},
        )
    whole = build.tensor(shape, frozen=(dim,))
    part = _replaced(whole, dim, build.dim(op.operands[1].shape[dim], FROZEN))
    return build.rule([whole, part], [whole], linear=linear)


def _select_scatter(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape))
    whole = build.tensor(shape, frozen=(dim,))
    return build.rule(
        [whole, whole[:dim] + whole[dim + 1 :]], [whole], linear=linear_sets(op, ("input", "src"))
    )


def _diagonal_scatter(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dims = (dim_of(op, len(shape), "dim1", 0), dim_of(op, len(shape), "dim2", 1))
    whole = build.tensor(shape, frozen=dims)
    rest = tuple(refs for dim, refs in enumerate(whole) if dim not in dims)
    part = (*rest, build.dim(op.operands[1].shape[-1], FROZEN))
    return build.rule([whole, part], [whole], linear=linear_sets(op, ("input", "src")))


def _index_put(op: IROp) -> OpRule:
    """``indices`` has a tensor or ``None`` (all of the dim) for each of the first dims."""
    source, values = op.operands[0], op.operands[-1]
    # ``None`` in the place of an index takes all of the dim.
    indices = tuple(slice(None) if index is None else index for index in op.arg("indices"))
    items = read_index(indices, source.shape)
    if items is None:
        return whole_rule(op, ("input", "values"))
    adds_up = bool(op.arg("accumulate", False))
    build = RuleBuilder()
    picked = pick(build, items, source.shape, places=SUMMED if adds_up else FROZEN)
    operands = [picked.source, *picked.indices, _written(values.shape, picked.result)]
    additive = (0,) if adds_up else ()
    return build.rule(
        operands, [picked.source], linear=linear_sets(op, ("input", "values")), additive=additive
    )


def _masked_scatter(op: IROp) -> OpRule:
    """Computed whole, as how many elements of the source go before a place depends on the whole
    mask. The dims stay those of the input, so that what follows may be split.
    """
    build = RuleBuilder()
    result = build.whole(op.results[0].shape)
    input, mask, source = (value.shape for value in op.operands)
    operands = [broadcast(input, result), broadcast(mask, result), build.whole(source)]
    return build.rule(operands, [result], linear=linear_sets(op, ("input", "source")))


def _written(shape: tuple[Size, ...], target: TensorRefs) -> TensorRefs:
    """The factors of values written to ``target``: they broadcast, and may have further dims of
    size 1 in front.
    """
    extra = max(0, len(shape) - len(target))
    return ((),) * extra + broadcast(shape[extra:], target)


_SCATTER = "input, dim, index, src"
define(
    "scatter",
    f"{_SCATTER}, *, reduce=None",
    ".scatter",
    _scatter(FROZEN),
    *callables("scatter"),
    renames={"value": "src"},
)
define("scatter_add", _SCATTER, ".scatter_add", _scatter(SUMMED), *callables("scatter_add"))
define(
    "scatter_reduce",
    f"{_SCATTER}, reduce, *, include_self=True",
    ".scatter_reduce",
    _scatter(FROZEN),
    *callables("scatter_reduce"),
)
define(
    "index_add",
    "input, dim, index, source, *, alpha=1",
    ".index_add",
    _index_write(SUMMED, "source"),
    *callables("index_add"),
)
define(
    "index_copy",
    "input, dim, index, source",
    ".index_copy",
    _index_write(FROZEN, "source"),
    *callables("index_copy"),
    renames={"tensor": "source"},
)
define(
    "index_fill",
    "input, dim, index, value",
    ".index_fill",
    _index_write(FROZEN, "value"),
    *callables("index_fill"),
)
define(
    "slice_scatter",
    "input, src, dim=0, start=None, end=None, step=1",
    "torch.slice_scatter",
    _slice_scatter,
    *callables("slice_scatter"),
)
define(
    "select_scatter",
    "input, src, dim, index",
    "torch.select_scatter",
    _select_scatter,
    *callables("select_scatter"),
)
define(
    "diagonal_scatter",
    "input, src, offset=0, dim1=0, dim2=1",
    "torch.diagonal_scatter",
    _diagonal_scatter,
    *callables("diagonal_scatter"),
)
define(
    "masked_scatter",
    "input, mask, source",
    ".masked_scatter",
    _masked_scatter,
    *callables("masked_scatter"),
)
define(
    "index_put",
    "input, indices, values, accumulate=False",
    ".index_put",
    _index_put,
    *callables("index_put"),
)
define(  # only this form takes None among the indices
    "index_put_dims",
    "input, indices, values, accumulate=False",
    "torch.ops.aten.index_put",
    _index_put,
    torch.ops.aten.index_put,
)
