"""Give every operator its rule; make slices that tile a dim segments of it."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from itertools import pairwise

import sympy
import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp, WhenTraining, leaves
from shardwright.compiler.ir.size import Size
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.rule import Factor, FactorKind, FactorRef, OpRule
from shardwright.compiler.ops.shapes import segmented_slice_rule, slice_of
from shardwright.compiler.passes.chosen_rows import follow_chosen_rows


def attach_rules(graph: IRGraph) -> IRGraph:
    """Set ``rule`` on every operator of a graph. An operator without one is replicated, with a
    warning.
    """
    unknown: dict[str, IROp] = {}
    # Calls of one form share one rule, so that later passes work out once what follows from it.
    known: dict[Hashable, OpRule] = {}
    ops = []
    for op in graph.ops:
        opdef = registry.get(op.target)
        if opdef is None:
            unknown.setdefault(op.target, op)
            ops.append(op.changed(rule=opaque_rule(op)))
            continue
        form = form_of(op)
        rule = known.get(form) or instantiate(opdef, op)
        # A term ``?`` makes factors that are named after this call's own values.
        if not any(factor.name.startswith("?") for factor in rule.factors):
            known[form] = rule
        ops.append(op.changed(rule=rule))
    # Once for each target, however often it is called.
    for op in unknown.values():
        warn_of_unknown(op)
    return follow_chosen_rows(segment_slices(graph.with_ops(tuple(ops))))


_PLAIN = (str, int, float, complex, torch.dtype, sympy.Basic, type(None), type(Ellipsis))


def form_of(op: IROp) -> Hashable:
    """The call without what tells it from the same call in another layer: its name, its place, and
    the names of its values. Equal forms have equal rules.
    """
    numbers: dict[str, int] = {}

    def value_form(value: IRValue) -> Hashable:
        # ``x * x`` has another form than ``x * y``.
        number = numbers.setdefault(value.name, len(numbers))
        return (
            *(number, value.shape, value.dtype, value.kind),
            *(value.requires_grad, value.takes_gradient),
        )

    def form(arg: Arg) -> Hashable:
        if isinstance(arg, IRValue):
            return value_form(arg)
        if isinstance(arg, tuple | list):
            return tuple(map(form, arg))
        if isinstance(arg, slice):
            return slice, form(arg.start), form(arg.stop), form(arg.step)
        if isinstance(arg, WhenTraining):
            return WhenTraining, form(arg.train), form(arg.eval)
        # With the type, as 1 == 1.0 == True. Whatever else there may be is equal to itself alone.
        return type(arg), arg if isinstance(arg, _PLAIN) else id(arg)

    return (
        op.target,
        tuple((name, form(arg)) for name, arg in op.args),
        tuple(map(value_form, op.results)),
        *(op.autocast, op.grad_enabled, op.only_in, op.updates_buffers, op.summed),
    )


def opaque_rule(op: IROp) -> OpRule:
    """The rule of an unknown operator: nothing may be split. Its backward may not be linear in the
    gradient, so this must be whole: every operand is R, never G.
    """
    factors: list[Factor] = []

    def refs(value_shape: tuple[Size, ...]) -> tuple[tuple[FactorRef, ...], ...]:
        dims = []
        for size in value_shape:
            # A factor of its own for each dim: nothing is known of which belong together.
            factors.append(Factor(f"f{len(factors)}", (size,), FactorKind.FROZEN))
            dims.append((FactorRef(factors[-1].name),))
        return tuple(dims)

    operands = tuple(refs(value.shape) for value in op.operands)
    results = tuple(refs(value.shape) for value in op.results)
    return OpRule("", tuple(factors), operands, results, grad_linear=False, known=False)


def warn_of_unknown(op: IROp) -> None:
    """Warn where the user's code calls an operator without a rule."""
    file, line = (op.source.file, op.source.line) if op.source is not None else (__file__, 1)
    warnings.warn_explicit(unknown_op_message(op), UserWarning, file, line)


def unknown_op_message(op: IROp) -> str:
    """The warning for an operator without a rule: where it is, what happens, and the stub to
    paste.
    """
    # A letter for every dim: ``a`` to ``z``, then ``a1`` to ``z1``, and so on.
    letters = (
        letter + number
        for number in ("", *map(str, range(1, 100)))
        for letter in "abcdefghijklmnopqrstuvwxyz"
    )

    def term(value: IRValue) -> str:
        return " ".join(f"{next(letters)}^" for _ in value.shape)

    # "?": a scalar, or an argument that is no tensor.
    terms = [
        ", ".join(term(leaf) or "?" if isinstance(leaf, IRValue) else "?" for leaf in leaves(arg))
        or "?"
        for _, arg in op.args
    ]
    # Arguments at the end that are no tensors need no term.
    while terms and terms[-1] == "?":
        terms.pop()
    results = ", ".join(term(value) for value in op.results)
    function = op.target.removesuffix(".apply")
    package = function.split(".")[0]
    return (
        f"no rule for operator {op.target}: it runs replicated on every rank\n"
        f"  where: {op.place}\n"
        f"  why:   operand shapes {[tuple(v.shape) for v in op.operands]}, "
        f"result shapes {[tuple(v.shape) for v in op.results]}\n"
        "  try:   say which dims may be split: drop the ^ there, and write one letter for "
        "equal dims\n"
        f"         import {package}, shardwright\n"
        f'         shardwright.register_op("{", ".join(terms)} -> {results}")({function})'
    )


def segment_slices(graph: IRGraph) -> IRGraph:
    """Where the slices taken of a value tile one of its dims, that dim becomes a concatenation that
    can be split.

    Rotary embeddings halve the head dim so; Phi-3 cuts its fused query, key and value heads so.
    """
    # By value and dim, the slices that are taken of it: ``(operator, start, stop)``.
    slices: dict[tuple[str, int], list[tuple[IROp, int, int]]] = {}
    for op in graph.ops:
        found = slice_of(op)
        if found is not None:
            dim, start, stop = found
            slices.setdefault((op.operands[0].name, dim), []).append((op, start, stop))
    rules: dict[str, OpRule] = {}
    # Calls that share a rule have one form, so they share the new one, too.
    known: dict[Hashable, OpRule] = {}
    for (_, dim), taken in slices.items():
        size = taken[0][0].operands[0].shape[dim]
        bounds = sorted({(start, stop) for _, start, stop in taken})
        # The slices begin at 0, end at the size, and each starts where the one before it stops.
        tiles = (
            bounds[0][0] == 0
            and bounds[-1][1] == size
            and all(a[1] == b[0] for a, b in pairwise(bounds))
        )
        if tiles and len(bounds) > 1:
            segments = tuple(stop - start for start, stop in bounds)
            for op, start, stop in taken:
                # Every slice of the value gets the same segments, so that their factors can be one
                # dim.
                index = bounds.index((start, stop))
                key = id(op.rule), segments, index
                if key not in known:
                    known[key] = segmented_slice_rule(op, segments, index)
                rules[op.name] = known[key]
    return graph.with_ops(
        tuple(op.changed(rule=rules[op.name]) if op.name in rules else op for op in graph.ops)
    )
