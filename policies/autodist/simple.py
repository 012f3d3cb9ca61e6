"""The plans of the simple policies on the meshes of a search, so that none of them is better than its answer.

``tp``, ``data``, ``pp`` and ``hybrid`` split dims by rule and cut stages between operators, where a search has blocks and a
model of their times and memory. On small models, or where memory binds, one of them may take less than all candidates; so they
are audited too, as far as they obey the user's constraints and their parts do not already take as long as the best plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from shardwright.compiler.cost.operators import op_time
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.outputs import drop_outputs
from shardwright.compiler.passes.stages import from_nothing
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
from shardwright.policies.partition import Balance
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.zero.settings import ReductionSettings

SIMPLE_SLACK = 0.95
"""Plans are audited whose parts take less than the best plan, and no more than the memory, after this factor: at a boundary
adapters may be saved.
"""

AXIS = "axis"
"""What the axis is called along which a rule is asked."""


@dataclass(frozen=True)
class Simple:
    """A plan, that of the ``whole`` model it was cut from, and what its parts take: ``least_s`` leaves out messages between
    stages, ``least_bytes`` all gradients, unless they are asked for, and what is held for a moment only.
    """

    plan: Plan
    whole: Plan
    pace: Pace
    least_s: float
    least_bytes: Callable[..., float] = field(repr=False, compare=False)

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
    rules: Rules | None = None,
) -> Iterator[Simple]:
    """What the simple policies make of so many positions of one mesh: the last axis splits the inner dims of the model and the
    one before it the batch, or inner dims too where those are short; of one axis, either. Meshes of more axes are none of
    theirs. Without what breaks the constraints.
    ``below_s``: placements that take longer are of no interest. ``rules``: those for the graph, shared by all meshes.
    """
    rules = rules or Rules(graph, setting.config)
    config = setting.config
    for placement in _placements(rules, mesh, space.constraints(mesh)):
        if _takes(placement, rules, setting) >= num_positions * below_s:
            continue
        plan = replace(placement, zero=units_of_storage(config), outputs=output_wishes(graph, config))
        plan = replace(plan, recompute=tuple(space.recompute or ()))
        walk = Walk(lower(graph, plan), setting)
        times = list(operator_times(walk).values())
        work_s = space.num_microbatches * sum(times)
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
                starts = space.stage_starts or rules.balance.starts(key)
            except PlanError:
                continue  # fewer places to cut than stages
            ranks = position_ranks(placement.mesh, num_positions, pp_place)
            splits = SCHEDULES[pace.schedule].splits_backward and not space.recompute and not walk.regions
            spans = _spans(walk, starts)
            least_s = _least_s(walk, times, schedule, spans, ranks, splits=splits)
            yield Simple(
                staged(plan, starts, num_positions, pace, space.num_microbatches, pp_place),
                plan,
                pace,
                least_s + _once_s(walk, schedule.placement, spans),
                partial(_least_bytes, walk, peak_in_flight(schedule), schedule.placement, spans),
            )


class Rules:
    """What the rules of the simple policies say of one graph, worked out once for all meshes."""

    def __init__(self, graph: PlannableGraph, config: ComputeConfig) -> None:
        self.graph, self._config = graph, config
        self._along: dict[tuple[str, int], Plan] = {}

    @cached_property
    def counted(self) -> Sequence[IROp]:
        """The operators whose time counts: those that are needed, but for what every stage makes for itself."""
        graph = drop_outputs(self.graph, output_wishes(self.graph, self._config))
        free = from_nothing(graph)
        return [op for op in graph.ops if op.name not in free]

    @cached_property
    def balance(self) -> Balance:
        """Where stages begin."""
        return Balance(self.graph)

    def plan(self, mesh: Mesh, way: Sequence[str]) -> Plan:
        """The whole model, where axes of a mesh split the batch or the inner dims. Raises :class:`PlanError` if one cannot."""
        builder, notes = self.graph.builder(mesh=dict(mesh.axes)), []
        for (axis, size), rule in zip(mesh.axes, way, strict=True):
            along = self._plan_along(rule, size)
            for op, assignment in along.strategies.items():
                builder.strategy(op, axis, assignment[AXIS])
            notes += [replace(note, axis=axis) for note in along.notes]
        return replace(builder.plan("autodist"), notes=tuple(notes))

    def pair(self, mesh: Mesh) -> Plan | None:
        """The same where both axes split inner dims; ``None`` where no dim is too short for one axis."""
        classes = choose_pair(self.graph, *(size for _, size in mesh.axes))
        if classes is None:
            return None
        builder = self.graph.builder(mesh=dict(mesh.axes))
        for axis, own in zip(mesh.names, classes, strict=True):
            split_dims(builder, axis, own)
        return builder.plan("autodist")

    def _plan_along(self, rule: str, size: int) -> Plan:
        """On a mesh of one axis."""
        if (rule, size) not in self._along:
            builder = self.graph.builder(mesh={AXIS: size})
            split_dims(builder, AXIS, batch_classes(self.graph) if rule == "batch" else choose_dims(self.graph, size))
            self._along[rule, size] = builder.plan("autodist")
        return self._along[rule, size]


def _takes(plan: Plan, rules: Rules, setting: Setting) -> float:
    """Seconds that the operators of a plan take alone, with the slack: less than with adapters between them."""
    hardware, times, ranks = setting.hardware, setting.times, setting.ranks
    calls = ((op, plan.assignment(op.name)) for op in rules.counted)
    each_s = sum(op_time(op, assignment, plan.mesh, hardware, times, ranks=ranks).total_s for op, assignment in calls)
    return SIMPLE_SLACK * setting.num_microbatches * each_s


def _placements(rules: Rules, mesh: Mesh, constraints: Constraints) -> Iterator[Plan]:
    """Of the whole model, with axes called after what they split, but for those that have a name."""
    graph, num_axes = rules.graph, len(mesh.axes)
    several: dict[int, list[tuple[str, ...]]] = {0: [()], 1: [("batch",), ("inner",)], 2: [("batch", "inner")]}
    ways: list[Callable[[], Plan | None]] = [partial(rules.plan, mesh, way) for way in several.get(num_axes, [])]
    ways += [partial(rules.pair, mesh)] if num_axes == 2 else []
    for make in ways:
        try:
            plan = make()
        except PlanError:
            continue  # no batch, or nothing to split into so many
        obeying = None if plan is None else constrained(plan, graph, constraints)
        if obeying is not None:
            yield named(obeying, split_dim_names(graph, obeying), kept=set(mesh.names) - set(AXIS_NAMES))


def _least_s(
    walk: Walk,
    seconds: Sequence[float],
    schedule: Schedule,
    spans: Sequence[range],
    ranks: Sequence[tuple[int, ...]],
    *,
    splits: bool,
) -> float:
    """The schedule with the times of its stages. ``seconds``: of operators, 0 where they do not count. ``ranks``: by position.
    ``splits``: backwards come in two parts.
    """
    times = []
    for own in spans:
        forward_s, backward_s = (sum(side[i] for i in own if seconds[i]) for side in (walk.forward_s, walk.backward_s))
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


def _least_bytes(
    walk: Walk, in_flight: Sequence[int], placement: Sequence[int], spans: Sequence[range], *, gradients: bool = False
) -> float:
    """What the fullest position holds when most is in flight; 0 where something is computed again. ``gradients``: with all of
    them, which are there unless most is in flight before the first backward only.

    ``in_flight``: by position, counted in stages and microbatches, of which some may be of its smallest stage.
    """
    if walk.regions or walk.program.plan.recompute or walk.setting.config.inference_only:
        return 0.0
    held = [0.0] * len(in_flight)
    kept: list[list[float]] = [[] for _ in in_flight]
    for position, own in zip(placement, spans, strict=True):
        inside = [each for each in walk.parameters if each.places[0] in own]
        held[position] += sum(each.held_bytes - (0.0 if gradients else each.gradient_bytes) for each in inside)
        kept[position].append(walk.kept.first(own.start, own.stop))
    return max(h + count * min(k) for h, count, k in zip(held, in_flight, kept, strict=True))
