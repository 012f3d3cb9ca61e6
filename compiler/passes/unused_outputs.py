"""Leave out of a graph what nobody needs: outputs that are not wanted, and what only they
needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.outputs import output_wishes, training_wishes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.structure import join


def needed(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """``graph`` with only what is computed under ``config``: without the outputs that it drops or
    leaves out of training steps; its body for evaluation without those that it drops.

    Raises :class:`PlanError` if the config names an output that the model does not return.
    """
    trained, evaluated = training_wishes(graph, config), output_wishes(graph, config)
    body = graph.eval_graph
    return replace(
        drop_outputs(graph, trained),
        eval_graph=None if body is None else drop_outputs(body, evaluated),
    )


def in_training(graph: IRGraph, wishes: Mapping[str, object]) -> set[str]:
    """The names of the operators that a training step needs. Operators that serve only outputs
    which it leaves out are not among them. Regions that are recomputed stay whole.
    """
    outputs = (
        value for path, value in graph.output.leaves() if wishes.get(path, "whole") != "eval"
    )
    needed = {value.name for value in outputs if isinstance(value, IRValue)}
    needed |= {after.name for _, after in graph.buffer_updates}
    found = set()
    # From the results back: an operator is needed if something behind it is.
    for op in reversed(graph.ops):
        read = any(result.name in needed for result in op.results)
        if read or op.updates_buffers or op.region is not None:
            needed.update(value.name for value in op.operands)
            found.add(op.name)
    return found


def drop_outputs(graph: IRGraph, outputs: Mapping[str, object]) -> IRGraph:
    """``graph`` without the outputs whose wish is ``None``, and without what only they needed."""
    if not any(wish is None for wish in outputs.values()):
        return graph.live()

    def prune(tree: Tree, path: str) -> Tree:
        if tree.kind == "leaf":
            return Tree("leaf", None) if path in outputs and outputs[path] is None else tree
        return replace(
            tree, children=tuple((k, prune(child, join(path, k))) for k, child in tree.children)
        )

    return replace(graph, output=prune(graph.output, "")).live()
