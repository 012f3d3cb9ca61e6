"""Operators that move elements around: views, permutations, expansion, concatenation, splitting, padding.

They are linear. Sizes and counts among their arguments are rewritten from a rank's local sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, is_static
from shardwright.compiler.ops.aliases import Kwargs, callables, functions, getter, methods, rewriting, through
from shardwright.compiler.ops.builder import FROZEN, RuleBuilder, all_dims, broadcast, dim_of, linear_sets
from shardwright.compiler.ops.opdef import RuleMaker
from shardwright.compiler.ops.registry import define
from shardwright.compiler.ops.rule import DimRefs, FactorRef, Localise, LocalSizes, OpRule, TensorRefs
from shardwright.compiler.ops.shapes import factorise


def _local_shape(name: str) -> Localise:
    """The argument is the shape of the result."""
    return lambda op, rule, local: {name: local.shape(rule.results[0])}


# ------------------------------------------------------------------------------------------------ views


def _view(localise: Localise | None = None) -> Callable[[IROp], OpRule]:
    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        operand, result = factorise(build, op.operands[0].shape, op.results[0].shape)
        return build.rule([operand], [result], linear=linear_sets(op, ("input",)), localise=localise)

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
    *through(rewriting(lambda self, other: {"input": self, "shape": tuple(other.shape)}), methods("view_as")),
)
define(
    "reshape",
    "input, *shape",
    ".reshape",
    _view(_local_shape("shape")),
    *callables("reshape"),
    *through(rewriting(lambda self, other: {"input": self, "shape": tuple(other.shape)}), methods("reshape_as")),
)
define("flatten", "input, start_dim=0, end_dim=-1", ".flatten", _view(), *callables("flatten", "ravel"))
define("unflatten", "input, dim, sizes", ".unflatten", _view(_unflatten_sizes), *callables("unflatten"))
define("squeeze", "input, dim=None", ".squeeze", _squeeze, *callables("squeeze"))
define("unsqueeze", "input, dim", ".unsqueeze", _unsqueeze, *callables("unsqueeze"))

# ------------------------------------------------------------------------------------------------ permutations


def _permutation(order_of: Callable[[IROp, int], Sequence[int]]) -> RuleMaker:
    """``order_of(op, ndim)``: for each dim of the result the dim of the input it was."""

    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        refs = build.tensor(op.operands[0].shape)
        return build.rule([refs], [tuple(refs[dim] for dim in order_of(op, len(refs)))], linear=linear_sets(op, ("input",)))

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
define("permute", "input, *dims", ".permute", _permutation(lambda op, n: all_dims(op.arg("dims"), n)), *callables("permute"))
define(
    "movedim",
    "input, source, destination",
    ".movedim",
    _permutation(_movedim_order),
    *callables("movedim", "moveaxis"),
)

# ------------------------------------------------------------------------------------------------ expansion


def _expand(op: IROp) -> OpRule:
    build = RuleBuilder()
    result = build.tensor(op.results[0].shape)
    return build.rule(
        [broadcast(op.operands[0].shape, result)], [result], linear=linear_sets(op, ("input",)), localise=_local_shape("size")
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
    read = {ref.factor for tensor in rule.operands for dim in tensor for ref in dim}
    return tuple(ref for ref in refs if ref.factor not in read)


def _repeat_interleave(op: IROp) -> OpRule:
    """Each element of a dim becomes a run of copies: (size, copies). Counts that differ by element leave nothing to split."""
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
    (torch.Tensor.expand_as, rewriting(lambda self, other: {"input": self, "size": tuple(other.shape)})),
)
define("broadcast_tensors", "*tensors", "torch.broadcast_tensors", _broadcast_tensors, torch.broadcast_tensors)
define("repeat", "input, *repeats", ".repeat", _repeat, *methods("repeat"), *through(rewriting(_tile), callables("tile")))
define(
    "repeat_interleave",
    "input, repeats, dim=None, *, output_size=None",
    ".repeat_interleave",
    _repeat_interleave,
    *through(
        lambda args, kwargs: (args, {key: value for key, value in kwargs.items() if key != "output_size"}),
        callables("repeat_interleave"),
    ),
)
define("meshgrid", "*tensors, indexing=None", "torch.meshgrid", _meshgrid, torch.meshgrid)

# ------------------------------------------------------------------------------------------------ joining and splitting


def _cat(op: IROp) -> OpRule:
    """The dim of the result is a concatenation; each operand has one segment of it."""
    build = RuleBuilder()
    shape = op.results[0].shape
    dim = dim_of(op, len(shape))
    joined = [value for value in op.operands if value.ndim == len(shape)]  # empty tensors of one dim may stand beside
    result = list(build.tensor(shape))
    whole = build.factor(*(value.shape[dim] for value in joined))
    result[dim] = (whole,)
    operands: list[TensorRefs] = []
    segments = iter(range(len(joined)))
    for value in op.operands:
        if value.ndim == len(shape):
            segment = FactorRef(whole.factor, next(segments) if len(joined) > 1 else None)
            operands.append((*result[:dim], (segment,), *result[dim + 1 :]))
        else:
            operands.append(build.whole(value.shape))
    return build.rule(operands, [tuple(result)], linear=linear_sets(op, ("tensors",)))


def _stack(op: IROp) -> OpRule:
    build = RuleBuilder()
    operand = build.tensor(op.operands[0].shape)
    dim = dim_of(op, len(operand) + 1)
    new = build.dim(len(op.operands), FROZEN)
    result = (*operand[:dim], new, *operand[dim:])
    return build.rule([operand] * len(op.operands), [result], linear=linear_sets(op, ("tensors",)))


def _split(localise: Localise | None, *, unequal: bool = True) -> Callable[[IROp], OpRule]:
    """Equal pieces: the dim is (pieces, piece). Others: it is a concatenation, or frozen where the call cannot say sizes."""

    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        shape = op.operands[0].shape
        dim = dim_of(op, len(shape))
        source = list(build.tensor(shape))
        sizes = [result.shape[dim] for result in op.results]
        pieces: list[DimRefs]
        if all(size == sizes[0] for size in sizes):
            piece = build.dim(sizes[0])
            source[dim] = (*build.dim(len(sizes), FROZEN), *piece)
            pieces = [piece] * len(sizes)
        elif unequal:
            whole = build.factor(*sizes)
            source[dim] = (whole,)
            pieces = [(FactorRef(whole.factor, i),) for i in range(len(sizes))]
        else:
            source[dim] = build.dim(shape[dim], FROZEN)
            pieces = [build.dim(size, FROZEN) for size in sizes]
        results = [(*source[:dim], piece, *source[dim + 1 :]) for piece in pieces]
        return build.rule([tuple(source)], results, linear=linear_sets(op, ("input",)), localise=localise)

    return rule


def _piece_sizes(op: IROp, rule: OpRule, local: LocalSizes) -> tuple[Size, ...]:
    dim = dim_of(op, len(rule.operands[0]))
    return tuple(local.dim_size(result[dim]) for result in rule.results)


def _split_sizes(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    sizes = _piece_sizes(op, rule, local)
    equal = is_static(sizes[0]) and all(size == sizes[0] for size in sizes)  # others may be empty on a rank
    return {"split_size_or_sections": sizes[0] if equal else sizes}


def _split_bounds(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    if isinstance(op.arg("indices_or_sections"), int):
        return {}
    sizes = _piece_sizes(op, rule, local)
    return {"indices_or_sections": tuple(sum(sizes[:i]) for i in range(1, len(sizes)))}


def _num_chunks(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    """As many as there are, which may be fewer than were asked for: a rank with empty pieces has as many."""
    return {"chunks": len(rule.results)}


def _tensor_split(op: IROp) -> OpRule:
    return _split(_split_bounds, unequal=not isinstance(op.arg("indices_or_sections"), int))(op)


def _unbind(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape))
    source = build.tensor(shape, frozen=(dim,))
    return build.rule([source], [source[:dim] + source[dim + 1 :]] * len(op.results), linear=linear_sets(op, ("input",)))


define("cat", "tensors, dim=0", "torch.cat", _cat, *functions("cat", "concat", "concatenate"))
define("stack", "tensors, dim=0", "torch.stack", _stack, torch.stack)
define(
    "split",
    "input, split_size_or_sections, dim=0",
    ".split",
    _split(_split_sizes),
    *callables("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"),
    renames={"tensor": "input", "split_size": "split_size_or_sections", "split_sizes": "split_size_or_sections"},
)
define("chunk", "input, chunks, dim=0", ".chunk", _split(_num_chunks, unequal=False), *callables("chunk", "unsafe_chunk"))
define(
    "tensor_split",
    "input, indices_or_sections, dim=0",
    ".tensor_split",
    _tensor_split,
    *callables("tensor_split"),
    renames={"indices": "indices_or_sections", "sections": "indices_or_sections"},
)
define("unbind", "input, dim=0", ".unbind", _unbind, *callables("unbind"))

# ------------------------------------------------------------------------------------------------ places that have meaning


def _frozen_dims(name: str, default: Arg = None) -> RuleMaker:
    """The result has the shape of the input; the dims named by an argument (``None``: all) are frozen."""

    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        shape = op.operands[0].shape
        refs = build.tensor(shape, frozen=all_dims(op.arg(name, default), len(shape)))
        return build.rule([refs], [refs], linear=linear_sets(op, ("input",)))

    return rule


def _triangle(op: IROp) -> OpRule:
    build = RuleBuilder()
    ndim = op.operands[0].ndim
    refs = build.tensor(op.operands[0].shape, frozen=(ndim - 2, ndim - 1))
    return build.rule([refs], [refs], linear=linear_sets(op, ("input",)))


def _pad(op: IROp) -> OpRule:
    """Padded dims are frozen. Reflected, repeated and zero padding are linear, other constants are not."""
    build = RuleBuilder()
    old, new = op.operands[0].shape, op.results[0].shape
    amounts = op.arg("pad")
    padded = {len(old) - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    constant = op.arg("mode", "constant") == "constant"
    # the other modes are made for [N, C, ...], and refuse tensors that are empty in any dim but N
    frozen = padded if constant else set(range(1 if len(old) == len(amounts) // 2 + 2 else 0, len(old)))
    operand = build.tensor(old, frozen)
    result = tuple(build.dim(new[dim], FROZEN) if dim in padded else refs for dim, refs in enumerate(operand))
    linear = not constant or op.arg("value") in (None, 0)
    return build.rule([operand], [result], linear=linear_sets(op, ("input",)) if linear else ())


def _diff(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.results[0].shape
    dim = dim_of(op, len(shape), default=-1)
    result = build.tensor(shape, frozen=(dim,))
    operands = [(*result[:dim], build.dim(value.shape[dim], FROZEN), *result[dim + 1 :]) for value in op.operands]
    return build.rule(operands, [result], linear=linear_sets(op, ("input", "prepend", "append")))


def _diagonal(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dims = (dim_of(op, len(shape), "dim1", 0), dim_of(op, len(shape), "dim2", 1))
    operand = build.tensor(shape, frozen=dims)
    rest = tuple(refs for dim, refs in enumerate(operand) if dim not in dims)
    return build.rule([operand], [(*rest, build.dim(op.results[0].shape[-1], FROZEN))], linear=linear_sets(op, ("input",)))


def _diag_embed(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.results[0].shape
    dims = (dim_of(op, len(shape), "dim1", -2), dim_of(op, len(shape), "dim2", -1))
    result = build.tensor(shape, frozen=dims)
    rest = tuple(refs for dim, refs in enumerate(result) if dim not in dims)
    return build.rule([(*rest, build.dim(op.operands[0].shape[-1], FROZEN))], [result], linear=linear_sets(op, ("input",)))


def _unfold(op: IROp) -> OpRule:
    """Even windows that tile the dim freeze it: a rank without any could not say so."""
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape), "dimension")
    source = build.tensor(shape, frozen=(dim,))
    windows = build.dim(op.results[0].shape[dim], FROZEN)
    window = build.dim(op.arg("size"), FROZEN)
    return build.rule([source], [(*source[:dim], windows, *source[dim + 1 :], window)], linear=linear_sets(op, ("input",)))


define("roll", "input, shifts, dims=None", "torch.roll", _frozen_dims("dims"), *callables("roll"))
define(
    "flip",
    "input, *dims",
    ".flip",
    _frozen_dims("dims"),
    *callables("flip"),
    *through(lambda args, kwargs: ((*args, 0), kwargs), callables("flipud")),
    *through(lambda args, kwargs: ((*args, 1), kwargs), callables("fliplr")),
)
define("tril", "input, diagonal=0", "torch.tril", _triangle, *callables("tril"))
define("triu", "input, diagonal=0", "torch.triu", _triangle, *callables("triu"))
define("pad", "input, pad, mode='constant', value=None", "F.pad", _pad, F.pad)
define("diff", "input, n=1, dim=-1, prepend=None, append=None", "torch.diff", _diff, *callables("diff"))
define("diagonal", "input, offset=0, dim1=0, dim2=1", ".diagonal", _diagonal, *callables("diagonal"))
define("diag_embed", "input, offset=0, dim1=-2, dim2=-1", "torch.diag_embed", _diag_embed, *callables("diag_embed"))
define("unfold", "input, dimension, size, step", ".unfold", _unfold, *methods("unfold"))

# ------------------------------------------------------------------------------------------------ halves and complex parts


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
    return build.rule([parts if to_complex else outer], [outer if to_complex else parts], linear=linear_sets(op, ("input",)))


define("glu", "input, dim=-1", "F.glu", _glu, *callables("glu"))
define("view_as_real", "input", "torch.view_as_real", _complex_parts, torch.view_as_real)
define("view_as_complex", "input", "torch.view_as_complex", _complex_parts, torch.view_as_complex)
