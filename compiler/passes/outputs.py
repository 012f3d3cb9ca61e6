"""Leave out of a graph what nobody needs: outputs that are not wanted, and what only they needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.structure import join


def needed(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """``graph``, and its body for evaluation, without the outputs that ``config`` drops: what is left is computed.

    Raises :class:`PlanError` if the config names an output that the model does not return.
    """
    wishes = output_wishes(graph, config)
    body = graph.eval_graph
    return replace(drop_outputs(graph, wishes), eval_graph=None if body is None else drop_outputs(body, wishes))


def drop_outputs(graph: IRGraph, outputs: Mapping[str, object]) -> IRGraph:
    """``graph`` without the outputs whose wish is ``None``, and without what only they needed."""
    if not any(wish is None for wish in outputs.values()):
        return graph.live()

    def prune(tree: Tree, path: str) -> Tree:
        if tree.kind == "leaf":
            return Tree("leaf", None) if path in outputs and outputs[path] is None else tree
        return replace(tree, children=tuple((k, prune(child, join(path, k))) for k, child in tree.children))

    return replace(graph, output=prune(graph.output, "")).live()
