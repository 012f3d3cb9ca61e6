"""The plans of the simple policies on the meshes of a search, so that none of them is better than its answer.

``tp``, ``data``, ``pp`` and ``hybrid`` split dims by rule and cut stages between operators, where a search has blocks and a
model of their times and memory. On small models, or where memory binds, one of them may take less than all candidates; so they
are audited too, as far as they obey the user's constraints and their parts do not already take as long as the best plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.compiler.schedule.generate import SCHEDULES, generate
from shardwright.compiler.schedule.memory import peak_in_flight
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.sharing import SharedMachines
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.candidates import AXIS_NAMES, Pace, named, position_ranks, staged
from shardwright.policies.autodist.placement.constraints import Constraints, constrained
from shardwright.policies.autodist.space import Space
from shardwright.policies.autodist.stages.blocks import operator_times
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.choice import choose_dims, choose_pair
from shardwright.policies.data import batch_classes
from shardwright.policies.partition import stage_starts
from shardwright.policies.splits import split_dims
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.zero.settings import ReductionSettings

SIMPLE_SLACK = 0.95
"""Plans are audited whose parts take less than the best plan, and no more than the memory, after this factor: at a boundary
adapters may be saved.
"""


@dataclass(frozen=True)
class Simple:
    """A plan, that of the ``whole`` model it was cut from, and what its parts take: ``least_s`` leaves out messages between
    stages, ``least_bytes`` all gradients, and what is held for a moment only.
    """

    plan: Plan
    whole: Plan
    pace: Pace
    least_s: float
    least_bytes: Callable[[], float] = field(repr=False, compare=False)

    def may_fit(self, memory_bytes: float) -> bool:
        """Whether so much memory may be enough."""
        return SIMPLE_SLACK * self.least_bytes() <= memory_bytes


def simple_plans(
    graph: PlannableGraph,
    mesh: Mesh,
    paces: Sequence[Pace],
    num_positions: int,
    pp_place: int,
    space: Space,
    setting: Setting,
    below_s: float = float("inf"),
    known_starts: dict[tuple[int, ...], list[str]] | None = None,
) -> Iterator[Simple]:
    """What the simple policies make of so many positions of one mesh: the last axis splits the inner dims of the model and the
    one before it the batch, or inner dims too where those are short; of one axis, either. Meshes of more axes are none of
    theirs. Without what breaks the constraints.
    ``below_s``: placements that take longer are of no interest. ``known_starts``: takes in where stages begin, by what position
    runs each, for other meshes.
    """
    found = {} if known_starts is None else known_starts
    for placement in _placements(graph, mesh, space.constraints(mesh)):
        config = setting.config
        plan = replace(placement, zero=units_of_storage(config), outputs=output_wishes(graph, config))
        plan = replace(plan, recompute=tuple(space.recompute or ()))
        walk = Walk(lower(graph, plan), setting)
        work_s = space.num_microbatches * sum(operator_times(walk).values())
        if SIMPLE_SLACK * work_s >= num_positions * below_s:
            continue
        for pace in paces:
            if not pace.schedule:
                whole = [range(len(graph.ops))]
                yield Simple(plan, plan, pace, work_s + _once_s(walk, [0], whole), partial(_least_bytes, walk, [1], [0], whole))
                continue
            schedule = generate(pace.schedule, num_positions, space.num_microbatches, pace.chunks)
            key = tuple(schedule.placement)
            try:
                starts = space.stage_starts or found.setdefault(key, found.get(key) or stage_starts(graph, key))
            except PlanError:
                continue  # fewer places to cut than stages
            ranks = position_ranks(placement.mesh, num_positions, pp_place)
            splits = SCHEDULES[pace.schedule].splits_backward and not space.recompute and not walk.regions
            spans = _spans(walk, starts)
            least_s = _least_s(walk, schedule, spans, ranks, splits=splits)
            yield Simple(
                staged(plan, starts, num_positions, pace, space.num_microbatches, pp_place),
                plan,
                pace,
                least_s + _once_s(walk, schedule.placement, spans),
                partial(_least_bytes, walk, peak_in_flight(schedule), schedule.placement, spans),
            )


def _placements(graph: PlannableGraph, mesh: Mesh, constraints: Constraints) -> Iterator[Plan]:
    """Of the whole model, with axes called after what they split, but for those that have a name."""
    sizes = [size for _, size in mesh.axes]
    several: dict[int, list[Callable[[], list[set[int]] | None]]] = {
        0: [list],
        1: [lambda: [batch_classes(graph)], lambda: [choose_dims(graph, sizes[0])]],
        2: [lambda: [batch_classes(graph), choose_dims(graph, sizes[1])], lambda: choose_pair(graph, sizes[0], sizes[1])],
    }
    for chosen in several.get(len(sizes), []):
        builder = graph.builder(mesh=dict(mesh.axes))
        try:
            classes = chosen()
            if classes is None:
                continue
            for axis, own in zip(mesh.names, classes, strict=True):
                split_dims(builder, axis, own)
            plan = builder.plan("autodist")
        except PlanError:
            continue  # no batch, or nothing to split into so many
        obeying = constrained(plan, graph, constraints)
        if obeying is not None:
            yield named(obeying, split_dim_names(graph, obeying), kept=set(mesh.names) - set(AXIS_NAMES))


def _least_s(
    walk: Walk, schedule: Schedule, spans: Sequence[range], ranks: Sequence[tuple[int, ...]], *, splits: bool
) -> float:
    """The schedule with the times of its stages. ``ranks``: by position. ``splits``: backwards come in two parts."""
    counted = [0.0 if seconds == 0.0 else 1.0 for seconds in operator_times(walk).values()]
    times = []
    for own in spans:
        forward_s, backward_s = (sum(counted[i] * side[i] for i in own) for side in (walk.forward_s, walk.backward_s))
        parts = walk.backward_parts(own.start, own.stop) if splits and own.start else (0.0, backward_s)
        times.append(StageTimes(forward_s, *parts, backward_s))
    config, sharing = walk.setting.config, walk.setting.hardware.device.sharing
    machines = SharedMachines.of(sharing, ranks, config.plan_ngpus, config.num_units) if sharing else None
    return simulate(schedule, times, machines=machines).makespan_s


def _spans(walk: Walk, starts: Sequence[str]) -> list[range]:
    """The places of every stage."""
    ops = walk.program.graph.ops
    place = {op.name: index for index, op in enumerate(ops)}
    return [range(*pair) for pair in itertools.pairwise([0, *(place[name] for name in starts), len(ops)])]


def _once_s(walk: Walk, placement: Sequence[int], spans: Sequence[range]) -> float:
    """What comes after the last backward, on the position where it is least; nothing where it may run beside a pass."""
    config = walk.setting.config
    settings = ReductionSettings.of(config, config.num_units)
    if settings.asynchronous or settings.overlaps_parameters:
        return 0.0
    once = dict.fromkeys(placement, 0.0)
    for position, own in zip(placement, spans, strict=True):
        once[position] += sum(held.once_s for held in walk.parameters if held.places[0] in own)
    return min(once.values())


def _least_bytes(walk: Walk, in_flight: Sequence[int], placement: Sequence[int], spans: Sequence[range]) -> float:
    """What the fullest position holds when most is in flight, without gradients; 0 where something is computed again.

    ``in_flight``: by position, counted in stages and microbatches, of which some may be of its smallest stage.
    """
    if walk.regions or walk.program.plan.recompute or walk.setting.config.inference_only:
        return 0.0
    held = [0.0] * len(in_flight)
    kept: list[list[float]] = [[] for _ in in_flight]
    for position, own in zip(placement, spans, strict=True):
        held[position] += sum(each.held_bytes - each.gradient_bytes for each in walk.parameters if each.places[0] in own)
        kept[position].append(walk.kept.first(own.start, own.stop))
    return max(h + count * min(k) for h, count, k in zip(held, in_flight, kept, strict=True))
