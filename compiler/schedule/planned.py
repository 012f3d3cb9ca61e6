"""The schedule a plan asks for, and what crosses between the stages of its program."""

from __future__ import annotations

import itertools

from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.published import generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction, parse_actions


def planned_schedule(plan: Plan) -> Schedule:
    """What the plan says of the order: its own actions, or those of a published schedule."""
    if plan.actions:
        return by_hand(plan.actions)
    num_positions = len({stage.ranks for stage in plan.stages})
    return generate(
        plan.schedule, num_positions, plan.num_microbatches, len(plan.stages) // num_positions
    )


def schedule_of_step(plan: Plan, *, trains: bool) -> Schedule:
    """What a step runs: what the plan says, or where nothing is trained the forwards of its
    stages.
    """
    schedule = planned_schedule(plan)
    return schedule if trains else inference_like(schedule)


def inference_like(schedule: Schedule) -> Schedule:
    """All microbatches forward through a rank's first stage, then through its next one, on the
    placement of ``schedule``.
    """
    actions = []
    for rank in range(schedule.num_ranks):
        pairs = itertools.product(schedule.stages_of(rank), range(schedule.num_microbatches))
        actions.append(tuple(ScheduleAction(ActionKind.FORWARD, *pair) for pair in pairs))
    return Schedule(schedule.num_microbatches, schedule.placement, tuple(actions), "inference")


def by_hand(actions: tuple[str, ...]) -> Schedule:
    """A schedule from one text for each position. Which stages a position has, its actions tell."""
    rows = tuple(parse_actions(text) for text in actions)
    placement: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if placement.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"stage {action.stage} has actions on position {placement[action.stage]} "
                    f"and on position {rank}",
                    hint="a stage has one position",
                )
    if sorted(placement) != list(range(len(placement))):
        raise PlanError(
            "the stages of the actions are not numbered 0, 1, 2, ...",
            why=f"they are {sorted(placement)}",
        )
    # Holes in their numbers are found by validate, which tells what is missing.
    num_microbatches = 1 + max((action.microbatch for row in rows for action in row), default=-1)
    return Schedule(num_microbatches, tuple(placement[stage] for stage in sorted(placement)), rows)


def dataflow_of(program: PipelineProgram, num_stages: int) -> Dataflow:
    """What crosses between the stages of one body."""
    pairs = {(crossing.source, crossing.target) for crossing in program.crossings}
    with_gradient = {(c.source, c.target) for c in program.crossings if c.value.takes_gradient}
    consumers: dict[int, list[int]] = {}
    for source, target in sorted(pairs):
        consumers.setdefault(source, []).append(target)
    return Dataflow.of(num_stages, consumers, pairs - with_gradient)
