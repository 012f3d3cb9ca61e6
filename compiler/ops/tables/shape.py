"""Operators that give elements another shape: views, permutations, expansion.

They are linear. Sizes and counts among their arguments are rewritten from a rank's local sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ops.aliases import Kwargs, callables, getter, methods, rewriting, through
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.opdef import RuleMaker
from shardwright.compiler.ops.rule import DimRefs, Localise, LocalSizes, OpRule, TensorRefs
from shardwright.compiler.ops.rule_builder import (
    FROZEN,
    RuleBuilder,
    all_dims,
    broadcast,
    dim_of,
    linear_sets,
)
from shardwright.compiler.ops.shapes import factorise


def _local_shape(name: str) -> Localise:
    """The argument is the shape of the result."""
    return lambda op, rule, local: {name: local.shape(rule.results[0])}


# ------------------------------------------------------------------------------------------------
# views


def _view(localise: Localise | None = None) -> Callable[[IROp], OpRule]:
    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        operand, result = factorise(build, op.operands[0].shape, op.results[0].shape)
        return build.rule(
            [operand], [result], linear=linear_sets(op, ("input",)), localise=localise
        )

    return rule


def _view_or_bitcast(op: IROp) -> OpRule:
    """``x.view(dtype)`` reads the bytes of the last dim anew."""
    shape = op.arg("shape")
    if len(shape) != 1 or not isinstance(shape[0], torch.dtype):
        return _view(_local_shape("shape"))(op)
    build = RuleBuilder()
    outer = build.tensor(op.operands[0].shape[:-1])
    last = (build.dim(value.shape[-1], FROZEN) for value in (op.operands[0], op.results[0]))
    operand, result = ((*outer, refs) for refs in last)
    return build.rule([operand], [result])


def _unflatten_sizes(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    start = dim_of(op, op.operands[0].ndim)
    return {"sizes": local.shape(rule.results[0])[start : start + len(op.arg("sizes"))]}


def _squeeze(op: IROp) -> OpRule:
    """The dims to drop are written out: a dim of another size may have local size 1."""
    shape = op.operands[0].shape
    dropped = tuple(dim for dim in all_dims(op.arg("dim"), len(shape)) if shape[dim] == 1)

    def localise(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
        return {"dim": dropped[0] if len(dropped) == 1 else dropped}

    build = RuleBuilder()
    refs = build.tensor(shape)
    kept = tuple(dim_refs for dim, dim_refs in enumerate(refs) if dim not in dropped)
    return build.rule([refs], [kept], linear=linear_sets(op, ("input",)), localise=localise)


def _unsqueeze(op: IROp) -> OpRule:
    build = RuleBuilder()
    refs = build.tensor(op.operands[0].shape)
    dim = dim_of(op, len(refs) + 1)
    return build.rule([refs], [(*refs[:dim], (), *refs[dim:])], linear=linear_sets(op, ("input",)))


define(
    "view",
    "input, *shape",
    ".view",
    _view_or_bitcast,
    *methods("view"),
    *through(
        rewriting(lambda self, other: {"input": self, "shape": tuple(other.shape)}),
        methods("view_as"),
    ),
)
define(
    "reshape",
    "input, *shape",
    ".reshape",
    _view(_local_shape("shape")),
    *callables("reshape"),
    *through(
        rewriting(lambda self, other: {"input": self, "shape": tuple(other.shape)}),
        methods("reshape_as"),
    ),
)
define(
    "flatten", "input, start_dim=0, end_dim=-1", ".flatten", _view(), *callables("flatten", "ravel")
)
define(
    "unflatten", "input, dim, sizes", ".unflatten", _view(_unflatten_sizes), *callables("unflatten")
)
define("squeeze", "input, dim=None", ".squeeze", _squeeze, *callables("squeeze"))
define("unsqueeze", "input, dim", ".unsqueeze", _unsqueeze, *callables("unsqueeze"))

# -------------------------------------------------------------------------------------------------
# permutations


def _permutation(order_of: Callable[[IROp, int], Sequence[int]]) -> RuleMaker:
    """``order_of(op, ndim)``: for each dim of the result the dim of the input it was."""

    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        refs = build.tensor(op.operands[0].shape)
        return build.rule(
            [refs],
            [tuple(refs[dim] for dim in order_of(op, len(refs)))],
            linear=linear_sets(op, ("input",)),
        )

    return rule


def _transpose_order(op: IROp, ndim: int) -> list[int]:
    order = list(range(ndim))
    a, b = dim_of(op, ndim, "dim0"), dim_of(op, ndim, "dim1")
    if ndim:
        order[a], order[b] = b, a
    return order


def _movedim_order(op: IROp, ndim: int) -> list[int]:
    sources, targets = all_dims(op.arg("source"), ndim), all_dims(op.arg("destination"), ndim)
    order = [dim for dim in range(ndim) if dim not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return order


_TRANSPOSE_RENAMES = {"axis0": "dim0", "axis1": "dim1"}
define(
    "transpose",
    "input, dim0, dim1",
    ".transpose",
    _permutation(_transpose_order),
    *callables("transpose", "swapaxes", "swapdims"),
    (getter("mT"), lambda args, kwargs: ((args[0], -2, -1), {})),
    renames=_TRANSPOSE_RENAMES,
)
define(
    "adjoint",
    "input",
    "torch.adjoint",
    _permutation(lambda _, ndim: [*range(ndim - 2), ndim - 1, ndim - 2]),
    *callables("adjoint"),
)
define(
    "t",
    "input",
    ".t",
    _permutation(lambda op, ndim: range(ndim)[::-1]),
    *callables("t"),
    (getter("T"), lambda args, kwargs: ((args[0],), {})),
)
define(
    "permute",
    "input, *dims",
    ".permute",
    _permutation(lambda op, n: all_dims(op.arg("dims"), n)),
    *callables("permute"),
)
define(
    "movedim",
    "input, source, destination",
    ".movedim",
    _permutation(_movedim_order),
    *callables("movedim", "moveaxis"),
)

# -------------------------------------------------------------------------------------------------
# expansion


def _expand(op: IROp) -> OpRule:
    build = RuleBuilder()
    result = build.tensor(op.results[0].shape)
    return build.rule(
        [broadcast(op.operands[0].shape, result)],
        [result],
        linear=linear_sets(op, ("input",)),
        localise=_local_shape("size"),
    )


def _broadcast_tensors(op: IROp) -> OpRule:
    build = RuleBuilder()
    result = build.tensor(op.results[0].shape)
    operands = [broadcast(value.shape, result) for value in op.operands]
    return build.rule(operands, [result] * len(op.results), linear=linear_sets(op, ("tensors",)))


def _repeat(op: IROp) -> OpRule:
    """Each dim of the result is (copies, size); new dims come first."""
    build = RuleBuilder()
    shape, counts = op.operands[0].shape, op.arg("repeats")
    operand = build.tensor(shape)
    padded: TensorRefs = ((),) * (len(counts) - len(shape)) + operand
    result = tuple((*build.dim(count), *refs) for count, refs in zip(counts, padded, strict=True))

    def localise(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
        return {"repeats": tuple(local.dim_size(_copies(rule, refs)) for refs in rule.results[0])}

    return build.rule([operand], [result], linear=linear_sets(op, ("input",)), localise=localise)


def _copies(rule: OpRule, refs: DimRefs) -> DimRefs:
    """The factors of a dim of the result that no operand has."""
    dims = (dim for tensor in rule.operands for dim in tensor)
    read = {ref.factor for dim in dims for ref in dim}
    return tuple(ref for ref in refs if ref.factor not in read)


def _repeat_interleave(op: IROp) -> OpRule:
    """Each element of a dim becomes a run of copies: (size, copies). Counts that differ by element
    leave nothing to split.
    """
    build = RuleBuilder()
    shape, count, dim = op.operands[0].shape, op.arg("repeats"), op.arg("dim")
    if not isinstance(count, int):
        return build.rule(
            [build.whole(value.shape) for value in op.operands],
            [build.whole(op.results[0].shape)],
            linear=linear_sets(op, ("input",)),
        )
    operand = build.tensor(shape)
    copies = build.dim(count)

    def localise(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
        sizes = [local.dim_size(_copies(rule, refs)) for refs in rule.results[0]]
        # A rank may have some of the copies of each element: then it repeats less often.
        return {"repeats": sizes[0 if dim is None else dim % len(sizes)]}

    result: TensorRefs
    if dim is None:
        result = ((*(ref for refs in operand for ref in refs), *copies),)
    else:
        dim %= len(shape)
        result = (*operand[:dim], (*operand[dim], *copies), *operand[dim + 1 :])
    return build.rule([operand], [result], linear=linear_sets(op, ("input",)), localise=localise)


def _meshgrid(op: IROp) -> OpRule:
    build = RuleBuilder()
    dims = [build.dim(value.shape[0] if value.ndim else 1) for value in op.operands]
    result = list(dims)
    if op.arg("indexing") == "xy" and len(dims) > 1:
        result[:2] = result[1::-1]
    operands = [(refs,) * value.ndim for refs, value in zip(dims, op.operands, strict=True)]
    return build.rule(operands, [tuple(result)] * len(dims), linear=linear_sets(op, ("tensors",)))


def _tile(input: Any, *dims: Any) -> Kwargs:
    counts = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return {"input": input, "repeats": (1,) * (len(input.shape) - len(counts)) + counts}


define(
    "expand",
    "input, *size",
    ".expand",
    _expand,
    *methods("expand"),
    *callables("broadcast_to"),
    (
        torch.Tensor.expand_as,
        rewriting(lambda self, other: {"input": self, "size": tuple(other.shape)}),
    ),
)
define(
    "broadcast_tensors",
    "*tensors",
    "torch.broadcast_tensors",
    _broadcast_tensors,
    torch.broadcast_tensors,
)
define(
    "repeat",
    "input, *repeats",
    ".repeat",
    _repeat,
    *methods("repeat"),
    *through(rewriting(_tile), callables("tile")),
)
define(
    "repeat_interleave",
    "input, repeats, dim=None, *, output_size=None",
    ".repeat_interleave",
    _repeat_interleave,
    *through(
        lambda args, kwargs: (
            args,
            {key: value for key, value in kwargs.items() if key != "output_size"},
        ),
        callables("repeat_interleave"),
    ),
)
define("meshgrid", "*tensors, indexing=None", "torch.meshgrid", _meshgrid, torch.meshgrid)

# -------------------------------------------------------------------------------------------------
# halves and complex parts


def _glu(op: IROp) -> OpRule:
    """The dim is (value or gate, size)."""
    build = RuleBuilder()
    shape = op.results[0].shape
    dim = dim_of(op, len(shape), default=-1)
    result = build.tensor(shape)
    halves = build.dim(2, FROZEN)
    return build.rule([(*result[:dim], halves + result[dim], *result[dim + 1 :])], [result])


def _complex_parts(op: IROp) -> OpRule:
    """``[*, 2]`` real and ``[*]`` complex, either way."""
    build = RuleBuilder()
    to_complex = op.results[0].dtype.is_complex
    outer = build.tensor((op.results[0] if to_complex else op.operands[0]).shape)
    parts = (*outer, build.dim(2, FROZEN))
    return build.rule(
        [parts if to_complex else outer],
        [outer if to_complex else parts],
        linear=linear_sets(op, ("input",)),
    )


define("glu", "input, dim=-1", "F.glu", _glu, *callables("glu"))
define("view_as_real", "input", "torch.view_as_real", _complex_parts, torch.view_as_real)
define("view_as_complex", "input", "torch.view_as_complex", _complex_parts, torch.view_as_complex)
