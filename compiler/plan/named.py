"""The dims of the model that a plan splits, by name."""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ops.strategy import split_factor
from shardwright.compiler.plan.plan import Plan


def split_dim_names(graph: IRGraph, plan: Plan) -> dict[str, dict[str, str]]:
    """The name of the dim that each operator splits along each axis, in the training body or only
    in the other.
    """
    found: dict[str, dict[str, str]] = {}
    bodies = [body.dims for body in graph.bodies if body.dims is not None]
    for op, assignment in plan.strategies.items():
        for axis, strategy in assignment.items():
            named = [
                dim.name
                for dims in bodies
                if (dim := dims.of_factor(op, split_factor(strategy) or "")) is not None
            ]
            if named:
                found.setdefault(op, {})[axis] = named[0]
    return found
