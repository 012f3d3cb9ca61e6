"""The time of a pipeline: the actions of its schedule, simulated with the times of its stages and
of the messages between them.

Example: 2 stages of 1 ms forward and 2 ms backward, 4 microbatches, messages that take no time. In
1F1B the last stage begins after 1 ms, computes 4 * 3 = 12 ms without a gap, and the first stage
needs 2 ms more for its last backward: 15 ms. Each rank waits for 3 of these, so the bubble is 20 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.cost.local_calls import estimated_size
from shardwright.compiler.cost.machine.hardware import Device, Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.cost.plan_cost import Activity, PlanCost, RankCost
from shardwright.compiler.cost.time.after_backward import (
    ParameterSync,
    Reduction,
    accumulated_bytes,
    accumulation_s,
    all_gradients_bytes,
)
from shardwright.compiler.cost.time.body_time import BodyTime, body_time
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.cost.time.split_backward_time import parts_of_backward
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.pipeline import Crossing, PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.compiler.schedule.planned import dataflow_of, schedule_of_step
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.shared_cores import SharedMachines
from shardwright.compiler.schedule.simulate import Span, StageTimes, simulate
from shardwright.runtime.atoms import Atom
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.schedule_actions import ActionKind
from shardwright.runtime.transfer import Holding, pieces
from shardwright.runtime.zero.settings import ReductionSettings


def pipeline_cost(
    program: PipelineProgram,
    config: ComputeConfig,
    hardware: Hardware,
    optimizer: OptimizerMemory,
    times: OperatorTimes | None,
    *,
    gathers_ahead: bool = True,
) -> PlanCost:
    """The cost of one step of all microbatches, without its memory. ``gathers_ahead``: as in
    :func:`audit.audit`.

    After its last action each rank reduces its gradients, updates its parameters, and gathers those
    that other ranks updated. If the optimizer needs whole tensors, they are exchanged around its
    step. If the config overlaps communication, the reduction of a stage begins when the stage's
    last backward ends. Parameters are then gathered from the start, one stage after the other, and
    a stage begins when its own are there.
    """
    plan = program.plan
    # First what each action of each stage takes, then when it runs.
    schedule = schedule_of_step(plan, trains=not config.inference_only)
    bodies = []
    for stage_program, stage in zip(program.programs, plan.stages, strict=True):
        body = body_time(
            stage_program,
            hardware,
            stage.ranks,
            times,
            trains=schedule.trains,
            unit_size=config.plan_ngpus,
            gathers_ahead=gathers_ahead,
        )
        bodies.append(body)
    added = [
        addition_s(own, plan.num_microbatches, config, hardware, optimizer)
        for own in program.programs
    ]
    times_of = [
        stage_times(program, index, body, schedule, hardware.device, added[index])
        for index, body in enumerate(bodies)
    ]
    # Messages between stages, and what each position does once per step.
    transfers = transfer_seconds(program, hardware)
    positions = [
        _Position.of(program, ranks, config, hardware, optimizer)
        for ranks in _ranks_of_positions(program)
    ]
    # On a host, ranks may share cores: an action takes longer while others run.
    sharing = hardware.device.sharing
    on = [position.ranks for position in positions]
    machines = (
        SharedMachines.of(sharing, on, config.plan_ngpus, config.num_units) if sharing else None
    )
    begins = {stage: at for position in positions for stage, at in position.begins_s.items()}
    line = simulate(
        schedule, times_of, transfers, dataflow_of(program, schedule.num_stages), machines, begins
    )
    # Behind the last action of a position come its sums, the update and the gathering.
    activities: list[Activity] = []
    costs, ends = {}, []
    for position, spans, busy_s in zip(positions, line.spans, line.busy_s, strict=True):
        rank, reduction = position.ranks[0], position.reduction
        activities += [Activity(rank, str(span.action), span.start_s, span.end_s) for span in spans]
        after, end = position.after(spans)
        activities += after
        ends.append(end)
        comm, volumes = _communication(
            [bodies[index] for index in position.stages], plan.num_microbatches
        )
        # What a position was busy with that was no communication.
        compute_s = busy_s - sum(comm.values()) + reduction.optimizer_s
        for name, (seconds, num_bytes) in reduction.messages.items():
            comm[name], volumes[name] = seconds, num_bytes
        costs[position.ranks] = compute_s, comm, volumes
    step_s = max(ends)
    # All ranks of a position have one cost; what is left of the step they wait.
    found: dict[int, RankCost] = {}
    for ranks, (compute_s, comm, volumes) in costs.items():
        idle_s = max(0.0, step_s - compute_s - sum(comm.values()))
        found |= {rank: RankCost(rank, compute_s, comm, idle_s, volumes) for rank in ranks}
    return PlanCost(
        hardware.name,
        step_s,
        tuple(found[rank] for rank in sorted(found)),
        (),
        tuple(activities),
        line.bubble_ratio,
        messages=_of_a_step(transfers, plan.num_microbatches),
        message_bytes=_of_a_step(transfer_bytes(program), plan.num_microbatches),
    )


def _communication(
    bodies: Sequence[BodyTime], num_microbatches: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and bytes of the collectives of a position's stages in a step, by name."""
    seconds: dict[str, float] = {}
    volumes: dict[str, float] = {}
    for body in bodies:
        for name, each_s in body.comm_s.items():
            seconds[name] = seconds.get(name, 0.0) + num_microbatches * each_s
            each_bytes = body.comm_bytes[name]
            volumes[name] = volumes.get(name, 0.0) + num_microbatches * each_bytes
    return seconds, volumes


