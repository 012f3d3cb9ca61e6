"""What a plan costs, from the program that is really emitted.

Without stages the time is a sum: operators, adapters (which block), as often as there are microbatches, the reduction of
gradients and the optimizer's pass. That is what planners minimise, to the last term. With ``use_async_reducer`` the reduction
runs beside the last backward
(:mod:`~shardwright.compiler.cost.reduction`). A pipeline is its schedule, simulated with the times of its stages and messages
(:mod:`~shardwright.compiler.cost.pipeline_time`).
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.cost.body_time import BodyTime, body_time
from shardwright.compiler.cost.extrapolation import extrapolated
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.memory import program_memory
from shardwright.compiler.cost.operators import OperatorTimes
from shardwright.compiler.cost.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.pipeline_memory import pipeline_memory
from shardwright.compiler.cost.pipeline_time import pipeline_cost
from shardwright.compiler.cost.plan_cost import Activity, PlanCost, RankCost
from shardwright.compiler.cost.reduction import Reduction, overlapped
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError

__all__ = ["Activity", "PlanCost", "RankCost", "audit"]


def audit(
    program: Program | PipelineProgram,
    config: ComputeConfig,
    hardware: Hardware,
    *,
    optimizer: OptimizerMemory = ADAM,
    times: OperatorTimes | None = None,
    num_microbatches: int | None = None,
) -> PlanCost:
    """The cost of one step of a lowered program; with ``inference_only`` of one forward of each microbatch.

    ``optimizer``: what it keeps, and so moves. ``times``: measured times of operators. ``num_microbatches``: the samples of a
    step whose gradients are added up (default: those of the plan's schedule; without stages those of its batch, 1 without one).
    The ranks of the job are the first devices of ``hardware``, unit after unit.

    Raises:
        ConfigError: the hardware has fewer devices than ``config.runtime_ngpus``, or no rate for a dtype; or another number of
            microbatches than that of the schedule.
    """
    if hardware.num_devices < config.runtime_ngpus:
        raise ConfigError(
            f"{config.runtime_ngpus} ranks do not fit on hardware {hardware.name!r}",
            why=f"it has {hardware.num_devices} device(s)",
            hint=f"load_hardware(..., num_devices={config.runtime_ngpus})",
        )
    count = _checked_count(program, num_microbatches)
    cost = _audit(program, config, hardware, optimizer, times, count)
    return replace(cost, extrapolated=extrapolated(program, config, hardware, times))


def _checked_count(program: Program | PipelineProgram, num_microbatches: int | None) -> int:
    planned = program.plan.num_microbatches if isinstance(program, PipelineProgram) else None
    if num_microbatches is None:
        batch = program.plan.batch
        return planned or (1 if batch is None else batch.num_microbatches)
    if num_microbatches < 1:
        raise ConfigError(f"a step has at least one microbatch, not {num_microbatches}")
    if planned not in (None, num_microbatches):
        raise ConfigError(
            f"a step of {num_microbatches} microbatches is not what this plan's schedule runs",
            why=f"it is made for {planned}",
            hint="leave num_microbatches out, or plan for another number",
        )
    return num_microbatches


def _audit(
    program: Program | PipelineProgram,
    config: ComputeConfig,
    hardware: Hardware,
    optimizer: OptimizerMemory,
    times: OperatorTimes | None,
    num_microbatches: int,
) -> PlanCost:
    if isinstance(program, PipelineProgram):
        memory = pipeline_memory(program, config, optimizer)
        return pipeline_cost(program, config, hardware, optimizer, times, memory)
    body = body_time(program, hardware, tuple(range(config.plan_ngpus)), times, trains=not config.inference_only)
    reduction = Reduction.of(
        program.declarations, program.plan.storage_mesh, config, hardware, optimizer, num_microbatches=num_microbatches
    )
    activities, step_s = _timeline(body, reduction, config, program, num_microbatches)
    comm_s = {name: num_microbatches * seconds for name, seconds in body.comm_s.items()}
    inside_s = sum(comm_s.values())
    comm_bytes = {name: num_microbatches * num_bytes for name, num_bytes in body.comm_bytes.items()}
    if reduction.total_s:
        comm_s[reduction.name], comm_bytes[reduction.name] = reduction.total_s, reduction.total_bytes
    compute_s = num_microbatches * body.compute_s + reduction.accumulation_s + reduction.optimizer_s
    idle_s = max(0.0, step_s - compute_s - inside_s)
    memory_of = program_memory(program, config, optimizer, num_microbatches=num_microbatches)
    ranks = range(config.plan_ngpus)
    blocking = not config.use_async_reducer
    return PlanCost(
        hardware.name,
        step_s,
        tuple(RankCost(rank, compute_s, comm_s, 0.0 if blocking else idle_s, comm_bytes) for rank in ranks),
        tuple(memory_of.at(rank) for rank in ranks),
        activities,
    )


def _timeline(
    body: BodyTime, reduction: Reduction, config: ComputeConfig, program: Program, num_microbatches: int
) -> tuple[tuple[Activity, ...], float]:
    """The parts of the step on rank 0, and its end."""
    parts: list[Activity] = []
    end = 0.0
    for index in range(num_microbatches):
        start, end = end, end + body.forward_s
        parts.append(Activity(0, "forward", start, end))
        if config.inference_only:
            continue
        if config.use_async_reducer and index == num_microbatches - 1:
            parts += [Activity(0, name, *span) for name, *span in overlapped(program, body, reduction, end)]
            end = max(activity.end_s for activity in parts) + reduction.accumulation_s / num_microbatches
        else:
            start, end = end, end + body.backward_s
            end += reduction.accumulation_s / num_microbatches
            parts.append(Activity(0, "backward", start, end))
    if config.inference_only:
        return tuple(parts), end
    if reduction.total_s and not config.use_async_reducer:
        parts.append(Activity(0, "reduce gradients", end, end + reduction.total_s))
        end += reduction.total_s
    parts.append(Activity(0, "optimizer step", end, end + reduction.optimizer_s))
    return tuple(parts), end + reduction.optimizer_s
