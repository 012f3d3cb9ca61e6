"""``data``: splits the batch inside the unit.

Unlike units, whose losses are their own, the ranks share one loss: means, batch statistics and
gradients are those of the whole batch, exactly.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.batches import batch_classes
from shardwright.policies.memory_options import MemoryOptions, saving_memory
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig


def apply(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The plan for ``config.plan_ngpus`` ranks on one axis, ``dp``."""
    options = read_options(MemoryOptions, config.pas_config, policy="data")
    builder = graph.builder(mesh={"dp": config.plan_ngpus})
    if config.plan_ngpus > 1:
        split_dims(builder, "dp", batch_classes(graph))
    return replace(graph, plan=saving_memory(graph, builder.plan("data"), options, config, "data"))


POLICY = Policy("data", apply, MemoryOptions, built_in=True)
