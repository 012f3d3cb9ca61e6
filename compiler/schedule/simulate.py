"""The times at which everything happens in a schedule, given how long each stage takes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.live_microbatches import peak_in_flight
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.shared_cores import SharedMachines
from shardwright.compiler.schedule.waits import Waits, run_order, waits_of
from shardwright.runtime.arguments import checked, checked_fields
from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction


@checked_fields
@dataclass(frozen=True)
class StageTimes:
    """How long one microbatch takes in a stage, in any unit of time. The default is what papers
    assume: F = I = W, B = 2F.

    ``backward_s``: the time of a backward that is not split, if it differs from the sum of the two
    parts.
    """

    forward_s: float = 1.0
    input_gradient_s: float = 1.0
    weight_gradient_s: float = 1.0
    backward_s: float | None = None

    def of(self, kind: ActionKind) -> float:
        """The time of an action of this kind."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward_s
            case ActionKind.INPUT_GRADIENT:
                return self.input_gradient_s
            case ActionKind.WEIGHT_GRADIENT:
                return self.weight_gradient_s
            case _:
                return (
                    self.input_gradient_s + self.weight_gradient_s
                    if self.backward_s is None
                    else self.backward_s
                )


@dataclass(frozen=True, slots=True)
class Span:
    """One action and its time."""

    action: ScheduleAction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time: ``spans[rank]`` are the rank's actions, in order and without overlap."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """The time from the start of the schedule to the end of its last action."""
        return max(span.end_s for spans in self.spans for span in spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """The time for which each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in spans) for spans in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """The share of all ranks' time in which they wait: 0 to 1."""
        return 1 - sum(self.busy_s) / (self.makespan_s * len(self.spans))

    @property
    def bubble_per_work(self) -> float:
        """The time in which ranks wait, relative to the time in which they compute: the other
        measure in papers.
        """
        return self.makespan_s * len(self.spans) / sum(self.busy_s) - 1

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most activations, counted in (stage, microbatch), that each rank holds at once."""
        return peak_in_flight(self.schedule)


@checked
def simulate(
    schedule: Schedule,
    times: StageTimes | Sequence[StageTimes] = StageTimes(),
    transfer_s: float | Mapping[tuple[int, int], float] = 0.0,
    dataflow: Dataflow | None = None,
    machines: SharedMachines | None = None,
    begins_s: Mapping[int, float] | None = None,
) -> Timeline:
    """Run ``schedule`` in time: each action starts as soon as its rank is free and all it uses is
    there.

    Messages travel while ranks compute and do not slow each other down.

    Args:
        schedule: a complete schedule.
        times: of each stage, or of all.
        transfer_s: the time from when a stage has made something until another rank has it. It is
            one number for all pairs of stages, or one for each (sending stage, receiving stage); a
            pair that is not named takes no time. A gradient's sender is the later stage.
        dataflow: which stages feed which; by default each stage feeds the next.
        machines: the machines whose cores ranks share. Then ``times`` are those while all ranks of
            a machine compute.
        begins_s: when the parameters of a stage are there, by stage, if not from the start.

    Raises:
        PlanError: the schedule deadlocks.
    """
    run = _run(schedule, times, transfer_s, dataflow, begins_s)
    # Ranks that share no cores run at one speed, so that one pass in the order of waits finds all
    # times. Beside others a rank's speed changes with what they do, event by event.
    if machines is None:
        run.alone()
    else:
        run.beside(machines)
    return Timeline(schedule, tuple(map(tuple, run.spans)))


def ends_s(
    schedule: Schedule,
    times: Sequence[StageTimes],
    transfer_s: float | Mapping[tuple[int, int], float] = 0.0,
) -> list[float]:
    """The time at which each rank ends its last action: that of :func:`simulate` with the same
    arguments, for those who ask for nothing else and ask often.

    Raises:
        PlanError: the schedule deadlocks.
    """
    return [own[-1] for own in _run(schedule, times, transfer_s, None, None).times_alone()[1]]


def _run(
    schedule: Schedule,
    times: StageTimes | Sequence[StageTimes],
    transfer_s: float | Mapping[tuple[int, int], float],
    dataflow: Dataflow | None,
    begins_s: Mapping[int, float] | None,
) -> _Run:
    """A run that has not begun."""
    dataflow = _chain(schedule.num_stages) if dataflow is None else dataflow
    by_stage = [times] * schedule.num_stages if isinstance(times, StageTimes) else times
    if len(by_stage) < schedule.num_stages:
        raise PlanError(f"times of {len(by_stage)} stages for a schedule of {schedule.num_stages}")
    return _Run(schedule, by_stage, transfer_s, _execution(schedule, dataflow), begins_s or {})


@functools.lru_cache(maxsize=64)
def _chain(num_stages: int) -> Dataflow:
    return Dataflow.chain(num_stages)


KINDS = tuple(ActionKind)

Step = tuple[int, int, int, list[tuple[int, int, tuple[int, int] | None]]]
"""An action as a run needs it: its rank, its stage, the number of its kind; and what it waits for,
by rank and index, with the stages that the message in between goes from and to, if there is one.
"""


@dataclass(frozen=True)
class _Execution:
    """What actions wait for, and an order in which they can run: a search of stages asks for many
    times of one schedule after the other, and these are the same for all of them.
    """

    waits: Waits
    steps: list[Step]


@functools.lru_cache(maxsize=8)
def _execution(schedule: Schedule, dataflow: Dataflow) -> _Execution:
    waits, actions = waits_of(schedule, dataflow), schedule.actions
    steps: list[Step] = []
    for rank, index in run_order(schedule, waits):
        action = actions[rank][index]
        before: list[tuple[int, int, tuple[int, int] | None]] = []
        for other, other_index in waits[rank][index]:
            # From another rank a message comes after it.
            pair = (actions[other][other_index].stage, action.stage) if other != rank else None
            before.append((other, other_index, pair))
        steps.append((rank, action.stage, KINDS.index(action.kind), before))
    return _Execution(waits, steps)


class _Run:
    """The run of a schedule so far. ``spans[rank]``: the actions of the rank that have run."""

    def __init__(
        self,
        schedule: Schedule,
        times: Sequence[StageTimes],
        transfer_s: float | Mapping[tuple[int, int], float],
        execution: _Execution,
        begins_s: Mapping[int, float],
    ) -> None:
        self.schedule, self.times, self.transfer_s = schedule, times, transfer_s
        self.waits, self.steps, self.begins_s = execution.waits, execution.steps, begins_s
        self.spans: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]

    def alone(self) -> None:
        """Run where every rank has a device for itself, so that no other rank changes how long an
        action takes.
        """
        starts, ends = self.times_alone()
        for rank, actions in enumerate(self.schedule.actions):
            self.spans[rank] = list(map(Span, actions, starts[rank], ends[rank]))

    def times_alone(self) -> tuple[list[list[float]], list[list[float]]]:
        """The starts and ends of all actions, by rank, where every rank has a device for itself."""
        actions, everywhere_s = self.schedule.actions, 0.0
        between_s: Mapping[tuple[int, int], float] = {}
        if isinstance(self.transfer_s, Mapping):
            between_s = self.transfer_s
        else:
            everywhere_s = self.transfer_s
        starts: list[list[float]] = [[] for _ in actions]
        ends: list[list[float]] = [[] for _ in actions]
        seconds = [[times.of(kind) for kind in KINDS] for times in self.times]
        begins_s = [self.begins_s.get(stage, 0.0) for stage in range(self.schedule.num_stages)]
        # This loop is most of what a search of stages takes, so it calls nothing of its own. The
        # order has what an action waits for before it.
        for rank, stage, kind, before in self.steps:
            own, start = ends[rank], begins_s[stage]
            if own and own[-1] > start:
                start = own[-1]
            for other, other_index, pair in before:
                there = ends[other][other_index]
                if pair is not None:
                    there += between_s.get(pair, everywhere_s)
                if there > start:
                    start = there
            starts[rank].append(start)
            own.append(start + seconds[stage][kind])
        return starts, ends

    def beside(self, machines: SharedMachines) -> None:
        """Run where ranks share cores, from moment to moment. A moment is when an action ends, or
        when something arrives that a rank waits for. After it the others go on at another speed.
        """
        now = 0.0
        # For each rank that computes, when its action began, and the seconds of it that are left at
        # the speed of all ranks at work.
        running: dict[int, tuple[float, float]] = {}
        while True:
            # Ranks whose next action waits for one that still runs are in neither set: that one's
            # end is a moment, after which they are asked again.
            waiting = (rank for rank in range(len(self.spans)) if rank not in running)
            coming = {rank: at for rank in waiting if (at := self._ready_s(rank)) is not None}
            running |= {
                rank: (now, self._next(rank)[1]) for rank, at in coming.items() if at <= now
            }
            moments = [at for at in coming.values() if at > now]
            speeds = dict(zip(running, machines.speeds(list(running)), strict=True))
            ends = {rank: now + left / speeds[rank] for rank, (_, left) in running.items()}
            # run_order has refused schedules that deadlock, so this is the end of all actions.
            if not ends and not moments:
                return
            then = min([*ends.values(), *moments])
            for rank, (start, left) in list(running.items()):
                if ends[rank] <= then:
                    self.spans[rank].append(Span(self._next(rank)[0], start, then))
                    del running[rank]
                else:
                    running[rank] = start, left - (then - now) * speeds[rank]
            now = then

    def _next(self, rank: int) -> tuple[ScheduleAction, float]:
        """The action that comes next on a rank, and its seconds."""
        action = self.schedule.actions[rank][len(self.spans[rank])]
        return action, self.times[action.stage].of(action.kind)

    def _ready_s(self, rank: int) -> float | None:
        """The time at which everything is there that the next action uses. It is ``None`` if there
        is no next action, or if something has not been made yet.
        """
        index = len(self.spans[rank])
        if index == len(self.schedule.actions[rank]):
            return None
        # It waits for the action before it on its rank, and for all that makes what it uses.
        action = self.schedule.actions[rank][index]
        ready = max(
            self.spans[rank][-1].end_s if index else 0.0, self.begins_s.get(action.stage, 0.0)
        )
        # From another rank a message comes after it.
        for other, other_index in self.waits[rank][index]:
            if other_index >= len(self.spans[other]):
                return None
            made = self.spans[other][other_index]
            ready = max(
                ready,
                made.end_s
                if other == rank
                else made.end_s + self._transfer_s(made.action.stage, action.stage),
            )
        return ready

    def _transfer_s(self, sender: int, receiver: int) -> float:
        return (
            self.transfer_s.get((sender, receiver), 0.0)
            if isinstance(self.transfer_s, Mapping)
            else self.transfer_s
        )
