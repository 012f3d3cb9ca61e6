"""What a plan costs, from the program that is really emitted.

The time of a plan without stages is a sum. Operators and adapters count once per microbatch.
Adapters block, but for those that the program starts early: what is hidden of these behind
operators is left out (``body_time.py``, ``gathers_ahead.py``). Once per step come the reduction of
gradients, the exchange of whole tensors where the optimizer needs them, the optimizer's pass, and
the gathering of what other ranks updated. Planners minimise this sum, with gathers of weights as
hidden or as waited for, and compare plans by their audits. Where the config overlaps communication,
sums run beside the last backward and gatherings beside the first forward (``overlap.py``). The time
of a pipeline comes from its schedule, simulated with the times of its stages and messages
(``pipeline_time.py``).

Example: 4 microbatches of 2 ms forward and 4 ms backward, 3 ms for the gradients' all-reduce and
1 ms for Adam take 4 * (2 + 4) + 3 + 1 = 28 ms, if nothing overlaps.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.cost.assumptions import assumptions
from shardwright.compiler.cost.machine.backend import Backend
from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.memory.pipeline_memory import pipeline_memory
from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.plan_cost import Activity, PlanCost, RankCost
from shardwright.compiler.cost.time.after_backward import Reduction
from shardwright.compiler.cost.time.body_time import BodyTime, body_time
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.cost.time.extrapolation import extrapolated
from shardwright.compiler.cost.time.overlap import Part, gathered_beside, summed_beside
from shardwright.compiler.cost.time.pipeline_time import pipeline_cost
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.runtime.arguments import checked
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, brief
from shardwright.runtime.schedule_actions import MOST_CELLS
from shardwright.runtime.zero.settings import ReductionSettings

__all__ = ["Activity", "PlanCost", "RankCost", "audit"]


@checked
def audit(
    program: Program | PipelineProgram,
    config: ComputeConfig,
    hardware: Hardware,
    *,
    optimizer: OptimizerMemory = ADAM,
    times: OperatorTimes | None = None,
    num_microbatches: int | None = None,
    gathers_ahead: bool = True,
) -> PlanCost:
    """The cost of one step of a lowered program; with ``inference_only`` of one forward of each
    microbatch.

    ``optimizer``: what it keeps, and so moves. ``times``: measured times of operators.
    ``num_microbatches``: the samples of a step whose gradients are added up (default: those of the
    plan's schedule; without stages those of its batch, 1 without one). ``gathers_ahead``: weights
    are gathered one ahead, as the runtime does it, and what is hidden of that costs nothing;
    without it each is priced as if it were waited for. The ranks of the job are the first devices
    of ``hardware``, unit after unit.

    Raises:
        ConfigError: the hardware has fewer devices than ``config.runtime_ngpus``, or no rate for a
            dtype; or another number of microbatches than that of the schedule.
    """
    if hardware.num_devices < config.runtime_ngpus:
        raise ConfigError(
            f"{config.runtime_ngpus} ranks do not fit on hardware {hardware.name!r}",
            why=f"it has {hardware.num_devices} device(s)",
            hint=f"load_hardware(..., num_devices={config.runtime_ngpus})",
        )
    count = _checked_count(program, num_microbatches)
    cost = time_of_step(
        program, config, hardware, optimizer, times, count, gathers_ahead=gathers_ahead
    )
    return replace(
        cost,
        memory=_memory(program, config, optimizer, count, hardware.backend),
        extrapolated=extrapolated(program, config, hardware, times, optimizer),
        assumed=assumptions(program),
    )


def _memory(
    program: Program | PipelineProgram,
    config: ComputeConfig,
    optimizer: OptimizerMemory,
    num_microbatches: int,
    backend: Backend,
) -> tuple[RankMemory, ...]:
    if isinstance(program, PipelineProgram):
        return pipeline_memory(program, config, optimizer, backend)
    memory_of = program_memory(
        program, config, optimizer, num_microbatches=num_microbatches, backend=backend
    )
    return tuple(memory_of.at(rank) for rank in range(config.plan_ngpus))


def _checked_count(program: Program | PipelineProgram, num_microbatches: int | None) -> int:
    planned = program.plan.num_microbatches if isinstance(program, PipelineProgram) else None
    if num_microbatches is None:
        batch = program.plan.batch
        return planned or (1 if batch is None else batch.num_microbatches)
    if not 1 <= num_microbatches <= MOST_CELLS:
        raise ConfigError(
            f"a step has 1 to {MOST_CELLS:,} microbatches, not {brief(num_microbatches)}"
        )
    if planned not in (None, num_microbatches):
        raise ConfigError(
            f"a step of {num_microbatches} microbatches is not what this plan's schedule runs",
            why=f"it is made for {planned}",
            hint="leave num_microbatches out, or plan for another number",
        )
    return num_microbatches


def time_of_step(
    program: Program | PipelineProgram,
    config: ComputeConfig,
    hardware: Hardware,
    optimizer: OptimizerMemory = ADAM,
    times: OperatorTimes | None = None,
    num_microbatches: int = 1,
    *,
    gathers_ahead: bool = True,
) -> PlanCost:
    """The cost of a step without its memory, which hardly depends on the machine: for fits that
    price one program on many machines.
    """
    # Stages have a schedule; one mesh has a body, and what follows its backward.
    if isinstance(program, PipelineProgram):
        return pipeline_cost(
            program, config, hardware, optimizer, times, gathers_ahead=gathers_ahead
        )
    body = body_time(
        program,
        hardware,
        tuple(range(config.plan_ngpus)),
        times,
        trains=not config.inference_only,
        gathers_ahead=gathers_ahead,
    )
    reduction = Reduction.of(
        program.declarations,
        program.plan.storage_mesh,
        config,
        hardware,
        optimizer,
        num_microbatches=num_microbatches,
    )
    activities, step_s = _timeline(
        body, reduction, config, program, hardware.device, num_microbatches
    )
    # Every microbatch runs the body; gradients are summed and parameters updated once.
    comm_s = {name: num_microbatches * seconds for name, seconds in body.comm_s.items()}
    inside_s = sum(comm_s.values())
    comm_bytes = {name: num_microbatches * num_bytes for name, num_bytes in body.comm_bytes.items()}
    for name, (seconds, num_bytes) in reduction.messages.items():
        comm_s[name], comm_bytes[name] = seconds, num_bytes
    compute_s = num_microbatches * body.compute_s + reduction.accumulation_s + reduction.optimizer_s
    # What is left of the step: neither computing nor communicating.
    idle_s = max(0.0, step_s - compute_s - inside_s - reduction.exchange.total_s)
    ranks = range(config.plan_ngpus)
    settings = ReductionSettings.of(config, config.num_units)
    # Communication that blocks is in ``comm_s`` as a whole: nothing of the step is left to wait
    # for but the host.
    waiting_s = num_microbatches * body.waiting_s
    blocking = not (settings.asynchronous or settings.overlaps_parameters)
    return PlanCost(
        hardware.name,
        step_s,
        tuple(
            RankCost(rank, compute_s, comm_s, waiting_s if blocking else idle_s, comm_bytes)
            for rank in ranks
        ),
        (),
        activities,
    )


def _timeline(
    body: BodyTime,
    reduction: Reduction,
    config: ComputeConfig,
    program: Program,
    device: Device,
    num_microbatches: int,
) -> tuple[tuple[Activity, ...], float]:
    """The parts of the step on rank 0, and the second at which the step ends."""
    parts: list[Activity] = []

    def add(*found: Part) -> float:
        """Note parts ``(name, start_s, end_s)``; return the end of the last one."""
        parts.extend(Activity(0, *part) for part in found)
        return max([0.0, *(part[2] for part in found)])

    settings = ReductionSettings.of(config, config.num_units)
    added_s = reduction.accumulation_s / num_microbatches
    # ``end``: when the rank is done so far. ``free``: when its gatherings leave the link free,
    # which may be later. ``summed_s``: sums that block; they are drawn as one part after the last
    # backward.
    end = free = summed_s = 0.0
    for index in range(num_microbatches):
        if index == 0 and settings.overlaps_parameters:
            forward, *gathered = gathered_beside(program, body, reduction, device)
            end, free = add(forward), add(*gathered)
        else:
            end = add(("forward", end, end + body.forward_s))
        if config.inference_only:
            continue
        # Gradients are summed once, after the last microbatch, unless their buffers must be empty
        # after each backward.
        is_summed = settings.frees_gradients or index == num_microbatches - 1
        if is_summed and settings.asynchronous:
            end = add(*summed_beside(program, body, reduction, device, end, free)) + added_s
        else:
            summed_s += is_summed * reduction.sum_s
            end = add(("backward", end, end + body.backward_s)) + added_s
    if config.inference_only:
        return tuple(parts), end
    end = max(end, free)  # parameters that no forward reads may still be on their way
    summed_s += reduction.across_s
    if summed_s:
        end = add(("reduce gradients", end, end + summed_s))
    for name, seconds in reduction.after_sums(gathers_ahead=settings.overlaps_parameters):
        end = add((name, end, end + seconds))
    return tuple(parts), end
