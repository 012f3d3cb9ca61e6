"""``ep``: expert parallelism. Splits the batch over all ranks of the plan, and experts over some or
all of them; tokens are exchanged on their way to the experts and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.expert_axes import expert_axes
from shardwright.policies.memory_options import MemoryOptions, saving_memory
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.splits import split_on_expert_axes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(MemoryOptions):
    """Options of ``ep`` in ``pas_config``. ``ep``: ranks that share the experts (default: all), or
    nodes, and ranks within each: a token then crosses to a node once. ``etp``: ranks that share the
    inner dims of an expert. Others: :class:`MemoryOptions`.
    """

    ep: int | tuple[int, ...] | None = None
    etp: int = 1


def apply(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The plan for ``config.plan_ngpus`` ranks."""
    options = read_options(ExpertOptions, config.pas_config, policy="ep")
    etp = options.etp
    if options.ep is None and (etp < 1 or config.plan_ngpus % etp):
        raise PlanError(
            f"policy 'ep' cannot place etp={etp} on {config.plan_ngpus} ranks",
            hint="etp divides the number of ranks",
        )
    ep = config.plan_ngpus // etp if options.ep is None else options.ep
    axes = expert_axes(config.plan_ngpus, 1, ep, options.etp, "ep")
    # One rank still has a mesh with the axis that users name.
    mesh = {axis.name: axis.size for axis in axes} or {"ep": 1}
    builder = graph.builder(mesh=mesh, order=config.rank_order)
    split_on_expert_axes(builder, axes, "ep")
    return replace(graph, plan=saving_memory(graph, builder.plan("ep"), options, config, "ep"))


POLICY = Policy("ep", apply, ExpertOptions, built_in=True)
