"""The plans of the simple policies on the meshes of a search, so that none of them is better than its answer.

``tp``, ``data``, ``pp`` and ``hybrid`` split dims by rule and cut stages between operators, where a search has blocks and a
model of their times and memory. On small models, or where memory binds, one of them may take less than all candidates; so they
are audited too, as far as their parts do not already take as long as the best plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.compiler.schedule.generate import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.candidates import AXIS_NAMES, Pace, named, staged
from shardwright.policies.autodist.space import Space
from shardwright.policies.autodist.stages.blocks import operator_times
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.choice import choose_dims
from shardwright.policies.data import batch_classes
from shardwright.policies.partition import stage_starts
from shardwright.policies.splits import split_dims
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh

SIMPLE = ", as a simple policy has it"
"""In titles."""

SIMPLE_SLACK = 0.95
"""Plans are audited whose parts take less than the best plan, after this factor: at a boundary adapters may be saved."""


@dataclass(frozen=True)
class Simple:
    """A plan, that of the ``whole`` model it was cut from, and what its parts take: ``least_s`` leaves out messages between
    stages and what comes once per step.
    """

    plan: Plan
    whole: Plan
    pace: Pace
    least_s: float


def simple_plans(
    graph: PlannableGraph, mesh: Mesh, paces: Sequence[Pace], num_positions: int, pp_place: int, space: Space, setting: Setting
) -> Iterator[Simple]:
    """What the simple policies make of so many positions of one mesh: the last axis splits the inner dims of the model and the
    one before it the batch; of one axis, either. Meshes of more axes are none of theirs.
    """
    for placement in _placements(graph, mesh):
        config = setting.config
        plan = replace(placement, zero=units_of_storage(config), outputs=output_wishes(graph, config))
        plan = replace(plan, recompute=tuple(space.recompute or ()))
        walk = Walk(lower(graph, plan), setting)
        for pace in paces:
            if not pace.schedule:
                yield Simple(plan, plan, pace, space.num_microbatches * sum(operator_times(walk).values()))
                continue
            schedule = generate(pace.schedule, num_positions, space.num_microbatches, pace.chunks)
            try:
                starts = space.stage_starts or stage_starts(graph, schedule.placement)
            except PlanError:
                continue  # fewer places to cut than stages
            least_s = _least_s(walk, schedule, starts, splits_backward=SCHEDULES[pace.schedule].splits_backward)
            yield Simple(staged(plan, starts, num_positions, pace, space.num_microbatches, pp_place), plan, pace, least_s)


def _placements(graph: PlannableGraph, mesh: Mesh) -> Iterator[Plan]:
    """Of the whole model, with axes called after what they split."""
    rules: dict[str, Callable[[int], set[int]]] = {
        "batch": lambda size: batch_classes(graph),
        "inner": lambda size: choose_dims(graph, size),
    }
    several: dict[int, list[tuple[str, ...]]] = {0: [()], 1: [("batch",), ("inner",)], 2: [("batch", "inner")]}
    ways = several.get(len(mesh.axes), [])
    for way in ways:
        builder = graph.builder(mesh=dict(mesh.axes))
        try:
            for (axis, size), rule in zip(mesh.axes, way, strict=True):
                split_dims(builder, axis, rules[rule](size))
            plan = builder.plan("autodist")
        except PlanError:
            continue  # no batch, or nothing to split into so many
        yield named(plan, split_dim_names(graph, plan)) if mesh.names[:1] == AXIS_NAMES[:1] else plan


def _least_s(walk: Walk, schedule: Schedule, starts: Sequence[str], *, splits_backward: bool) -> float:
    """The schedule with the times of its stages; where backwards come in two parts, the work of the position with most."""
    ops = walk.program.graph.ops
    place = {op.name: index for index, op in enumerate(ops)}
    counted = [0.0 if seconds == 0.0 else 1.0 for seconds in operator_times(walk).values()]
    times = []
    for start, stop in itertools.pairwise([0, *(place[name] for name in starts), len(ops)]):
        own = range(start, stop)
        forward, backward = (sum(counted[i] * side[i] for i in own) for side in (walk.forward_s, walk.backward_s))
        times.append(StageTimes(forward, backward / 2, backward / 2))
    if not splits_backward:
        return simulate(schedule, times).makespan_s
    work = [0.0] * schedule.num_ranks
    for position, time in zip(schedule.placement, times, strict=True):
        work[position] += schedule.num_microbatches * (time.forward_s + time.input_gradient_s + time.weight_gradient_s)
    return max(work)
