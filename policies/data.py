"""``data``: splits the batch inside the unit.

Unlike units, whose losses are their own, the ranks share one loss: means, batch statistics and gradients are those of the
whole batch, exactly.
"""

from __future__ import annotations

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.policy import NoOptions, Policy
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


def apply(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The plan for ``config.plan_ngpus`` ranks on one axis, ``dp``."""
    builder = graph.builder(mesh={"dp": config.plan_ngpus})
    if config.plan_ngpus > 1:
        split_dims(builder, "dp", batch_classes(graph))
    return builder.build("data")


def batch_classes(graph: IRGraph) -> set[int]:
    """The dim classes of the batch: dim 0 of the first input, and of every input of that many rows."""
    assert graph.dims is not None
    with_rows = [value for value in graph.inputs if value.ndim]
    classes = {
        graph.dims.values[value.name][0][0]
        for value in with_rows
        if value.shape[0] == with_rows[0].shape[0] and graph.dims.values[value.name][0]
    }
    if not classes:
        raise PlanError(
            "policy 'data' finds no batch to split",
            why=f"the inputs have shapes {[tuple(value.shape) for value in graph.inputs]}",
            hint="trace with a batch of at least 2: of one row nothing can be told from the shapes",
        )
    return classes


POLICY = Policy("data", apply, NoOptions, built_in=True)
