"""Is a schedule one that runs: each action once and in its place, no deadlock, no more in flight
than allowed?
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.live_microbatches import held_after
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.waits import run_order, waits_of
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import PlanError, brief
from shardwright.runtime.schedule_actions import MOST_CELLS, ActionKind, ScheduleAction

MAX_LISTED = 8
"""How many missing actions an error names."""


@checked
def validate(
    schedule: Schedule,
    dataflow: Dataflow | None = None,
    *,
    max_in_flight: int | None = None,
) -> None:
    """Check that ``schedule`` runs to its end.

    Args:
        schedule: as generated, or read from a file.
        dataflow: which stages feed which; each the next one if not given.
        max_in_flight: how many activations, counted in (stage, microbatch), any rank may hold
            between forward and the last gradient.

    Raises:
        PlanError: an action that is missing, there twice or on the wrong rank; a deadlock, with its
            circle of ranks; too much in flight.
    """
    dataflow = Dataflow.chain(schedule.num_stages) if dataflow is None else dataflow
    if dataflow.num_stages != schedule.num_stages:
        raise PlanError(
            f"a dataflow of {dataflow.num_stages} stages for a schedule of {schedule.num_stages}"
        )
    check_complete(schedule)
    run_order(schedule, waits_of(schedule, dataflow))
    if max_in_flight is not None:
        check_in_flight(schedule, max_in_flight)


@checked
def check_complete(schedule: Schedule) -> None:
    """Check that each stage runs each microbatch once, on its rank, with its backward in one or in
    two parts.

    Raises:
        PlanError: names the action, its rank and its place.
    """
    _check_sizes(schedule)
    # Every action at most once, then every cell of stages x microbatches.
    seen: set[ScheduleAction] = set()
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            _check_place(schedule, action, rank, index)
            if action in seen:
                raise PlanError(
                    f"{action} is in schedule {schedule.name!r} twice",
                    where=_where(rank, index),
                    hint="run each action once, on one rank",
                )
            seen.add(action)
    cells = [(s, m) for s in range(schedule.num_stages) for m in range(schedule.num_microbatches)]
    forwards = [ScheduleAction(ActionKind.FORWARD, *cell) for cell in cells]
    missing = [action for action in forwards if action not in seen]
    if schedule.trains:
        missing += [action for cell in cells for action in _missing_backward(schedule, seen, *cell)]
    if missing:
        listed = ", ".join(map(str, missing[:MAX_LISTED])) + (
            ", ..." if len(missing) > MAX_LISTED else ""
        )
        raise PlanError(
            f"schedule {schedule.name!r} lacks {len(missing)} actions: {listed}",
            why=f"each of {schedule.num_stages} stages runs each of {schedule.num_microbatches} "
            "microbatches",
            hint="add them on the ranks of their stages; a backward is one B, or an I and a W",
        )


def _check_sizes(schedule: Schedule) -> None:
    ranks = set(range(schedule.num_ranks))
    if schedule.num_microbatches < 1 or not schedule.placement or set(schedule.placement) != ranks:
        raise PlanError(
            f"schedule {schedule.name!r} of {brief(schedule.num_microbatches)} microbatches, "
            "with stages on the ranks "
            f"{sorted(set(schedule.placement))} and actions for {schedule.num_ranks} ranks",
            hint="give each rank a stage and its actions, and at least one microbatch",
        )
    if schedule.num_stages * schedule.num_microbatches > MOST_CELLS:
        raise PlanError(
            f"schedule {schedule.name!r} is too long",
            why=f"stages times microbatches are at most {MOST_CELLS:,}; it has "
            f"{schedule.num_stages} stages and "
            f"{brief(schedule.num_microbatches)} microbatches",
        )


def _check_place(schedule: Schedule, action: ScheduleAction, rank: int, index: int) -> None:
    if (
        not 0 <= action.stage < schedule.num_stages
        or not 0 <= action.microbatch < schedule.num_microbatches
    ):
        raise PlanError(
            f"{action} is out of range in schedule {schedule.name!r}",
            where=_where(rank, index),
            why=f"there are {schedule.num_stages} stages and {schedule.num_microbatches} "
            "microbatches, counted from 0",
        )
    if schedule.placement[action.stage] != rank:
        raise PlanError(
            f"{action} runs on the wrong rank in schedule {schedule.name!r}",
            where=_where(rank, index),
            why=f"stage {action.stage} is on rank {schedule.placement[action.stage]}",
            hint="move the action to that rank, or change the placement",
        )


def _missing_backward(
    schedule: Schedule, seen: set[ScheduleAction], stage: int, microbatch: int
) -> Iterable[ScheduleAction]:
    whole, inputs, weights = (
        ScheduleAction(kind, stage, microbatch)
        for kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    )
    # A backward is one action (B), or two (I, W); never both.
    parts = [part for part in (inputs, weights) if part in seen]
    if whole in seen and parts:
        raise PlanError(
            f"stage {stage} runs the backward of microbatch {microbatch} twice: {whole} and "
            f"{parts[0]}",
            where=f"schedule {schedule.name!r}, rank {schedule.placement[stage]}",
            hint="keep one B, or an I and a W",
        )
    if whole in seen or len(parts) == 2:
        return ()
    return [part for part in (inputs, weights) if part not in seen] if parts else [whole]


@checked
def check_in_flight(schedule: Schedule, max_in_flight: int) -> None:
    """Check that no rank holds more than ``max_in_flight`` activations, counted in (stage,
    microbatch).

    Raises:
        PlanError: names the first action after which a rank holds more.
    """
    if not schedule.trains:
        return
    for rank, actions in enumerate(schedule.actions):
        for index, (action, held) in enumerate(held_after(actions)):
            if held > max_in_flight:
                raise PlanError(
                    f"schedule {schedule.name!r} holds more than {max_in_flight} activations "
                    "at once",
                    where=_where(rank, index),
                    why=f"after {action} rank {rank} holds {held}",
                    hint="run backwards earlier on this rank, or choose '1f1b': its ranks hold no "
                    "more than there are ranks",
                )


def _where(rank: int, index: int) -> str:
    return f"rank {rank}, action {index}"
