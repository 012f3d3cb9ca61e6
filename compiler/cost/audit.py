"""What a plan costs, from the program that is really emitted.

Without stages the time is a sum: operators, adapters (which block), the reduction of gradients and the optimizer's pass. That
is what planners minimise, to the last term. With ``use_async_reducer`` the reduction runs beside the backward
(:mod:`~shardwright.compiler.cost.reduction`). A pipeline is its schedule, simulated with the times of its stages and messages
(:mod:`~shardwright.compiler.cost.pipeline_time`).
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.cost.body_time import BodyTime, body_time
from shardwright.compiler.cost.extrapolation import extrapolated
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.memory import ADAM, OptimizerMemory, pipeline_memory, program_memory
from shardwright.compiler.cost.operators import OperatorTimes
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
) -> PlanCost:
    """The cost of one step of a lowered program: of one microbatch without stages, and of those of the schedule with them; with
    ``inference_only`` of one forward.

    ``optimizer``: what it keeps, and so moves. ``times``: measured times of operators. The ranks of the job are the first
    devices of ``hardware``, unit after unit.

    Raises:
        ConfigError: the hardware has fewer devices than ``config.runtime_ngpus``, or no rate for a dtype.
    """
    if hardware.num_devices < config.runtime_ngpus:
        raise ConfigError(
            f"{config.runtime_ngpus} ranks do not fit on hardware {hardware.name!r}",
            why=f"it has {hardware.num_devices} device(s)",
            hint=f"load_hardware(..., num_devices={config.runtime_ngpus})",
        )
    programs = program.programs if isinstance(program, PipelineProgram) else (program,)
    cost = _audit(program, config, hardware, optimizer, times)
    return replace(cost, extrapolated=extrapolated(programs, hardware, times))


def _audit(
    program: Program | PipelineProgram,
    config: ComputeConfig,
    hardware: Hardware,
    optimizer: OptimizerMemory,
    times: OperatorTimes | None,
) -> PlanCost:
    if isinstance(program, PipelineProgram):
        memory = pipeline_memory(program, config, optimizer)
        return pipeline_cost(program, config, hardware, optimizer, times, memory)
    body = body_time(program, hardware, tuple(range(config.plan_ngpus)), times, trains=not config.inference_only)
    reduction = Reduction.of(program.declarations, program.plan.storage_mesh, config, hardware, optimizer)
    activities, step_s = _timeline(body, reduction, config, program, hardware)
    comm_s = {**body.comm_s, **({reduction.name: reduction.total_s} if reduction.total_s else {})}
    compute_s = body.compute_s + reduction.optimizer_s
    idle_s = max(0.0, step_s - compute_s - sum(body.comm_s.values()))
    memory_of = program_memory(program, config, optimizer)
    ranks = range(config.plan_ngpus)
    blocking = not config.use_async_reducer
    return PlanCost(
        hardware.name,
        step_s,
        tuple(RankCost(rank, compute_s, comm_s, 0.0 if blocking else idle_s) for rank in ranks),
        tuple(memory_of.at(rank) for rank in ranks),
        activities,
    )


def _timeline(
    body: BodyTime, reduction: Reduction, config: ComputeConfig, program: Program, hardware: Hardware
) -> tuple[tuple[Activity, ...], float]:
    """The parts of the step on rank 0, and its end."""
    if config.inference_only:
        return (Activity(0, "forward", 0.0, body.forward_s),), body.forward_s
    parts = [Activity(0, "forward", 0.0, body.forward_s)]
    if config.use_async_reducer:
        streams = overlapped(program, body, reduction, hardware)
        parts += [Activity(0, name, start, end) for name, start, end in streams]
        end = max(activity.end_s for activity in parts)
    else:
        end = body.forward_s + body.backward_s
        parts.append(Activity(0, "backward", body.forward_s, end))
        if reduction.total_s:
            parts.append(Activity(0, "reduce gradients", end, end + reduction.total_s))
            end += reduction.total_s
    parts.append(Activity(0, "optimizer step", end, end + reduction.optimizer_s))
    return tuple(parts), end + reduction.optimizer_s
