"""Operators that join tensors and cut them: concatenation, stacking, splitting. Linear, like all
that moves elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, is_static
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.ops.aliases import callables, functions
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import (
    DimRefs,
    FactorRef,
    Localise,
    LocalSizes,
    OpRule,
    ParallelFactor,
    ParallelForm,
    TensorRefs,
)
from shardwright.compiler.ops.rule_builder import (
    FROZEN,
    RuleBuilder,
    dim_of,
    linear_sets,
    whole_rule,
)
from shardwright.compiler.ops.terms import define_form

_STACKED = define_form("stacked", "tensors, dim=0, *, shape")


def _cat(op: IROp) -> OpRule:
    """The dim of the result is a concatenation; each operand has one segment of it."""
    build = RuleBuilder()
    shape = op.results[0].shape
    dim = dim_of(op, len(shape))
    # Empty tensors of one dim may stand beside.
    joined = [value for value in op.operands if value.ndim == len(shape)]
    result = list(build.tensor(shape))
    # ``cat`` of [8, 3] and [8, 5] along dim 1 has the dim 3|5, and each operand one segment of it.
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
    if dim == 0 and operand and _are_different_weights(op):
        return _stacked_weights(op, build, operand)
    new = build.dim(len(op.operands), FROZEN)
    result = (*operand[:dim], new, *operand[dim:])
    return build.rule([operand] * len(op.operands), [result], linear=linear_sets(op, ("tensors",)))


def _are_different_weights(op: IROp) -> bool:
    kinds = {value.kind for value in op.operands}
    return kinds == {ValueKind.PARAMETER} and len({value.name for value in op.operands}) > 1


def _stacked_weights(op: IROp, build: RuleBuilder, operand: TensorRefs) -> OpRule:
    """Weights of one form, such as those of experts that are modules of their own: each is an
    element of the new dim. Where it is cut, a rank has some of them, and needs no others.
    """

    def local_args(op: IROp, local: LocalSizes) -> Mapping[str, Arg]:
        assert op.rule is not None
        return {"shape": local.shape(op.rule.results[0])}

    new = build.factor(len(op.operands))
    operands: list[TensorRefs] = [
        # Expert ``index`` is one element of the new dim, in front of its own first dim.
        ((replace(new, element=index), *operand[0]), *operand[1:])
        for index in range(len(op.operands))
    ]
    form = ParallelForm(_STACKED, {new.factor: ParallelFactor(anywhere=True)}, {}, local_args)
    rule = build.rule(operands, [((new,), *operand)], linear=linear_sets(op, ("tensors",)))
    return replace(rule, parallel=form)


def _split(localise: Localise | None, *, unequal: bool = True) -> Callable[[IROp], OpRule]:
    """Equal pieces: the dim is (pieces, piece). Others: it is a concatenation, or frozen where the
    call cannot say sizes.
    """

    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        shape = op.operands[0].shape
        dim = dim_of(op, len(shape))
        source = list(build.tensor(shape))
        sizes = [result.shape[dim] for result in op.results]
        pieces: list[DimRefs]
        # Of equal pieces each has the inner factor, of which the dim holds several.
        if all(size == sizes[0] for size in sizes):
            piece = build.dim(sizes[0])
            source[dim] = (*build.dim(len(sizes), FROZEN), *piece)
            pieces = [piece] * len(sizes)
        # Otherwise the pieces are the segments of a concatenation.
        elif unequal:
            whole = build.factor(*sizes)
            source[dim] = (whole,)
            pieces = [(FactorRef(whole.factor, i),) for i in range(len(sizes))]
        else:
            source[dim] = build.dim(shape[dim], FROZEN)
            pieces = [build.dim(size, FROZEN) for size in sizes]
        results = [(*source[:dim], piece, *source[dim + 1 :]) for piece in pieces]
        return build.rule(
            [tuple(source)], results, linear=linear_sets(op, ("input",)), localise=localise
        )

    return rule


def _piece_sizes(op: IROp, rule: OpRule, local: LocalSizes) -> tuple[Size, ...]:
    dim = dim_of(op, len(rule.operands[0]))
    return tuple(local.dim_size(result[dim]) for result in rule.results)


def _split_sizes(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    sizes = _piece_sizes(op, rule, local)
    # Others may be empty on a rank.
    equal = is_static(sizes[0]) and all(size == sizes[0] for size in sizes)
    return {"split_size_or_sections": sizes[0] if equal else sizes}


def _split_bounds(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    if isinstance(op.arg("indices_or_sections"), int):
        return {}
    sizes = _piece_sizes(op, rule, local)
    return {"indices_or_sections": tuple(sum(sizes[:i]) for i in range(1, len(sizes)))}


def _num_chunks(op: IROp, rule: OpRule, local: LocalSizes) -> Mapping[str, Arg]:
    """The argument ``chunks``: the number of pieces that there are, which may be fewer than were
    asked for. A rank whose pieces are empty makes as many.
    """
    return {"chunks": len(rule.results)}


def _tensor_split(op: IROp) -> OpRule:
    if len(op.operands) > 1:  # indices in a tensor: where the pieces begin is known when it runs
        return whole_rule(op, ("input",))
    return _split(_split_bounds, unequal=not isinstance(op.arg("indices_or_sections"), int))(op)


def _unbind(op: IROp) -> OpRule:
    build = RuleBuilder()
    shape = op.operands[0].shape
    dim = dim_of(op, len(shape))
    source = build.tensor(shape, frozen=(dim,))
    return build.rule(
        [source],
        [source[:dim] + source[dim + 1 :]] * len(op.results),
        linear=linear_sets(op, ("input",)),
    )


define("cat", "tensors, dim=0", "torch.cat", _cat, *functions("cat", "concat", "concatenate"))
define("stack", "tensors, dim=0", "torch.stack", _stack, torch.stack)
define(
    "split",
    "input, split_size_or_sections, dim=0",
    ".split",
    _split(_split_sizes),
    *callables("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"),
    renames={
        "tensor": "input",
        "split_size": "split_size_or_sections",
        "split_sizes": "split_size_or_sections",
    },
)
define(
    "chunk",
    "input, chunks, dim=0",
    ".chunk",
    _split(_num_chunks, unequal=False),
    *callables("chunk", "unsafe_chunk"),
)
define(
    "tensor_split",
    "input, indices_or_sections, dim=0",
    ".tensor_split",
    _tensor_split,
    *callables("tensor_split"),
    renames={"indices": "indices_or_sections", "sections": "indices_or_sections"},
)
define("unbind", "input, dim=0", ".unbind", _unbind, *callables("unbind"))
