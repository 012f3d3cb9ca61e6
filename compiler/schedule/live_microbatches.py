"""How many activations the ranks of a schedule hold at once: this depends on the order alone, not
on times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.schedule import ActionKind, ScheduleAction

RELEASES = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT})
"""The actions after which nothing of a microbatch is held by the stage."""


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most that each rank holds at once of activations between their forward and their last
    gradient, counted in (stage, microbatch).

    A split backward is taken to release nothing before its weight gradient. Without backward
    nothing is held.
    """
    if not schedule.trains:
        return (0,) * schedule.num_ranks
    return tuple(
        max((held for _, held in held_after(actions)), default=0) for actions in schedule.actions
    )


def held_after(actions: Iterable[ScheduleAction]) -> Iterable[tuple[ScheduleAction, int]]:
    """Each action of a rank and how many activations the rank holds right after it."""
    held = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            held += 1
        elif action.kind in RELEASES:
            held -= 1
        yield action, held


def held_together(
    schedule: Schedule, *, in_any_case: bool = False
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """By rank, how many microbatches it holds at once of each of its stages, in their order: at
    every moment at which no other has as many of all of them. As :func:`peak_in_flight` counts.

    ``in_any_case``: no more than any plan holds beside the gradients of all its parameters: only of
    moments at which every stage of the rank has gradients; and with its input gradient a microbatch
    is gone, as it is where a stage computes again.
    """
    if not schedule.trains:
        return tuple(((0,) * len(schedule.stages_of(rank)),) for rank in range(schedule.num_ranks))
    releases = (
        frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT}) if in_any_case else RELEASES
    )
    found = []
    for rank, actions in enumerate(schedule.actions):
        held = dict.fromkeys(schedule.stages_of(rank), 0)
        without = set(held) if in_any_case else set()  # gradients so far
        moments: dict[tuple[int, ...], None] = {}
        for action in actions:
            held[action.stage] += (action.kind is ActionKind.FORWARD) - (action.kind in releases)
            if action.kind in RELEASES:
                without.discard(action.stage)
            if not without:
                moments[tuple(held.values())] = None
        found.append(_largest(moments))
    return tuple(found)


def _largest(moments: Collection[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those that no other exceeds or equals in all its counts."""
    return tuple(
        own
        for own in moments
        if not any(o != own and all(a >= b for a, b in zip(o, own, strict=True)) for o in moments)
    )
