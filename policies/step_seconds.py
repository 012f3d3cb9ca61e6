"""How long a step of a plan takes, for policies that try several plans and keep the fastest."""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.time.body_time import body_time
from shardwright.compiler.cost.time.operator_file import load_times
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import training_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.runtime.config import ComputeConfig


def lowered(graph: PlannableGraph, config: ComputeConfig, plan: Plan) -> Program:
    """The program of a plan without stages."""
    return lower(
        PlannableGraph.of(needed(graph, config)),
        replace(plan, outputs=training_wishes(graph, config)),
    )


def step_seconds(program: Program, config: ComputeConfig, machine: str, num_ranks: int) -> float:
    """The seconds of forward and backward on the slowest of the ranks. ``machine``: a preset or a
    file.
    """
    time = body_time(
        program,
        load_hardware(machine, num_ranks),
        tuple(range(num_ranks)),
        load_times(machine),
        trains=not config.inference_only,
    )
    return time.compute_s + sum(time.comm_s.values())
