"""``hybrid``: pipeline stages, each split by tensor parallelism and along the batch; units copy it
all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import choose_dims
from shardwright.policies.expert_axes import expert_axes
from shardwright.policies.pipelines import (
    PipelineOptions,
    add_stages,
    check_end2end,
    hardware_files,
)
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.splits import inner_axes, split_dims, split_on_expert_axes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class HybridOptions(PipelineOptions):
    """``tp``: ranks that share the inner dims of a stage. ``dp``: ranks of a stage that share a
    sample's batch. ``ep``: those of its ``dp x tp`` ranks that share the experts; ``etp``: that
    share the inner dims of an expert (default: as much of ``tp`` as there are ranks for).
    """

    tp: int | None = None
    dp: int = 1
    ep: int | None = None
    etp: int | None = None


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """``num_stages x dp x tp`` ranks; a size left out is what remains of ``plan_ngpus`` (two stages
    if both are).
    """
    check_end2end("hybrid", config)
    options = read_options(HybridOptions, config.pas_config, policy="hybrid")
    num_stages, tp = _sizes(options, config.plan_ngpus)
    # Experts lie on a grid of their own over the same ranks.
    if options.ep is not None or options.etp is not None:
        found = expert_axes(options.dp, tp, options.ep or 1, options.etp, "hybrid")
        mesh = {"pp": num_stages, **{axis.name: axis.size for axis in found}}
        builder = graph.builder(mesh=mesh, order=config.rank_order)
        split_on_expert_axes(builder, found, "hybrid", choose_dims(graph, tp) if tp > 1 else None)
        return add_stages(graph, config, builder.plan("hybrid"), options, num_stages)
    # ``tp`` may need two axes, where no dim of the model is long enough.
    inner = inner_axes(graph, tp, config.rank_order)
    sizes = {
        "pp": num_stages,
        "dp": options.dp,
        **{name: axis.axis_size for name, axis in inner.items()},
    }
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "pp"}
    builder = graph.builder(mesh=axes, order=config.rank_order)
    if options.dp > 1:
        split_dims(builder, "dp", batch_classes(graph))
    for name, axis in inner.items():
        split_dims(builder, name, axis.classes)
    return add_stages(graph, config, builder.plan("hybrid"), options, num_stages)


def _sizes(options: HybridOptions, plan_ngpus: int) -> tuple[int, int]:
    num_stages, tp = options.num_stages, options.tp
    for name, size in (("num_stages", num_stages), ("dp", options.dp), ("tp", tp)):
        if size is not None and size < 1:
            raise PlanError(
                f"policy 'hybrid' cannot place {name}={size} on ranks", hint="pass 1 or more"
            )
    # What is left out is what remains.
    if num_stages is None and tp is None:
        num_stages = 2 if plan_ngpus % (2 * options.dp) == 0 else 1
    if num_stages is None:
        assert tp is not None
        num_stages = plan_ngpus // (options.dp * tp)
    if tp is None:
        tp = plan_ngpus // (options.dp * num_stages)
    if num_stages * options.dp * tp != plan_ngpus or min(num_stages, options.dp, tp) < 1:
        raise PlanError(
            "policy 'hybrid' cannot place its sizes on the ranks of the plan",
            why=f"num_stages={num_stages} x dp={options.dp} x tp={tp} is not "
            f"plan_ngpus={plan_ngpus}",
            hint="make the product of the three equal to plan_ngpus",
        )
    return num_stages, tp


def files(config: ComputeConfig) -> list[Path]:
    """The files that describe the machine, if it is none of the presets."""
    return hardware_files(read_options(HybridOptions, config.pas_config, policy="hybrid").hardware)


POLICY = Policy("hybrid", apply, HybridOptions, built_in=True, files=files)
