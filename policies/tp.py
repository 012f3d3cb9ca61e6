"""``tp``: tensor parallelism. Splits the inner dims of the model over all ranks of the plan.

Which dims: :mod:`shardwright.policies.choice`. What the other operators do: :mod:`shardwright.policies.labels`. On a standard
transformer block the result is Megatron's plan (Shoeybi et al. 2019, section 3): column- then row-parallel products, heads
split in attention, vocabulary-parallel embedding and loss, two all-reduces of [B, S, H] forward and two backward per layer. A
layer of experts sends as much, however many of them a token meets; one whose branches are parallel, as GPT-J's, half of it.
"""

from __future__ import annotations

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.choice import choose_dims
from shardwright.policies.policy import NoOptions, Policy
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig


def apply(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The plan for ``config.plan_ngpus`` ranks on one axis, ``tp``."""
    builder = graph.builder(mesh={"tp": config.plan_ngpus})
    if config.plan_ngpus > 1:
        split_dims(builder, "tp", choose_dims(graph, config.plan_ngpus))
    return builder.build("tp")


POLICY = Policy("tp", apply, NoOptions, built_in=True)
