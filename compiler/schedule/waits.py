"""What each action of a schedule waits for, and the order in which the ranks can then run: the one
model of execution.

The validator asks whether all ranks come to their end, the simulator when; both run the schedule
here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction

Position = tuple[int, int]
"""A rank and the index of one of its actions."""

Waits = list[list[list[Position]]]
"""The actions that each action of each rank waits for."""


def waits_of(schedule: Schedule, dataflow: Dataflow) -> Waits:
    """What each action of a complete schedule waits for.

    ====  ===============================================
    F     the activations it uses
    B, I  its forward and the gradients it uses
    W     its input gradient
    ====  ===============================================

    A rank runs its stages in order for each microbatch, ascending forward and descending backward
    (see ``dataflow.py``). Messages take no part: a send never waits, and a receive is posted ahead.
    """
    forward, input_gradient = _positions(schedule)
    previous, following = _neighbours(schedule)

    def waits(action: ScheduleAction) -> Iterator[Position]:
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            # A rank with stages 0 and 2 runs 0F0 before 2F0, whatever the order of its list.
            case ActionKind.FORWARD:
                for source in dataflow.sources[stage]:
                    yield forward[source, microbatch]
                if stage in previous:
                    yield forward[previous[stage], microbatch]
            case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
                yield forward[stage, microbatch]
                # The gradients of what this stage has sent: they come from the stages that read it.
                for source in dataflow.gradient_sources[stage]:
                    yield input_gradient[source, microbatch]
                if stage in following:
                    yield input_gradient[following[stage], microbatch]
            case ActionKind.WEIGHT_GRADIENT:
                yield input_gradient[stage, microbatch]

    return [[list(waits(action)) for action in actions] for actions in schedule.actions]


def run_order(schedule: Schedule, waits: Waits) -> list[Position]:
    """An order in which the ranks can run all actions together, each rank its own in their order.

    Raises:
        PlanError: the ranks wait for each other in a circle, which the error shows.
    """
    order: list[Position] = []
    counts = [0] * schedule.num_ranks
    waiting_for: list[list[int]] = [[] for _ in counts]
    awake = list(range(schedule.num_ranks))
    while awake:
        rank = awake.pop()
        while counts[rank] < len(waits[rank]):
            # One open wait is enough to sleep on: when it is over, the next one is looked for.
            blocking = _first_open(waits[rank][counts[rank]], counts)
            if blocking is not None:
                waiting_for[blocking[0]].append(rank)
                break
            order.append((rank, counts[rank]))
            counts[rank] += 1
            # Each rank is looked at again only when one that it waits for has moved on, so the work
            # is linear in the actions and waits.
            awake += waiting_for[rank]
            waiting_for[rank].clear()
    if len(order) < sum(map(len, waits)):
        raise _deadlock(schedule, waits, counts)
    return order


def _deadlock(schedule: Schedule, waits: Waits, counts: Sequence[int]) -> PlanError:
    """The error for ranks that are stuck after ``counts`` actions: one circle of ranks, what each
    is at and waits for.
    """
    import networkx  # only schedules that deadlock need it, and importing it takes a while

    # Every rank that is not done waits for an action of one other, so the edges hold a circle.
    waited: dict[int, Position] = {}
    for rank, count in enumerate(counts):
        if count < len(waits[rank]):
            wait = _first_open(waits[rank][count], counts)
            assert wait is not None
            waited[rank] = wait
    edges = [(rank, other) for rank, (other, _) in waited.items()]
    circle = [(rank, waited[rank]) for rank, _ in networkx.find_cycle(networkx.DiGraph(edges))]
    at = {rank: schedule.actions[rank][counts[rank]] for rank, _ in circle}
    names = [f"rank {rank} at {at[rank]} (action {counts[rank]})" for rank, _ in circle]
    reasons = [
        f"{at[rank]} on rank {rank} waits for {schedule.actions[other][i]}"
        for rank, (other, i) in circle
    ]
    rank, (other, index) = circle[-1]
    return PlanError(
        f"schedule {schedule.name!r} deadlocks: "
        f"{'a rank waits for itself' if len(circle) == 1 else 'ranks wait in a circle'}",
        where=" -> ".join([*names, f"rank {circle[0][0]}"]),
        why="; ".join(
            f"{reason}, which rank {wait[0]} runs after {at[wait[0]]}"
            for reason, (_, wait) in zip(reasons, circle, strict=True)
        ),
        hint=f"change the order of one of these ranks: on rank {other}, "
        f"{schedule.actions[other][index]} before {at[other]}",
    )


def _first_open(waits: list[Position], counts: Sequence[int]) -> Position | None:
    return next(((rank, index) for rank, index in waits if counts[rank] <= index), None)


def _positions(
    schedule: Schedule,
) -> tuple[dict[tuple[int, int], Position], dict[tuple[int, int], Position]]:
    """The positions of each forward, and of the action that makes the gradients of its inputs, both
    by stage and microbatch.
    """
    forward: dict[tuple[int, int], Position] = {}
    input_gradient: dict[tuple[int, int], Position] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind is ActionKind.FORWARD:
                forward[action.stage, action.microbatch] = rank, index
            elif action.kind is not ActionKind.WEIGHT_GRADIENT:
                input_gradient[action.stage, action.microbatch] = rank, index
    return forward, input_gradient


def _neighbours(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """The previous and the following stage on the same rank, for stages that have one."""
    following: dict[int, int] = {}
    for rank in range(schedule.num_ranks):
        following.update(itertools.pairwise(schedule.stages_of(rank)))
    return {after: before for before, after in following.items()}, following
