"""When everything happens in a schedule, given how long each stage takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.memory import peak_in_flight
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.waits import run_order, waits_of
from shardwright.runtime.schedule import ActionKind, ScheduleAction


@dataclass(frozen=True)
class StageTimes:
    """How long one microbatch takes in a stage, in any unit of time. The default is what papers assume: F = I = W, B = 2F.

    ``backward_s``: of a backward that is not split, where that takes another time than its two parts.
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
                return self.input_gradient_s + self.weight_gradient_s if self.backward_s is None else self.backward_s


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
        """From the start of the first action to the end of the last one."""
        return max(span.end_s for spans in self.spans for span in spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in spans) for spans in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """The share of all ranks' time in which they wait: 0 to 1."""
        return 1 - sum(self.busy_s) / (self.makespan_s * len(self.spans))

    @property
    def bubble_per_work(self) -> float:
        """The time in which ranks wait, relative to the time in which they compute: the other measure in papers."""
        return self.makespan_s * len(self.spans) / sum(self.busy_s) - 1

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most activations, counted in (stage, microbatch), that each rank holds at once."""
        return peak_in_flight(self.schedule)


def simulate(
    schedule: Schedule,
    times: StageTimes | Sequence[StageTimes] = StageTimes(),
    transfer_s: float | Mapping[tuple[int, int], float] = 0.0,
    dataflow: Dataflow | None = None,
) -> Timeline:
    """Run ``schedule`` in time: each action starts as soon as its rank is free and all it uses is there.

    Messages travel while ranks compute and do not slow each other down.

    Args:
        schedule: a complete schedule.
        times: of each stage, or of all.
        transfer_s: from when a stage has made something until another rank has it; for all pairs of stages, or by (sending
            stage, receiving stage), where a pair that is not named takes no time. A gradient's sender is the later stage.
        dataflow: which stages feed which; each the next one if not given.

    Raises:
        PlanError: the schedule deadlocks.
    """
    dataflow = Dataflow.chain(schedule.num_stages) if dataflow is None else dataflow
    by_stage = [times] * schedule.num_stages if isinstance(times, StageTimes) else times
    waits = waits_of(schedule, dataflow)
    spans: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]
    for rank, index in run_order(schedule, waits):
        action = schedule.actions[rank][index]
        start = spans[rank][-1].end_s if index else 0.0
        for other, other_index in waits[rank][index]:
            made = spans[other][other_index]
            arrival = made.end_s if other == rank else made.end_s + _transfer(transfer_s, made.action.stage, action.stage)
            start = max(start, arrival)
        spans[rank].append(Span(action, start, start + by_stage[action.stage].of(action.kind)))
    return Timeline(schedule, tuple(map(tuple, spans)))


def _transfer(transfer_s: float | Mapping[tuple[int, int], float], sender: int, receiver: int) -> float:
    return transfer_s.get((sender, receiver), 0.0) if isinstance(transfer_s, Mapping) else transfer_s