def _ranks_of_positions(program: PipelineProgram) -> list[tuple[int, ...]]:
    """The ranks of every position, in the order of the schedule."""
    return list(dict.fromkeys(stage.ranks for stage in program.plan.stages))


@dataclass(frozen=True)
class _Position:
    """What the ranks of one position do besides their actions.

    ``names``: the parameters of each stage. ``asynchronous``: sums begin when a stage is done.
    ``gathers_ahead``: parameters are gathered from the start.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    reduction: Reduction
    names: Mapping[int, Collection[str]]
    asynchronous: bool
    gathers_ahead: bool

    @classmethod
    def of(
        cls,
        program: PipelineProgram,
        ranks: tuple[int, ...],
        config: ComputeConfig,
        hardware: Hardware,
        optimizer: OptimizerMemory,
    ) -> _Position:
        stages = tuple(program.stages_of(ranks[0]))
        shared = program.holders_elsewhere(ranks)
        mesh = program.programs[stages[0]].plan.storage_mesh
        used = (value for part in program.programs for value in part.graph.used_parameters)
        reduction = Reduction.of(
            program.declarations_of(stages), mesh, config, hardware, optimizer, ranks, shared,
            model_bytes=all_gradients_bytes(config, used),
        )  # fmt: skip
        # Asynchronous sums begin stage by stage, so the parameters of each are told.
        settings = ReductionSettings.of(config, config.num_units)
        names = {
            stage: {d.value.name for d in program.programs[stage].declarations} for stage in stages
        }
        return cls(
            ranks, stages, reduction, names, settings.asynchronous, settings.overlaps_parameters
        )

    @property
    def begins_s(self) -> dict[int, float]:
        """When all parameters of each stage are there, in seconds from the start of the step."""
        if not self.gathers_ahead:
            return {}
        return self._one_after_the_other({}, lambda found: found.gather_s)

    def after(self, spans: Sequence[Span]) -> tuple[list[Activity], float]:
        """The parts of the step that follow the actions, and the second at which they end."""
        reduction, rank, last = self.reduction, self.ranks[0], spans[-1].end_s if spans else 0.0
        # One stage: its sums begin when its last backward ends, which is the end of the actions.
        reduced = last + reduction.sum_s
        if self.asynchronous and len(self.stages) > 1:
            kinds = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
            complete = {
                span.action.stage: span.end_s for span in spans if span.action.kind in kinds
            }
            reduced = max(
                [last, *self._one_after_the_other(complete, lambda found: found.sum_s).values()]
            )
        reduced += reduction.across_s
        parts, end = (
            [Activity(rank, "reduce gradients", last, reduced)] if reduced > last else [],
            reduced,
        )
        # What follows the sums comes one after the other.
        for name, seconds in reduction.after_sums(gathers_ahead=self.gathers_ahead):
            parts.append(Activity(rank, name, end, end + seconds))
            end += seconds
        return parts, end

    def _one_after_the_other(
        self, ready: Mapping[int, float], seconds: Callable[[ParameterSync], float]
    ) -> dict[int, float]:
        """The end of the communication of each stage's parameters, one stage after the other.

        It begins when the stage is ``ready`` and the one before is done. A parameter of several
        stages counts with the first of them.
        """
        free, done, ends = 0.0, set[str](), {}
        for stage in sorted(self.stages, key=lambda stage: (ready.get(stage, 0.0), stage)):
            names = set(self.names[stage]) - done
            done |= names
            found = [
                self.reduction.parameters[name]
                for name in names
                if name in self.reduction.parameters
            ]
            free = max(free, ready.get(stage, 0.0)) + sum(map(seconds, found))
            ends[stage] = free
        return ends


def _of_a_step(found: Mapping[tuple[int, int], float], num_microbatches: int) -> dict[str, float]:
    """What pairs of stages send in a step, from what they send of one microbatch. The keys of the
    result are texts like ``"stage 0 to 1"``.
    """
    return {
        f"stage {a} to {b}": num_microbatches * value
        for (a, b), value in sorted(found.items())
        if value
    }


def stage_times(
    program: PipelineProgram,
    index: int,
    body: BodyTime,
    schedule: Schedule,
    device: Device,
    added_s: float,
) -> StageTimes:
    """The times of one microbatch of a stage. ``added_s``: seconds of adding to gradients."""
    own = program.programs[index]
    whole_s = body.backward_s + added_s
    listed = schedule.actions[schedule.placement[index]]
    kinds = {action.kind for action in listed if action.stage == index}
    # A schedule that has ``B`` alone computes gradients of inputs and weights together.
    if ActionKind.INPUT_GRADIENT not in kinds:
        return StageTimes(body.forward_s, whole_s, 0.0)
    inputs = [
        crossing.value.name
        for crossing in program.crossings
        if crossing.target == index and crossing.value.takes_gradient
    ]
    inputs_s, weights_s = parts_of_backward(own, body, inputs, device, added_s)
    # The two parts share the launches of the whole.
    stretch = body.backward_stretch
    return StageTimes(body.forward_s, stretch * inputs_s, stretch * weights_s, whole_s)


def addition_s(
    program: Program,
    num_microbatches: int,
    config: ComputeConfig,
    hardware: Hardware,
    optimizer: OptimizerMemory,
) -> float:
    """Seconds of adding to the gradients of a stage, per microbatch. They are spread over all
    microbatches, although the first one adds to nothing.
    """
    mesh = program.plan.storage_mesh
    parameters = [
        d
        for d in program.declarations
        if d.value.kind is ValueKind.PARAMETER and d.value.requires_grad
    ]
    sizes = [accumulated_bytes(d, mesh, config, optimizer) for d in parameters]
    return accumulation_s(sizes, num_microbatches, hardware) / num_microbatches


def transfer_seconds(program: PipelineProgram, hardware: Hardware) -> dict[tuple[int, int], float]:
    """The seconds of the messages of one microbatch, by (sending stage, receiving stage): from the
    end of an action until the slowest receiving rank has everything.
    """
    found: dict[tuple[int, int], float] = {}
    for crossing in program.crossings:
        for pair, reverse in (
            ((crossing.source, crossing.target), False),
            ((crossing.target, crossing.source), True),
        ):
            if not reverse or crossing.value.takes_gradient:
                found[pair] = found.get(pair, 0.0) + crossing_s(crossing, hardware, reverse=reverse)
    return found


def transfer_bytes(program: PipelineProgram) -> dict[tuple[int, int], float]:
    """The bytes of the messages of one microbatch, by (sending stage, receiving stage): what all
    receiving ranks get together.
    """
    found: dict[tuple[int, int], float] = {}
    for crossing in program.crossings:
        for pair, reverse in (
            ((crossing.source, crossing.target), False),
            ((crossing.target, crossing.source), True),
        ):
            if not reverse or crossing.value.takes_gradient:
                found[pair] = found.get(pair, 0.0) + sum(
                    sent_bytes(crossing, reverse=reverse).values()
                )
    return found


def crossing_s(crossing: Crossing, hardware: Hardware, *, reverse: bool) -> float:
    """Seconds until the slowest rank has all of a value, as a rank receives one piece after the
    other. ``reverse``: the gradient of the value goes the other way.
    """
    received: dict[int, float] = {}
    for (sender, receiver), num_bytes in sent_bytes(crossing, reverse=reverse).items():
        seconds = collective_s(hardware, "send", num_bytes, (sender, receiver))
        received[receiver] = received.get(receiver, 0.0) + seconds
    return max(received.values(), default=0.0)


def sent_bytes(crossing: Crossing, *, reverse: bool) -> dict[tuple[int, int], int]:
    """The bytes of a value that go from one rank to another, by (sender, receiver). ``reverse``:
    those of its gradient, which goes the other way.
    """
    ends = (crossing.received, crossing.sent) if reverse else (crossing.sent, crossing.received)
    source, target = map(_in_numbers, ends)
    found = {}
    for (sender, receiver), boxes in pieces(source, target).items():
        if sender != receiver:  # a rank of both stages keeps its own piece
            elements = sum(math.prod(stop - start for start, stop in box) for _, box in boxes)
            found[sender, receiver] = crossing.value.dtype.itemsize * elements
    return found


def _in_numbers(held: Holding) -> Holding:
    """A holding with numbers in the place of dynamic sizes, as estimates count them."""
    if all(isinstance(size, int) for size in held.layout.shape):
        return held
    dims = tuple(
        tuple(Atom(tuple(map(estimated_size, atom.segments)), atom.axes) for atom in dim)
        for dim in held.layout.dims
    )
    return replace(held, layout=replace(held.layout, dims=dims))
