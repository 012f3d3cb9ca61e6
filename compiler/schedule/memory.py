"""How many activations each rank of a schedule holds at most: this depends on the order alone, not on times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.schedule import ActionKind, ScheduleAction

RELEASES = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT})
"""The actions after which nothing of a microbatch is held by the stage."""


def peak_in_flight(schedule: Schedule, stage_size: Sequence[int] | None = None) -> tuple[int, ...]:
    """The most that each rank holds at once of activations between their forward and their last gradient.

    ``stage_size`` is what one microbatch's activations of each stage take, in bytes for instance. Without it they count 1 each,
    and the result is a number of (stage, microbatch). A split backward is taken to release nothing before its weight
    gradient. Without backward nothing is held.
    """
    if not schedule.trains:
        return (0,) * schedule.num_ranks
    sizes = (1,) * schedule.num_stages if stage_size is None else stage_size
    return tuple(max((held for _, held in held_after(actions, sizes)), default=0) for actions in schedule.actions)


def held_after(actions: Iterable[ScheduleAction], stage_size: Sequence[int]) -> Iterable[tuple[ScheduleAction, int]]:
    """Each action of a rank and what the rank holds right after it."""
    held = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            held += stage_size[action.stage]
        elif action.kind in RELEASES:
            held -= stage_size[action.stage]
        yield action, held
