"""``tp``: tensor parallelism. Splits the inner dims of the model over all ranks of the plan.

Which dims: :mod:`shardwright.policies.choice`. What the other operators do:
:mod:`shardwright.policies.labels`. On a standard transformer block the result is Megatron's plan
(Shoeybi et al. 2019, section 3): column- then row-parallel products, heads split in attention,
vocabulary-parallel embedding and loss, two all-reduces of [B, S, H] forward and two backward per
layer. A layer of experts sends as much, however many of them a token meets; one whose branches are
parallel, as GPT-J's, half of it.

Where there are fewer groups of heads than ranks, as in models whose heads share keys and values,
there may be two axes: 4 groups on 8 ranks are split over ``tp=4``, all else over ``tp=4`` and
``tp2=2``. There are as many all-reduces of [B, S, H] as with one: each goes over both axes at once.
"""

from __future__ import annotations

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.policy import NoOptions, Policy
from shardwright.policies.splits import inner_axes, split_dims
from shardwright.runtime.config import ComputeConfig


def apply(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The plan for ``config.plan_ngpus`` ranks on one axis, ``tp``, or on two."""
    axes = inner_axes(graph, config.plan_ngpus, config.rank_order)
    builder = graph.builder(mesh={name: axis.axis_size for name, axis in axes.items()} or {"tp": 1})
    for name, axis in axes.items():
        split_dims(builder, name, axis.classes)
    return builder.build("tp")


POLICY = Policy("tp", apply, NoOptions, built_in=True)
