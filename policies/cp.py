"""``cp``: context parallelism. Splits the sequence over all ranks of the plan, from the inputs to
the loss; attention sees all keys in one of several ways: :mod:`shardwright.policies.context_axes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.context_axes import (
    Modes,
    cheapest_modes,
    context_axes,
    split_context,
    turns_of_axes,
)
from shardwright.policies.memory_options import MemoryOptions, saving_memory
from shardwright.policies.partition import with_regions
from shardwright.policies.pipeline_mesh import hardware_files
from shardwright.policies.policy import Policy, read_options
from shardwright.policies.sequences import check_sequence
from shardwright.policies.step_seconds import lowered, step_seconds
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True, kw_only=True)
class ContextOptions(MemoryOptions):
    """Options of ``cp`` in ``pas_config``.

    ``cp``: the ranks that share the sequence (default: all), or the sizes of several axes, major to
    minor. ``cp_mode``: ``auto``, ``gather``, ``ulysses`` or ``ring``, or one for each axis.
    ``cp_turns``: how often each rank gets an early and a late piece; 0: it gets one piece (default:
    1 where attention is causal, so that all ranks have the same work).
    ``sequence``: the names of the dims of the sequence (default: they are found). ``hardware``: the
    preset or file by whose times ``auto`` decides. Others: :class:`MemoryOptions`.
    """

    cp: int | tuple[int, ...] | None = None
    cp_mode: str | tuple[str, ...] = "auto"
    cp_turns: int | None = None
    sequence: tuple[str, ...] = ()
    hardware: str = "a100-80gb"


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """The plan for ``config.plan_ngpus`` ranks on one axis, ``cp``, or on several."""
    options = read_options(ContextOptions, config.pas_config, policy="cp")
    ranks = config.plan_ngpus
    sizes = ranks if options.cp is None else options.cp
    axes = context_axes(sizes, options.cp_mode, "cp")
    if (found := math.prod((sizes,) if isinstance(sizes, int) else sizes)) != ranks:
        raise PlanError(
            f"policy 'cp' cannot place cp={sizes} on {ranks} ranks",
            why=f"these are {found} ranks",
            hint="make the sizes of cp multiply to plan_ngpus; policy 'hybrid' has other degrees "
            "beside it",
        )
    check_sequence(graph, ranks, "cp", options.sequence)

    def plan(modes: Modes) -> Plan:
        sizes = tuple((axis.name, axis.size) for axis in axes) or (("cp", 1),)
        mesh = Mesh(sizes, turns_of_axes(graph, axes, options.cp_turns, "cp"))
        builder = graph.builder(mesh=mesh, order=config.rank_order)
        split_context(builder, axes, modes, options.sequence)
        return builder.plan("cp")

    marked = with_regions(graph, options.recompute)  # in which a ring goes round once more

    def seconds(modes: Modes) -> float:
        program = lowered(marked, config, plan(modes))
        return step_seconds(program, config, options.hardware, ranks)

    # Ring, all-to-all or gather, where the options leave it open: each is lowered and priced.
    chosen = plan(cheapest_modes(graph, axes, seconds, options.sequence))
    return saving_memory(graph, chosen, options, config, "cp")


def files(config: ComputeConfig) -> list[Path]:
    """The files that describe the machine, if it is none of the presets."""
    return hardware_files(read_options(ContextOptions, config.pas_config, policy="cp").hardware)


def following(config: ComputeConfig, first: Plan, stored: Mapping[str, Layout]) -> ComputeConfig:
    """The config with which axes deal what they cut as they do in another program."""
    turns = max(dict(first.mesh.turns).values(), default=0)
    return replace(config, pas_config={**config.pas_config, "cp_turns": turns})


POLICY = Policy("cp", apply, ContextOptions, built_in=True, files=files, following=following)
