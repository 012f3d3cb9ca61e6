"""From an order of computation to all that each rank does: messages between ranks, and the end of each stage's gradients.

The order of messages comes from one run of the schedule with the times that papers assume. A message leaves when its
action ends, and its SEND follows this action directly. Its RECV stands where the receiving rank is at that moment. So the
lists of all ranks are cut from one sequence in which each SEND has its RECV beside it, which is why they cannot deadlock,
whatever the real times are and even if both ends wait for each other (``Transport.BLOCKING``). Receives of a channel are in
the order of its sends by construction.

Posted ahead, a RECV moves to before the action that the receiving rank is busy with when the message leaves: the buffer is
there when the message comes, so that it travels while the rank computes. Posting earlier cannot block anybody as long as
posting does not wait.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import replace

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.memory import RELEASES
from shardwright.compiler.schedule.schedule import RankActions, Schedule
from shardwright.compiler.schedule.simulate import Timeline, simulate
from shardwright.compiler.schedule.validate import messages_of
from shardwright.compiler.schedule.waits import Positions
from shardwright.runtime.schedule import ActionKind, Message, ScheduleAction


def communicate(schedule: Schedule, dataflow: Dataflow | None = None, *, posted_ahead: bool = True) -> Schedule:
    """``schedule`` with SEND and RECV for all that crosses ranks, and a REDUCE after the last gradient of each stage.

    Args:
        schedule: a valid schedule; messages that it has already are derived anew.
        dataflow: which stages feed which; each the next one if not given.
        posted_ahead: post receives early enough for messages to travel while ranks compute. Needs receives that do not wait.

    Raises:
        PlanError: the schedule deadlocks.
    """
    schedule = schedule.compute_only()
    dataflow = Dataflow.chain(schedule.num_stages) if dataflow is None else dataflow
    timeline = simulate(schedule, dataflow=dataflow)
    gaps = _message_gaps(timeline, dataflow, posted_ahead)
    return replace(schedule, actions=tuple(_woven(rank, schedule, gaps[rank]) for rank in range(schedule.num_ranks)))


def _message_gaps(timeline: Timeline, dataflow: Dataflow, posted_ahead: bool) -> list[list[list[ScheduleAction]]]:
    """For each rank, the messages before each of its actions and after the last one."""
    schedule = timeline.schedule
    positions = Positions(schedule)
    starts = [[span.start_s for span in spans] for spans in timeline.spans]
    ends = [[span.end_s for span in spans] for spans in timeline.spans]

    def leaves(message: Message) -> tuple[float, Message]:
        rank, index = positions.producer(message)
        return ends[rank][index], message

    gaps: list[list[list[ScheduleAction]]] = [[[] for _ in range(len(spans) + 1)] for spans in timeline.spans]
    for left_s, message in sorted(map(leaves, messages_of(schedule, dataflow))):
        what, sender, receiver, microbatch = message
        rank, index = positions.producer(message)
        gaps[rank][index + 1].append(ScheduleAction(ActionKind.SEND, sender, microbatch, receiver, what))
        rank = schedule.placement[receiver]
        gap = bisect_left(ends[rank] if posted_ahead else starts[rank], left_s)
        gaps[rank][gap].append(ScheduleAction(ActionKind.RECV, receiver, microbatch, sender, what))
    if posted_ahead:  # a SEND may wait for its RECV, so the RECV of the other direction goes first
        for gap_messages in itertools.chain.from_iterable(gaps):
            gap_messages.sort(key=lambda action: action.kind is ActionKind.SEND)
    return gaps


def _woven(rank: int, schedule: Schedule, gaps: list[list[ScheduleAction]]) -> RankActions:
    """The actions of ``rank`` with the messages of its gaps, and a REDUCE after each stage's last gradient."""
    last = {action.stage: index for index, action in enumerate(schedule.actions[rank]) if action.kind in RELEASES}
    woven = list(gaps[0])
    for index, action in enumerate(schedule.actions[rank]):
        woven += [action, *gaps[index + 1]]
        if last.get(action.stage) == index:
            woven.append(ScheduleAction(ActionKind.REDUCE, action.stage, action.microbatch))
    return tuple(woven)
