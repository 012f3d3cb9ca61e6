"""What each action of a schedule waits for, and the order in which the ranks can then run: the one model of execution.

The validator asks whether all ranks come to their end, the simulator when; both run the schedule here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import Enum

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule import ActionKind, Message, ScheduleAction, message_of

Position = tuple[int, int]
"""A rank and the index of one of its actions."""

Wait = tuple[int, int, int]
"""``(rank, index, count)``: wait for the action at ``index`` of ``rank``, that is until that rank has run ``count`` actions.

``count`` is ``index + 1`` to wait until the action is done, ``index`` to wait until the rank has come to it.
"""

Waits = list[list[list[Wait]]]
"""For each rank and action, all that it waits for."""


class Transport(Enum):
    """How sends and receives wait for each other, each kind more strictly than the one before."""

    BUFFERED = "buffered"
    """A SEND never waits, nor does a RECV; the action that uses a message waits for it. What our executor does."""
    RENDEZVOUS = "rendezvous"
    """As buffered, but a SEND waits until its RECV is posted: no room on the way."""
    BLOCKING = "blocking"
    """A SEND and its RECV wait for each other, as with blocking calls."""


class Positions:
    """Where in a schedule everything is made that others wait for."""

    def __init__(self, schedule: Schedule) -> None:
        self.forward: dict[tuple[int, int], Position] = {}
        self.input_gradient: dict[tuple[int, int], Position] = {}
        self.weight_gradient: dict[tuple[int, int], Position] = {}
        self.send: dict[Message, Position] = {}
        self.recv: dict[Message, Position] = {}
        for rank, actions in enumerate(schedule.actions):
            for index, action in enumerate(actions):
                self._add(action, (rank, index))

    def _add(self, action: ScheduleAction, at: Position) -> None:
        cell = (action.stage, action.microbatch)
        match action.kind:
            case ActionKind.FORWARD:
                self.forward[cell] = at
            case ActionKind.INPUT_GRADIENT:
                self.input_gradient[cell] = at
            case ActionKind.WEIGHT_GRADIENT:
                self.weight_gradient[cell] = at
            case ActionKind.BACKWARD:
                self.input_gradient[cell] = self.weight_gradient[cell] = at
            case ActionKind.SEND:
                self.send[message_of(action)] = at
            case ActionKind.RECV:
                self.recv[message_of(action)] = at

    def producer(self, message: Message) -> Position:
        """Where the content of ``message`` is made."""
        what, sender, _, microbatch = message
        return (self.forward if what == "activations" else self.input_gradient)[sender, microbatch]


def waits_of(schedule: Schedule, dataflow: Dataflow, transport: Transport = Transport.BUFFERED) -> Waits:
    """What each action of a complete schedule waits for.

    ========  =======================================================================================================
    F         the activations it uses
    B, I      its forward and the gradients it uses
    W         its input gradient
    REDUCE    all gradients of the stage's parameters
    SEND      the action that makes what it sends, and its RECV where ``transport`` says so
    RECV      its SEND where ``transport`` says so
    ========  =======================================================================================================

    A rank runs its stages in order for each microbatch, ascending forward and descending backward (see
    :mod:`shardwright.compiler.schedule.dataflow`). In a schedule without messages, what a stage makes is everywhere at once.
    """
    at = Positions(schedule)
    previous, following = _neighbours(schedule)
    with_messages = schedule.has_messages

    def arrival(message: Message) -> Iterator[Wait]:
        _, sender, receiver, _ = message
        if with_messages and schedule.placement[sender] != schedule.placement[receiver]:
            yield _done(at.recv[message])
            yield _done(at.send[message])
        else:
            yield _done(at.producer(message))

    def waits(action: ScheduleAction) -> Iterator[Wait]:
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case ActionKind.FORWARD:
                for source in dataflow.sources[stage]:
                    yield from arrival(("activations", source, stage, microbatch))
                if stage in previous:
                    yield _done(at.forward[previous[stage], microbatch])
            case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
                yield _done(at.forward[stage, microbatch])
                for source in dataflow.gradient_sources[stage]:
                    yield from arrival(("gradients", source, stage, microbatch))
                if stage in following:
                    yield _done(at.input_gradient[following[stage], microbatch])
            case ActionKind.WEIGHT_GRADIENT:
                yield _done(at.input_gradient[stage, microbatch])
            case ActionKind.REDUCE:
                yield from (_done(at.weight_gradient[stage, each]) for each in range(schedule.num_microbatches))
            case ActionKind.SEND:
                message = message_of(action)
                yield _done(at.producer(message))
                if transport is not Transport.BUFFERED:
                    yield _done(at.recv[message])
            case ActionKind.RECV:
                if transport is Transport.BLOCKING:  # both ranks are there then, and the SEND follows the RECV
                    rank, index = at.send[message_of(action)]
                    yield (rank, index, index)

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
            blocking = _first_open(waits[rank][counts[rank]], counts)
            if blocking is not None:
                waiting_for[blocking[0]].append(rank)
                break
            order.append((rank, counts[rank]))
            counts[rank] += 1
            awake += waiting_for[rank]
            waiting_for[rank].clear()
    if len(order) < sum(map(len, waits)):
        raise _deadlock(schedule, waits, counts)
    return order


def _deadlock(schedule: Schedule, waits: Waits, counts: Sequence[int]) -> PlanError:
    """The error for ranks that are stuck after ``counts`` actions: one circle of ranks, what each is at and waits for."""
    rank = next(rank for rank, count in enumerate(counts) if count < len(waits[rank]))
    path: list[tuple[int, Wait]] = []
    while all(rank != seen for seen, _ in path):
        wait = _first_open(waits[rank][counts[rank]], counts)
        assert wait is not None
        path.append((rank, wait))
        rank = wait[0]
    circle = path[[seen for seen, _ in path].index(rank) :]
    at = {rank: schedule.actions[rank][counts[rank]] for rank, _ in circle}
    names = [f"rank {rank} at {at[rank]} (action {counts[rank]})" for rank, _ in circle]
    reasons = [f"{at[rank]} on rank {rank} waits for {schedule.actions[other][i]}" for rank, (other, i, _) in circle]
    rank, (other, index, _) = circle[-1]
    return PlanError(
        f"schedule {schedule.name!r} deadlocks: {'a rank waits for itself' if len(circle) == 1 else 'ranks wait in a circle'}",
        where=" -> ".join([*names, f"rank {circle[0][0]}"]),
        why="; ".join(
            f"{reason}, which rank {wait[0]} runs after {at[wait[0]]}"
            for reason, (_, wait) in zip(reasons, circle, strict=True)
        ),
        hint=f"change the order of one of these ranks: on rank {other}, {schedule.actions[other][index]} before {at[other]}",
    )


def _first_open(waits: list[Wait], counts: Sequence[int]) -> Wait | None:
    return next((wait for wait in waits if counts[wait[0]] < wait[2]), None)


def _done(at: Position) -> Wait:
    return (*at, at[1] + 1)


def _neighbours(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """For stages that have one: the previous and the following stage of the same rank."""
    following: dict[int, int] = {}
    for rank in range(schedule.num_ranks):
        following.update(itertools.pairwise(schedule.stages_of(rank)))
    return {after: before for before, after in following.items()}, following
