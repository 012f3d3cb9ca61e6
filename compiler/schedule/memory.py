"""How many activations each rank of a schedule holds at most: this depends on the order alone, not on times."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.schedule import ActionKind, ScheduleAction

RELEASES = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT})
"""The actions after which nothing of a microbatch is held by the stage."""


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most that each rank holds at once of activations between their forward and their last gradient, counted in (stage,
    microbatch).

    A split backward is taken to release nothing before its weight gradient. Without backward nothing is held.
    """
    if not schedule.trains:
        return (0,) * schedule.num_ranks
    return tuple(max((held for _, held in held_after(actions)), default=0) for actions in schedule.actions)


def held_after(actions: Iterable[ScheduleAction]) -> Iterable[tuple[ScheduleAction, int]]:
    """Each action of a rank and how many activations the rank holds right after it."""
    held = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            held += 1
        elif action.kind in RELEASES:
            held -= 1
        yield action, held
