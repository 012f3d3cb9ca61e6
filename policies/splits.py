"""From dims to a plan: split chosen dim classes over an axis, and give every other operator R or G."""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import has_factor
from shardwright.compiler.plan.builder import PlanBuilder
from shardwright.policies.labels import label


def split_dims(builder: PlanBuilder, axis: str, classes: set[int]) -> None:
    """Add the strategies of every operator along ``axis`` to the builder, the evaluation body included."""
    for graph in (builder.graph, builder.graph.eval_graph):
        if graph is None:
            continue
        splits = {op.name: f"split:{factor}" for op in graph.ops for factor in _factor(op, graph, classes)}
        for op in graph.ops:
            if op.name not in splits:
                _note_fallback(builder, op, graph, axis, classes)
        assignment = label(graph, splits, builder.mesh.axis_size(axis)) | splits
        for name, strategy in assignment.items():
            if strategy != "R":
                builder.strategy(name, axis, strategy)


def _factor(op: IROp, graph: IRGraph, classes: set[int]) -> list[str]:
    """The factor of the operator to split, if it has one of the classes: one that most of its tensors have."""
    assert op.rule is not None and graph.dims is not None
    found = [
        f.name for f in op.rule.factors if graph.dims.factors.get((op.name, f.name)) in classes and op.rule.splittable(f.name)
    ]
    tensors = (*op.rule.operands, *op.rule.results)
    found.sort(
        key=lambda name: (
            -sum(has_factor(refs, name) for refs in op.rule.results),
            -sum(has_factor(refs, name) for refs in tensors),
        )
    )  # type: ignore[union-attr]
    return found[:1]


def _note_fallback(builder: PlanBuilder, op: IROp, graph: IRGraph, axis: str, classes: set[int]) -> None:
    """Say where a split dim has to be gathered, and why."""
    assert op.rule is not None and graph.dims is not None
    for factor in op.rule.factors:
        index = graph.dims.factors.get((op.name, factor.name))
        if index in classes:
            name = graph.dims.classes[index].name
            if op.rule.known:
                builder.note(op, axis, f"{op.target} needs dim {name} ({factor.name}) whole; it is gathered before it")
            else:
                builder.note(op, axis, f"{op.target} has no rule; dim {name} is gathered before it")
            return
