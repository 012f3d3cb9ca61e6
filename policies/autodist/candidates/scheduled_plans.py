"""Schedules by name with the stages of each position, and the plan that one makes of a model.

Example: on two positions ``1f1b_interleaved`` with two chunks has the stages 0, 1, 2 and 3 on the
positions 0, 1, 0 and 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.policies.autodist.candidates.meshes import position_ranks, with_pp
from shardwright.runtime.errors import PlanError

INTERLEAVED = "1f1b_interleaved"
"""The schedule that takes any number of stages on a position."""

MOST_CHUNKS = 4
"""How many stages on a position a schedule that takes any number is tried with at most."""


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule by name with the stages that each position runs."""

    name: str
    chunks: int


def named_schedules(
    num_positions: int,
    num_microbatches: int,
    schedules: Sequence[str],
    chunks: int | None,
    most: int,
) -> list[NamedSchedule]:
    """The schedules that work with these numbers, those first with the fewest stages on a position:
    they take the least time to cut and to simulate. ``chunks``: only that many; ``most``: stages
    that the model can have.
    """
    found: list[NamedSchedule] = []
    for name in schedules:
        method = SCHEDULES[name]
        upper = method.max_chunks or max(method.min_chunks, MOST_CHUNKS)
        for count in range(method.min_chunks, upper + 1):
            if (chunks is not None and count != chunks) or num_positions * count > most:
                continue
            # The number of microbatches is given, and some schedules need another.
            if works(NamedSchedule(name, count), num_positions, num_microbatches):
                found.append(NamedSchedule(name, count))
    return sorted(found, key=lambda named_schedule: named_schedule.chunks)


def works(named_schedule: NamedSchedule, num_positions: int, num_microbatches: int) -> bool:
    """Whether a schedule works with these numbers."""
    if not named_schedule.name:
        return True
    method = SCHEDULES[named_schedule.name]
    with contextlib.suppress(PlanError):
        method.check(num_positions, num_microbatches, named_schedule.chunks)
        return True
    return False


def staged(
    whole: Plan,
    starts: Sequence[str],
    num_positions: int,
    named_schedule: NamedSchedule,
    num_microbatches: int,
    pp_place: int = 0,
) -> Plan:
    """A plan of the whole model on the mesh of a stage, dealt out over pipeline positions on a
    ``pp`` axis, which stands before axis number ``pp_place`` of the mesh.

    ``starts``: the first operators of stages 1, 2, ...
    """
    schedule = generate(named_schedule.name, num_positions, num_microbatches, named_schedule.chunks)
    inner = whole.mesh
    # The ranks of each position; ``placement`` says which position runs a stage.
    ranks = position_ranks(inner, num_positions, pp_place)
    stages = tuple(
        StagePlan(first, inner, ranks[schedule.placement[index]])
        for index, first in enumerate(["", *starts])
    )
    return replace(
        whole,
        mesh=with_pp(inner, num_positions, pp_place),
        stages=stages,
        schedule=named_schedule.name,
        num_microbatches=num_microbatches,
    )
