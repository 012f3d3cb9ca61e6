"""Give the operators of the evaluation body to the stages of the training body.

The two bodies have most of their operators in common, module by module. An operator of evaluation
goes where training runs the operators of its module, so that it finds its weights there; but never
before what it reads has been made.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import ValueKind


def stage_of_eval_ops(graph: IRGraph, stages: Mapping[str, int], body: IRGraph) -> dict[str, int]:
    """The stage of each operator of ``body``, by its name. ``stages``: those of the operators of
    ``graph``.

    An operator goes to the stage that holds its weights. One without weights goes to the stage of
    the same operator in training, or of any operator of its module.
    """
    # What the stages of training hold: operators by module, and each value at its first reader.
    of_module: dict[str, list[IROp]] = {}
    holder: dict[str, int] = {}
    for op in graph.ops:
        of_module.setdefault(op.module_path, []).append(op)
        for value in op.operands:
            holder.setdefault(value.name, stages[op.name])
    # The stage in which each value of ``body`` is made.
    made_in: dict[str, int] = {}
    result = {}
    for op in body.ops:
        weights = [
            holder[v.name]
            for v in op.operands
            if v.kind is ValueKind.PARAMETER and v.name in holder
        ]
        # In this order: the stage of its weights, of the same operator, of anything in its module.
        like = of_module.get(op.module_path, [])
        wished = (
            weights
            or [stages[twin.name] for twin in like if _is_twin(op, twin)]
            or [stages[twin.name] for twin in like]
        )
        # Values go forward only, so an operator cannot stand before what it reads.
        earliest = max((made_in[v.name] for v in op.operands if v.name in made_in), default=0)
        result[op.name] = max([earliest, *wished[:1]])
        made_in |= {value.name: result[op.name] for value in op.results}
    return result


def _is_twin(op: IROp, other: IROp) -> bool:
    """Whether ``other`` of training has the place of ``op`` in evaluation, as far as names tell."""
    return op.target == other.target and op.name in (other.name, f"{other.name}_eval")
