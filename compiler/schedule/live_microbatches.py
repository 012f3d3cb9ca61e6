"""How many activations the ranks of a schedule hold at once. This depends on the order of actions
alone, not on times.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable

from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction

RELEASES = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT})
"""The actions after which nothing of a microbatch is held by the stage."""


KEPT = 64
"""How many schedules answers are kept for: a search asks of the same few, again and again."""


@functools.lru_cache(maxsize=KEPT)
def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most activations that each rank holds at once, counted in (stage, microbatch), from a
    forward to the last gradient of it.

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


@functools.lru_cache(maxsize=KEPT)
def held_together(
    schedule: Schedule, *, in_any_case: bool = False
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The numbers of microbatches that each rank holds at once, one number for each of its stages.

    There is an entry for every moment at which they are most: no other moment has as many of all
    stages. They are counted as in :func:`peak_in_flight`.

    ``in_any_case``: a lower bound of what any plan holds beside the gradients of all parameters.
    Then only moments count at which every stage of the rank has gradients, and the input gradient
    releases a microbatch, as in a stage that recomputes.
    """
    if not schedule.trains:
        return tuple(((0,) * len(schedule.stages_of(rank)),) for rank in range(schedule.num_ranks))
    releases = (
        frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT}) if in_any_case else RELEASES
    )
    found = []
    for rank, actions in enumerate(schedule.actions):
        held = dict.fromkeys(schedule.stages_of(rank), 0)
        without = set(held) if in_any_case else set()  # stages that have no gradients yet
        moments: dict[tuple[int, ...], None] = {}
        for action in actions:
            held[action.stage] += (action.kind is ActionKind.FORWARD) - (action.kind in releases)
            if action.kind in RELEASES:
                without.discard(action.stage)
            if not without:
                # A dict is a set that keeps its order, so that the result does not depend on
                # hashes.
                moments[tuple(held.values())] = None
        found.append(_largest(moments))
    return tuple(found)


def _largest(moments: Collection[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The moments that no other moment exceeds or equals in all counts."""
    largest: list[tuple[int, ...]] = []
    # What exceeds a moment has a larger sum, and so comes before it; and whatever is not among the
    # largest itself has one of these above it.
    for own in sorted(moments, key=sum, reverse=True):
        if not any(all(map(operator.ge, other, own)) for other in largest):
            largest.append(own)
    found = set(largest)
    return tuple(own for own in moments if own in found)
