"""``dp``: the whole model on every rank; units are its copies."""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.memory_options import MemoryOptions, saving_memory
from shardwright.policies.policy import Policy, read_options
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


def apply(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """One rank computes everything; gradients are reduced over units."""
    options = read_options(MemoryOptions, config.pas_config, policy="dp")
    if config.plan_ngpus != 1:
        raise PlanError(
            "policy 'dp' copies the model over units, so a plan has one rank",
            why=f"plan_ngpus={config.plan_ngpus}",
            hint=f"plan_ngpus=1 with runtime_ngpus={config.runtime_ngpus}, or policy 'data' to "
            "split the batch inside a unit",
        )
    plan = graph.builder(mesh={}).plan("dp")
    return replace(graph, plan=saving_memory(graph, plan, options, config, "dp"))


POLICY = Policy("dp", apply, MemoryOptions, built_in=True)
