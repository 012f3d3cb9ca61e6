"""``pp``: pipeline parallelism, one position of the pipeline for every rank of the plan."""

from __future__ import annotations

from pathlib import Path

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.memory_options import saving_memory
from shardwright.policies.pipeline_mesh import (
    PipelineOptions,
    add_stages,
    check_end2end,
    hardware_files,
)
from shardwright.policies.policy import Policy, read_options
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """Stages balanced by estimated time on ``plan_ngpus`` ranks."""
    check_end2end("policy 'pp'", config)
    options = read_options(PipelineOptions, config.pas_config, policy="pp")
    if options.num_stages not in (None, config.plan_ngpus):
        raise PlanError(
            "policy 'pp' puts one position of the pipeline on each rank, but "
            f"num_stages={options.num_stages}",
            why=f"plan_ngpus={config.plan_ngpus}",
            hint="leave num_stages out, or use policy 'hybrid' to put several ranks on a stage",
        )
    plan = graph.builder(mesh={"pp": config.plan_ngpus}).plan("pp")
    plan = add_stages(graph, config, plan, options, config.plan_ngpus)
    return saving_memory(graph, plan, options, config, "pp")


def files(config: ComputeConfig) -> list[Path]:
    """The files that describe the machine, if it is none of the presets."""
    return hardware_files(read_options(PipelineOptions, config.pas_config, policy="pp").hardware)


POLICY = Policy("pp", apply, PipelineOptions, built_in=True, files=files)
