"""The plans of the simple policies on the meshes of a search, so that none of them is better than
its answer.

``tp``, ``data``, ``ep``, ``cp``, ``tensor``, ``pp`` and ``hybrid`` split dims by rule, and cut
stages with the code of a search. One of their plans may still take less than all candidates:

- time ends a search before it has placed the model on a mesh;
- memory binds, and their placement holds less than those that the search has chosen before it cuts
  stages: it allows a schedule that these have no memory for;
- an axis deals positions in zigzag, as ``cp`` lets it where attention is causal. A search places
  the model on meshes whose axes give each rank one piece;
- parameters and activations are cut over several axes and gathered for each product, as ``tensor``
  does in its modes 2d, 2.5d and 3d: a search stores what operators read.

So they are audited too, as far as they obey the user's constraints and their parts do not already
take as long as the best plan.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import Assignment, Strategy, factor_axes
from shardwright.compiler.passes.dim_names import EXPERTS
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.outputs import training_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.compiler.schedule.live_microbatches import peak_in_flight
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.shared_cores import SharedMachines
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.candidates.axis_roles import named, renamed
from shardwright.policies.autodist.candidates.mesh_requests import around_attention, every_layer
from shardwright.policies.autodist.candidates.meshes import AXIS_NAMES, position_ranks
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.placement.constraints import Constraints, constrained
from shardwright.policies.autodist.stages.block_costs import operator_times
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import Chooser
from shardwright.policies.context_axes import ContextAxis, split_context, turns_of_axes
from shardwright.policies.partition import cut as cut_into_stages
from shardwright.policies.partition import with_regions
from shardwright.policies.sequences import Positions, sequence_classes
from shardwright.policies.splits import InsideExperts, split_by_rule, split_dims
from shardwright.policies.tensor import gathers_in_mode, split_in_mode
from shardwright.policies.tensor_modes import AXES as MODE_AXES
from shardwright.policies.tensor_modes import Mode
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.zero.settings import ReductionSettings

SIMPLE_SLACK = 0.95
"""Plans are audited whose parts take less than the best plan, and no more than the memory, after
this factor: at a boundary adapters may be saved.
"""

WITH_POSITIONS = "inner, and positions"
"""A rule: an axis splits inner dims, and what it would leave whole along the sequence."""

BESIDE: Mapping[str | None, str] = {
    None: "",
    "batch": " with data",
    "inner": " with tp",
    WITH_POSITIONS: " with tp (sequence_parallel)",
}
"""Which policy splits by a rule what another axis leaves to it, in titles."""

AXIS = "axis"
"""What the axis is called along which a rule is asked."""


@dataclass(frozen=True)
class SimplePlan:
    """A plan, that of the ``whole`` model it was cut from, and what its parts take: ``least_s``
    leaves out messages between stages, ``least_bytes`` all gradients, unless they are asked for,
    and what is held for a moment only. ``again``, ``whose``: in words, what it computes again
    beside what the user says, and whose plan it is.
    """

    plan: Plan
    whole: Plan
    again: str
    whose: str
    named_schedule: NamedSchedule
    least_s: float
    least_bytes: Callable[..., float] = field(repr=False, compare=False)

    def may_fit(self, memory_bytes: float) -> bool:
        """Whether so much memory may be enough."""
        return SIMPLE_SLACK * self.least_bytes() <= memory_bytes


def simple_plans(
    graph: PlannableGraph,
    mesh: Mesh,
    named_schedules: Sequence[NamedSchedule],
    num_positions: int,
    pp_place: int,
    space: SearchSpace,
    setting: Setting,
    below_s: float = float("inf"),
    rules: Rules | None = None,
    later: list[Iterator[SimplePlan]] | None = None,
) -> Iterator[SimplePlan]:
    """What the simple policies make of so many positions of one mesh: the last axis splits the
    inner dims of the model and the one before it the batch, or inner dims too where those are
    short; of one axis, either. An axis that splits the batch may split experts in the place of
    their tokens. An axis that deals in zigzag splits the sequence. Two and three axes
    are those of a mode of ``tensor``, too. Without what breaks the constraints.
    ``below_s``: placements that take longer are of no interest. ``rules``: those for the graph,
    shared by all meshes. ``later``: gets the plans that take more than the memory if all positions
    hold as much. Finding out where their stages begin may take long, and few fit.
    """
    rules = rules or Rules(graph, setting.config)
    config = setting.config
    # From cheap estimates to exact ones: a way, its plan, its cut; each may be out of the race.
    recomputed = [
        (again, patterns, with_regions(rules.needed, patterns))
        for again, patterns in _recomputed(mesh, space, rules).items()
    ]
    for way in rules.ways(mesh):
        if (
            SIMPLE_SLACK * _even_s(rules.alone_s(mesh, way, setting), num_positions, setting)
            >= below_s
        ):
            continue
        placement = _placement(graph, way, space.constraints(mesh))
        if placement is None:
            continue
        # A placement that breaks the constraints is none.
        plan = replace(
            placement, zero=units_of_storage(config), outputs=training_wishes(graph, config)
        )
        try:
            unmarked = Walk(lower(rules.needed, plan), setting)
        except PlanError:  # a rule for other models: its layouts do not follow from one another
            continue
        times = list(operator_times(unmarked).values())
        if SIMPLE_SLACK * _even_s(times, num_positions, setting) >= below_s:
            continue
        for again, recompute, marked in recomputed:
            walk = unmarked.recomputing(marked, recompute) if recompute else unmarked
            # Where stages begin, for every schedule.
            on = partial(
                _simple_plans, marked, walk, times, again, way.whose, num_positions, pp_place,
                space, below_s,
            )  # fmt: skip
            if later is None:
                yield from on(named_schedules)
                continue
            likely, large = _by_even_bytes(walk, named_schedules, num_positions, space)
            later.append(on(large))
            yield from on(likely)


def _recomputed(mesh: Mesh, space: SearchSpace, rules: Rules) -> dict[str, tuple[str, ...]]:
    """What plans on a mesh compute again: what the user says; else nothing, or where an axis deals
    in zigzag all layers, with their attention or without. The search, which chooses layers, does
    not place such a mesh itself: it chooses them for the best of these plans. By what titles say of
    it.
    """
    found = {"": tuple(space.recompute or ())}
    if mesh.turns and space.recompute is None and space.memory_bytes < float("inf"):
        found[", layers but for attention computed again"] = rules.around_attention
        found[", all layers computed again"] = rules.every_layer
    return {again: patterns for again, patterns in found.items() if patterns or not again}


def _by_even_bytes(
    walk: Walk, named_schedules: Sequence[NamedSchedule], num_positions: int, space: SearchSpace
) -> tuple[list[NamedSchedule], list[NamedSchedule]]:
    """The schedules with which a placement fits if all of its stages hold as much, and the others.

    Example: parameters and what goes with them are 80 GB, activations of a microbatch 120 GB. Four
    positions hold 20 GB of the first each. By 1F1B the first one keeps four microbatches, of 30 GB
    each, and so 140 GB.
    """
    found: tuple[list[NamedSchedule], list[NamedSchedule]] = ([], [])
    everything = [range(len(walk.program.graph.ops))]
    for named_schedule in named_schedules:
        in_flight, stages = 1, 1
        if named_schedule.name:
            chunks, count = named_schedule.chunks, space.num_microbatches
            schedule = generate(named_schedule.name, num_positions, count, chunks)
            in_flight, stages = max(peak_in_flight(schedule)), schedule.num_stages
        held = _least_bytes(walk, [0], [0], everything) / num_positions
        kept = _least_bytes(walk, [1], [0], everything) - _least_bytes(walk, [0], [0], everything)
        is_large = held + in_flight * kept / stages > space.memory_bytes
        found[is_large].append(named_schedule)
    return found


def _simple_plans(
    marked: PlannableGraph,
    walk: Walk,
    times: Sequence[float],
    again: str,
    whose: str,
    num_positions: int,
    pp_place: int,
    space: SearchSpace,
    below_s: float,
    named_schedules: Sequence[NamedSchedule],
) -> Iterator[SimplePlan]:
    """The plans of one way on these schedules, but for those whose parts take too long."""
    plan, setting = walk.program.plan, walk.setting
    ranks = position_ranks(plan.mesh, num_positions, pp_place)
    for cut in _cuts(marked, walk, named_schedules, num_positions, pp_place, space):
        if SIMPLE_SLACK * cut.busiest_s(times, setting) >= below_s:
            continue
        least_s, in_flight, cut_plan = space.num_microbatches * sum(times), [1], plan
        # A schedule is simulated; without one a step is its operators, one after the other.
        if cut.named_schedule.name:
            schedule = generate(
                cut.named_schedule.name,
                num_positions,
                space.num_microbatches,
                cut.named_schedule.chunks,
            )
            splits = SCHEDULES[cut.named_schedule.name].splits_backward and not walk.regions
            least_s = _least_s(walk, times, schedule, cut.spans, ranks, splits=splits)
            in_flight = list(peak_in_flight(schedule))
            cut_plan = staged(
                plan,
                cut.starts,
                num_positions,
                cut.named_schedule,
                space.num_microbatches,
                pp_place,
            )
        # Sums of gradients and updates, once per step.
        least_s += _once_s(walk, cut.placement, cut.spans)
        yield SimplePlan(
            cut_plan,
            plan,
            again,
            whose,
            cut.named_schedule,
            least_s,
            partial(_least_bytes, walk, in_flight, cut.placement, cut.spans),
        )


@dataclass(frozen=True)
class _Cut:
    """The stages of a schedule: the position that runs each, the first operators of all but the
    first, and their places.
    """

    named_schedule: NamedSchedule
    placement: Sequence[int]
    starts: Sequence[str]
    spans: Sequence[range]

    def busiest_s(self, seconds: Sequence[float], setting: Setting) -> float:
        """What all microbatches take on the position that has most to do, where operators take so
        many ``seconds``: at most as long as the schedule.
        """
        positions = dict.fromkeys(self.placement, 0.0)
        for position, own in zip(self.placement, self.spans, strict=True):
            positions[position] += sum(seconds[own.start : own.stop])
        sharing = setting.hardware.device.sharing
        fastest = 1.0 if sharing is None else sharing.speed(1)  # of a position, while others wait
        each_s = max(sum(positions.values()) / len(positions), max(positions.values()) / fastest)
        return setting.num_microbatches * each_s


def _cuts(
    graph: PlannableGraph,
    walk: Walk,
    named_schedules: Sequence[NamedSchedule],
    num_positions: int,
    pp_place: int,
    space: SearchSpace,
) -> Iterator[_Cut]:
    """The stages of each schedule, but for those that have more than there are places to cut."""
    for named_schedule in named_schedules:
        if not named_schedule.name:
            yield _Cut(named_schedule, [0], [], [range(len(graph.ops))])
            continue
        schedule = generate(
            named_schedule.name, num_positions, space.num_microbatches, named_schedule.chunks
        )
        with contextlib.suppress(PlanError):
            starts = space.stage_starts or cut_into_stages(graph, walk, schedule, pp_place)
            yield _Cut(named_schedule, schedule.placement, starts, _spans(graph, starts))


def _even_s(seconds: Sequence[float], num_positions: int, setting: Setting) -> float:
    """What all microbatches take at least, however operators that take so many ``seconds`` are
    dealt out over positions.
    """
    return setting.num_microbatches * sum(seconds) / num_positions


@dataclass(frozen=True)
class Way:
    """A way to use the axes of a mesh: what they split, by operator, and the plan, whose making
    takes longer. ``whose``: in words, whose plan it is.
    """

    splits: Mapping[str, Assignment]
    plan: Callable[[], Plan]
    whose: str = "a simple policy"


@dataclass(frozen=True)
class _Dims:
    """The dim classes that an axis splits. ``inside``: what it splits of experts, if not these."""

    classes: frozenset[int]
    inside: InsideExperts | None = None


class Rules:
    """What the rules of the simple policies say of one graph, worked out once for all meshes."""

    def __init__(self, graph: PlannableGraph, config: ComputeConfig) -> None:
        self.graph, self._config = graph, config
        self._choosers: dict[int, Chooser] = {}
        self._plans_along: dict[tuple[str, int], Plan] = {}
        self._splits_along: dict[tuple[str, int], dict[str, Strategy]] = {}
        self._mode_plans: dict[tuple[Mode, tuple[int, ...]], Plan] = {}

    @cached_property
    def needed(self) -> PlannableGraph:
        """The graph of what programs compute."""
        return PlannableGraph.of(needed(self.graph, self._config))

    @cached_property
    def every_layer(self) -> tuple[str, ...]:
        """The patterns of all layers."""
        return every_layer(self.needed)

    @cached_property
    def around_attention(self) -> tuple[str, ...]:
        """The patterns of what layers have beside attention."""
        return around_attention(self.needed)

    @cached_property
    def _counted(self) -> Sequence[IROp | None]:
        """The operators whose time counts, by place. Those that every stage makes for itself do
        not.
        """
        free = from_nothing(self.needed)
        return [None if op.name in free else op for op in self.needed.ops]

    def alone_s(self, mesh: Mesh, way: Way, setting: Setting) -> list[float]:
        """The seconds of the operators alone, by place: less than with adapters between them. What
        is not split takes as long with any other strategy.
        """
        hardware, times, ranks = setting.hardware, setting.times, setting.ranks

        def total_s(op: IROp) -> float:
            return op_time(
                op, way.splits.get(op.name, {}), mesh, hardware, times, ranks=ranks
            ).total_s

        return [0.0 if op is None else total_s(op) for op in self._counted]

    def ways(self, mesh: Mesh) -> Iterator[Way]:
        """All there are, of the whole model. A plan raises :class:`PlanError` if an axis cannot
        split what it is for.
        """
        if mesh.turns:
            yield from self._sequence_ways(mesh)
            return
        # By number of axes, what each of them splits.
        named: dict[int, list[tuple[str, ...]]] = {
            0: [()],
            1: [("batch",), ("inner",)],
            2: [("batch", "inner")],
        }
        if self._experts:
            # Over two axes, experts lie over nodes and the ranks within them.
            named[1].append((EXPERTS,))
            named[2] += [(EXPERTS, "inner"), ("batch", EXPERTS), (EXPERTS, EXPERTS)]
        for rules in named.get(len(mesh.axes), []):
            # A model without a batch has no data parallelism.
            with contextlib.suppress(PlanError):  # no batch
                yield Way(self._splits(mesh, rules), partial(self.plan, mesh, rules))
        # Two axes may both split inner dims, where these are short.
        if len(mesh.axes) == 2 and (pair := self._pair_classes(mesh)) is not None:
            yield Way(self._splits_of_pair(mesh, pair), partial(self._pair, mesh, pair))
        # An axis with a name splits what its name says, and not what a mode would have it split.
        if set(mesh.names) <= set(AXIS_NAMES):
            yield from self._mode_ways(mesh)

    def _mode_ways(self, mesh: Mesh) -> Iterator[Way]:
        """The modes of ``tensor`` that have as many axes as the mesh: what is gathered for a
        product is kept for backward, or gathered again.
        """
        for mode, axes in MODE_AXES.items():
            if mode == "1d" or len(axes) != len(mesh.axes):
                continue
            with contextlib.suppress(PlanError):  # no batch
                plan = self._mode_plan(mesh, mode)
                for words, again in (("kept", False), ("again", True)):
                    gathers = gathers_in_mode(self.graph, again=again)
                    way = partial(_same, replace(plan, gathers=gathers))
                    yield Way(plan.strategies, way, f"mode {mode} ({words})")

    def _mode_plan(self, mesh: Mesh, mode: Mode) -> Plan:
        sizes = tuple(size for _, size in mesh.axes)
        if (mode, sizes) not in self._mode_plans:
            builder = self.graph.builder(mesh=dict(zip(MODE_AXES[mode], sizes, strict=True)))
            split_in_mode(builder, mode)
            self._mode_plans[mode, sizes] = builder.plan("autodist")
        names = dict(zip(MODE_AXES[mode], mesh.names, strict=True))
        return renamed(self._mode_plans[mode, sizes], names)

    def zigzag_meshes(self, mesh: Mesh) -> Iterator[Mesh]:
        """The meshes on which an axis deals positions in zigzag, as ``cp`` lets it: where attention
        is causal.
        """
        if not 1 <= len(mesh.axes) <= 2:
            return
        for axis, size in mesh.axes:
            if axis in (*AXIS_NAMES, "sp") and size > 1:
                turns = turns_of_axes(self.graph, [ContextAxis(axis, size, "ring")], None, "cp")
                if turns:
                    yield Mesh(mesh.axes, turns)

    def _sequence_ways(self, mesh: Mesh) -> Iterator[Way]:
        """The axis that deals in zigzag splits the sequence, another one the batch or inner dims.
        Keys go round, or are gathered.
        """
        ((along, _),) = mesh.turns
        if not any(sequence_classes(body) for body in self.graph.bodies):
            return
        others = [axis for axis in mesh.names if axis != along]
        rules: tuple[str | None, ...] = ("batch", "inner") if others else (None,)
        if others and mesh.names[0] == along:
            # Positions that the outer axis leaves are cut further, as by sequence_parallel=True.
            rules = (*rules, WITH_POSITIONS)
        for rule in rules:
            for mode in ("ring", "gather"):
                # A model without a batch, or attention that has no ring.
                with contextlib.suppress(PlanError):
                    plan = self._sequence_plan(mesh, along, mode, rule)
                    yield Way(plan.strategies, partial(_same, plan), f"cp ({mode}){BESIDE[rule]}")

    def _sequence_plan(self, mesh: Mesh, along: str, mode: str, rule: str | None) -> Plan:
        builder = self.graph.builder(mesh=mesh)
        for axis, size in mesh.axes:
            if axis != along and rule is not None:
                positions = Positions() if rule == WITH_POSITIONS else None
                split_dims(builder, axis, set(self._dims(rule, size).classes), positions=positions)
        split_context(builder, [ContextAxis(along, mesh.axis_size(along), mode)], {})
        return builder.plan("autodist")

    def plan(self, mesh: Mesh, way: Sequence[str]) -> Plan:
        """The whole model, where axes of a mesh split the batch or the inner dims. Raises
        :class:`PlanError` if one cannot.
        """
        builder, notes = self.graph.builder(mesh=dict(mesh.axes)), []
        for (axis, size), rule in zip(mesh.axes, way, strict=True):
            along = self._plan_along(rule, size)
            for op, assignment in along.strategies.items():
                builder.strategy(op, axis, assignment[AXIS])
            notes += [replace(note, axis=axis) for note in along.notes]
        return replace(builder.plan("autodist"), notes=tuple(notes))

    def _pair(self, mesh: Mesh, classes: Sequence[set[int]]) -> Plan:
        """The plan of the whole model where both axes split inner dims."""
        builder = self.graph.builder(mesh=dict(mesh.axes))
        for axis, own in zip(mesh.names, classes, strict=True):
            split_dims(builder, axis, own)
        return builder.plan("autodist")

    def _plan_along(self, rule: str, size: int) -> Plan:
        """The plan of the whole model on a mesh of one axis."""
        if (rule, size) not in self._plans_along:
            builder = self.graph.builder(mesh={AXIS: size})
            dims = self._dims(rule, size)
            split_dims(builder, AXIS, set(dims.classes), dims.inside)
            self._plans_along[rule, size] = builder.plan("autodist")
        return self._plans_along[rule, size]

    @cached_property
    def _experts(self) -> set[int]:
        """The dim classes of experts."""
        assert self.graph.dims is not None
        return {dim.index for dim in self.graph.dims.named(EXPERTS)}

    def _dims(self, rule: str, size: int) -> _Dims:
        """The dim classes that a rule splits over so many ranks."""
        if rule in ("inner", WITH_POSITIONS):
            return _Dims(frozenset(self._chooser(size).choose(size).classes))
        batch = batch_classes(self.graph)
        if rule == EXPERTS:
            # Tokens are exchanged for experts, as in policy ``ep``.
            inside = InsideExperts(self._experts, self._experts, batch)
            return _Dims(frozenset(batch), inside)
        return _Dims(frozenset(batch))

    def _pair_classes(self, mesh: Mesh) -> list[set[int]] | None:
        """The inner dim classes of both axes; ``None`` where no dim is too short for one axis."""
        chooser, outer = self._chooser(mesh.size), mesh.axes[0][1]
        return [axis.classes for axis in chooser.pair(outer)] if chooser.is_short() else None

    def _chooser(self, num_ranks: int) -> Chooser:
        if num_ranks not in self._choosers:
            self._choosers[num_ranks] = Chooser(self.graph, num_ranks)
        return self._choosers[num_ranks]

    def _splits(self, mesh: Mesh, rules: Sequence[str]) -> dict[str, dict[str, Strategy]]:
        """What axes split by these rules, each as if it were alone."""
        found: dict[str, dict[str, Strategy]] = {}
        for (axis, size), rule in zip(mesh.axes, rules, strict=True):
            if (rule, size) not in self._splits_along:
                dims = self._dims(rule, size)
                self._splits_along[rule, size] = self._split_within(dims, size, {}, Mesh(()))
            for name, strategy in self._splits_along[rule, size].items():
                found.setdefault(name, {})[axis] = strategy
        return found

    def _splits_of_pair(
        self, mesh: Mesh, pair: Sequence[set[int]]
    ) -> dict[str, dict[str, Strategy]]:
        """What two axes split that are given these classes, the second what the first has left."""
        found: dict[str, dict[str, Strategy]] = {}
        for (axis, size), own in zip(mesh.axes, pair, strict=True):
            dims = _Dims(frozenset(own))
            for name, strategy in self._split_within(dims, size, found, mesh).items():
                found.setdefault(name, {})[axis] = strategy
        return found

    def _split_within(
        self, dims: _Dims, size: int, before: Mapping[str, Assignment], mesh: Mesh
    ) -> dict[str, Strategy]:
        graph, found = self.graph, dict[str, Strategy]()
        for op in self.needed.ops:
            axes = factor_axes(before.get(op.name, {}), mesh)
            cut = {factor: math.prod(map(mesh.axis_size, names)) for factor, names in axes.items()}
            split = split_by_rule(op, graph, set(dims.classes), dims.inside, size, cut)
            if split is not None:
                found[op.name] = split
        return found


def _same(plan: Plan) -> Plan:
    return plan


def _placement(graph: PlannableGraph, way: Way, constraints: Constraints) -> Plan | None:
    """The plan of a way, if the axes can split what they are for, and it obeys the constraints:
    with axes called after what they split, but for those that have a name.
    """
    try:
        plan = way.plan()
    except PlanError:
        return None
    obeying = constrained(plan, graph, constraints)
    if obeying is None:
        return None
    return named(
        obeying, split_dim_names(graph, obeying), kept=set(plan.mesh.names) - set(AXIS_NAMES)
    )


def _least_s(
    walk: Walk,
    seconds: Sequence[float],
    schedule: Schedule,
    spans: Sequence[range],
    ranks: Sequence[tuple[int, ...]],
    *,
    splits: bool,
) -> float:
    """The schedule with the times of its stages. ``seconds``: of operators, 0 where they do not
    count. ``ranks``: by position.
    ``splits``: backwards come in two parts.
    """
    times = []
    for own in spans:
        # A stage is a range of operators.
        forward_s, backward_s = (
            sum(side[i] for i in own if seconds[i]) for side in (walk.forward_s, walk.backward_s)
        )
        parts = (
            walk.backward_parts(own.start, own.stop) if splits and own.start else (0.0, backward_s)
        )
        times.append(StageTimes(forward_s, *parts, backward_s))
    config, sharing = walk.setting.config, walk.setting.hardware.device.sharing
    machines = (
        SharedMachines.of(sharing, ranks, config.plan_ngpus, config.num_units) if sharing else None
    )
    return simulate(schedule, times, machines=machines).makespan_s


def _spans(graph: IRGraph, starts: Sequence[str]) -> list[range]:
    """The places of every stage."""
    place = {op.name: index for index, op in enumerate(graph.ops)}
    return [
        range(*pair)
        for pair in itertools.pairwise([0, *(place[name] for name in starts), len(graph.ops)])
    ]


def _once_s(walk: Walk, placement: Sequence[int], spans: Sequence[range]) -> float:
    """What comes after the last backward, on the position where it is least; nothing where it may
    run beside a pass.
    """
    config = walk.setting.config
    settings = ReductionSettings.of(config, config.num_units)
    if settings.asynchronous or settings.overlaps_parameters:
        return 0.0
    once = dict.fromkeys(placement, 0.0)
    for position, own in zip(placement, spans, strict=True):
        once[position] += sum(held.once_s for held in walk.parameters if held.places[0] in own)
    return min(once.values())


def _least_bytes(
    walk: Walk,
    in_flight: Sequence[int],
    placement: Sequence[int],
    spans: Sequence[range],
    *,
    gradients: bool = False,
) -> float:
    """What the fullest position holds when most is in flight; 0 where something is computed again.
    ``gradients``: with all of them, which are there unless most is in flight before the first
    backward only.

    ``in_flight``: by position, counted in stages and microbatches, of which some may be of its
    smallest stage.
    """
    if walk.regions or walk.program.plan.recompute or walk.setting.config.inference_only:
        return 0.0
    held = [0.0] * len(in_flight)
    kept: list[list[float]] = [[] for _ in in_flight]
    for position, own in zip(placement, spans, strict=True):
        for each in walk.parameters:
            if each.places[0] in own:
                num_bytes = each.held_bytes if each.places[-1] in own else each.shared_bytes
                # Gradients are made by the first backward, and the fullest moment may come before
                # it.
                held[position] += num_bytes - (0.0 if gradients else each.gradient_bytes)
        kept[position].append(walk.kept.first(own.start, own.stop))
    # Of several stages on a position, all in flight may be of the smallest: so it is a bound.
    return max(h + count * min(k) for h, count, k in zip(held, in_flight, kept, strict=True))
