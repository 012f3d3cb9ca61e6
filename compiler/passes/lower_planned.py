"""Lower a graph with its plan, as one program or as one for every pipeline stage."""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.runtime.errors import PlanError


def lower_planned(graph: PlannableGraph) -> Program | PipelineProgram:
    """The program of the ranks.

    Raises :class:`PlanError` for strategies that operators do not have, and for a pipeline of a
    model that returns no loss.
    """
    plan = graph.decided
    alone = replace(graph, plan=None)  # a program holds its plan once
    if not plan.stages:
        return lower(alone, plan)
    check_end2end(alone)
    return lower_stages(alone, plan)


def check_end2end(graph: IRGraph) -> None:
    """The first result of a pipelined module is its loss, a scalar."""
    first = next((value for _, value in graph.output.leaves() if isinstance(value, IRValue)), None)
    if first is None or first.shape != ():
        raise PlanError(
            "the first result of the model is not a scalar loss",
            why=f"its shape is {tuple(first.shape)}"
            if first is not None
            else "it returns no tensor",
            hint="end2end modules return the loss first, as transformers models do when they are "
            "given labels",
        )
