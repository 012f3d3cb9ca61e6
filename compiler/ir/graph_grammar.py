"""The grammar of graphs, checked between passes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import sympy
import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp, RankDevice, leaves
from shardwright.compiler.ir.printer import print_op, print_size, print_value
from shardwright.compiler.ir.size import Size, product, simplify
from shardwright.compiler.ir.time_steps import TimeSteps
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.runtime.errors import InternalError

if TYPE_CHECKING:
    from shardwright.compiler.ops.rule import FactorRef, OpRule, TensorRefs

_LITERALS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(Ellipsis),
    torch.dtype,
    torch.memory_format,
    torch.layout,
    sympy.Basic,
    RankDevice,
    TimeSteps,
)


def verify(graph: IRGraph) -> None:
    """Raise :class:`InternalError` naming the operator where ``graph`` breaks an invariant.

    Names of values and operators are unique Python identifiers; each value is made once, before it
    is read; nothing is read that the graph does not hold; arguments are values and literals; a rule
    fits the shapes of its operator; buffer updates change buffers, and fit them.
    """
    # The values that are defined so far, in the order of the graph: what is read must stand here.
    known: dict[str, IRValue] = {}
    for value in graph.sources:
        _define(known, value, graph, None)
    for kind, values in (
        (ValueKind.INPUT, graph.inputs),
        (ValueKind.PARAMETER, graph.parameters),
        (ValueKind.BUFFER, graph.buffers),
    ):
        for value in values:
            _require(
                value.kind is kind,
                graph,
                None,
                f"%{value.name} stands among values of kind {kind.value}",
            )
    for value, tensor in graph.constants:
        fits = tuple(tensor.shape) == value.shape and tensor.dtype == value.dtype
        _require(
            fits,
            graph,
            None,
            f"the tensor of constant %{value.name} does not fit {print_value(value)}",
        )
    op_names: set[str] = set()
    # Layers share their rules. One that fits some shapes fits them in every layer.
    fitting: set[Hashable] = set()
    # Each operator may read what stands above it, and defines its results for those below.
    for op in graph.ops:
        if op.name in op_names:
            _require(False, graph, op, f"two operators are named {op.name}")
        op_names.add(op.name)
        _verify_args(graph, op, known)
        if op.rule is not None:
            shapes = tuple([value.shape for value in (*op.operands, *op.results)])
            use = id(op.rule), len(op.operands), shapes
            if use not in fitting:
                _verify_rule(graph, op, op.rule)
                fitting.add(use)
        for value in op.results:
            if value.kind is not ValueKind.ACTIVATION:
                text = f"the result %{value.name} is of kind {value.kind.value}"
                _require(False, graph, op, text)
            _define(known, value, graph, op)
    for value in graph.outputs:
        _read(known, value, graph, None)
    for before, after in graph.buffer_updates:
        _require(
            before.kind is ValueKind.BUFFER,
            graph,
            None,
            f"%{before.name} is updated but is no buffer",
        )
        _read(known, before, graph, None)
        _read(known, after, graph, None)
        _require(
            before.shape == after.shape,
            graph,
            None,
            f"the update of %{before.name} has another shape: {print_value(after)}",
        )
    _verify_dynamic_dims(graph)
    if graph.eval_graph is not None:
        verify(graph.eval_graph)


def _define(known: dict[str, IRValue], value: IRValue, graph: IRGraph, op: IROp | None) -> None:
    if not value.name.isidentifier():
        _require(False, graph, op, f"{value.name!r} is not an identifier")
    if value.name in known:
        _require(False, graph, op, f"%{value.name} is defined twice")
    known[value.name] = value


def _read(known: dict[str, IRValue], value: IRValue, graph: IRGraph, op: IROp | None) -> None:
    found = known.get(value.name)
    if found is value:
        return
    _require(found is not None, graph, op, f"%{value.name} is read before it is made")
    assert found is not None
    same = found.shape == value.shape and found.dtype == value.dtype and found.kind is value.kind
    if not same:  # values are printed for the error alone: printing all takes longer than checking
        text = f"%{value.name} was made as {print_value(found)} and is read as {print_value(value)}"
        _require(False, graph, op, text)


def _verify_args(graph: IRGraph, op: IROp, known: dict[str, IRValue]) -> None:
    if len({name for name, _ in op.args}) != len(op.args):
        _require(False, graph, op, "an argument is bound twice")
    for _, arg in op.args:
        if type(arg) is IRValue:
            _read(known, arg, graph, op)
            continue
        for leaf in leaves(arg):
            if isinstance(leaf, IRValue):
                _read(known, leaf, graph, op)
            elif not (isinstance(leaf, _LITERALS) or callable(leaf)):
                _require(False, graph, op, f"an argument is a {type(leaf).__name__}")


def _verify_rule(graph: IRGraph, op: IROp, rule: OpRule) -> None:
    for what, values, all_refs in (
        ("operand", op.operands, rule.operands),
        ("result", op.results, rule.results),
    ):
        _require(
            len(values) == len(all_refs),
            graph,
            op,
            f"the rule {rule.annotation!r} has {len(all_refs)} {what}s, the operator {len(values)}",
        )
        for value, refs in zip(values, all_refs, strict=True):
            _verify_refs(graph, op, rule, value, refs)


def _verify_refs(graph: IRGraph, op: IROp, rule: OpRule, value: IRValue, refs: TensorRefs) -> None:
    _require(
        len(refs) == value.ndim,
        graph,
        op,
        f"the rule {rule.annotation!r} gives %{value.name} {len(refs)} dims, it has {value.ndim}",
    )
    for dim, (size, dim_refs) in enumerate(zip(value.shape, refs, strict=True)):
        expected = product(_ref_size(rule, ref) for ref in dim_refs)
        if not _equal(size, expected):
            shown = f"dim {dim} of {print_value(value)} the size {print_size(expected)}"
            _require(False, graph, op, f"the rule {rule.annotation!r} gives {shown}")


def _ref_size(rule: OpRule, ref: FactorRef) -> Size:
    factor = rule.factor(ref.factor)
    if ref.element is not None:
        return 1
    return factor.size if ref.segment is None else factor.segments[ref.segment]


def _equal(a: Size, b: Size) -> bool:
    return (
        a == b
        or (isinstance(a, sympy.Basic) or isinstance(b, sympy.Basic))
        and simplify(sympy.simplify(a - b)) == 0
    )


def _verify_dynamic_dims(graph: IRGraph) -> None:
    shapes = {value.name: value.shape for value in graph.inputs}
    for dynamic in graph.dynamic_dims:
        shape = shapes.get(dynamic.input, ())
        fits = dynamic.dim < len(shape) and str(shape[dynamic.dim]) == dynamic.symbol
        _require(fits, graph, None, f"dim {dynamic.dim} of {dynamic.input} is not {dynamic.symbol}")


def _require(holds: bool, graph: IRGraph, op: IROp | None, message: str) -> None:
    if holds:
        return
    raise InternalError(
        f"the graph {graph.name} is broken: {message}",
        where=print_op(op) if op is not None else None,
        hint="this is a defect of shardwright: please report it together with the model",
    )
