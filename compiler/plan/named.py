"""The dims of the model that a plan splits, by name."""

from __future__ import annotations

from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ops.strategy import exchange, split_factor
from shardwright.compiler.plan.plan import Plan


def split_dim_names(graph: IRGraph, plan: Plan) -> dict[str, dict[str, str]]:
    """The name of the dim that each operator splits along each axis, in the training body or only
    in the other.
    """
    found: dict[str, dict[str, str]] = {}
    bodies = [body.dims for body in graph.bodies if body.dims is not None]
    for op, assignment in plan.strategies.items():
        for axis, strategy in assignment.items():
            # An exchange cuts one dim before and another one behind: ``batch -> experts``.
            sides = (0, 1) if exchange(strategy) else (1,)
            named = [_dim_name(bodies, op, split_factor(strategy, side)) for side in sides]
            if all(named):
                found.setdefault(op, {})[axis] = " -> ".join(name for name in named if name)
    return found


def _dim_name(bodies: list[ModelDims], op: str, factor: str | None) -> str | None:
    found = (dims.of_factor(op, factor or "") for dims in bodies)
    return next((dim.name for dim in found if dim is not None), None)
