"""Take the gradients out of a graph that is compiled for inference only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.value import IRValue


def without_gradients(graph: IRGraph) -> IRGraph:
    """The graph for inference: nothing requires a gradient, so R and G are one and no backward is
    planned.
    """

    def frozen(value: Any) -> Any:
        return (
            replace(value, requires_grad=False, takes_gradient=False)
            if isinstance(value, IRValue)
            else value
        )

    def tree(node: Tree) -> Tree:
        return replace(
            node,
            value=frozen(node.value),
            children=tuple((key, tree(child)) for key, child in node.children),
        )

    return replace(
        graph,
        inputs=tuple(map(frozen, graph.inputs)),
        parameters=tuple(map(frozen, graph.parameters)),
        ops=tuple(
            replace(op.map_args(frozen), results=tuple(map(frozen, op.results))) for op in graph.ops
        ),
        output=tree(graph.output),
        signature=tuple((name, tree(node)) for name, node in graph.signature),
        # All of it is immutable, so every value that occurs anywhere is replaced.
        eval_graph=graph.eval_graph and without_gradients(graph.eval_graph),
    )
