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

So they are audited too, as far as they obey the user's constraints, their parts do not already
take as long as the best plan, and some stages may make them fit and faster.

Example: parameters and what goes with them are 100 GB, and a microbatch keeps 60 GB. By 1F1B the
first of two positions has two microbatches, so 80 GB hold at most 0.36 of the model there, and at
most 0.5 on the second: no stages are looked for, and nothing is audited.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.lower import lower
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
from shardwright.policies.autodist.candidates.axis_roles import named
from shardwright.policies.autodist.candidates.meshes import AXIS_NAMES, position_ranks
from shardwright.policies.autodist.candidates.results import CutRequest
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.cutting.cut_bounds import Waits
from shardwright.policies.autodist.cutting.cut_stages import Cutter
from shardwright.policies.autodist.cutting.model_chains import ModelChains
from shardwright.policies.autodist.placement.constraints import Constraints, constrained
from shardwright.policies.autodist.search.simple_rules import (
    Rules,
    Way,
)
from shardwright.policies.autodist.search.simple_times import SimpleTimes
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.partition import cut as cut_into_stages
from shardwright.policies.partition import cut_request_of, cutter_of
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.zero.settings import ReductionSettings

SIMPLE_SLACK = 0.95
"""Plans are audited whose parts take no more than the memory after this factor: at a boundary
adapters may be saved.
"""

TURNS, ROUNDS = 8, 8
"""How many turns of how many rounds are played to find out that a schedule needs no cut."""


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
    later: list[Iterator[SimplePlan | None]] | None = None,
    most_bytes: float = float("inf"),
    waits: Waits | None = None,
) -> Iterator[SimplePlan | None]:
    """What the simple policies make of so many positions of one mesh: the last axis splits the
    inner dims of the model and the one before it the batch, or inner dims too where those are
    short; of one axis, either. An axis that splits the batch may split experts in the place of
    their tokens. An axis that deals in zigzag splits the sequence. Two and three axes
    are those of a mode of ``tensor``, too. Without what breaks the constraints.
    ``below_s``: placements that take longer are of no interest. ``rules``: those for the graph,
    shared by all meshes. ``later``: gets the plans that take more than the memory if all positions
    hold as much. Finding out where their stages begin may take long, and few fit. ``most_bytes``:
    pipelines of which none fits that and takes less are of no interest. ``waits``: what is known of
    schedules, shared by all meshes.

    ``None`` comes where a step of the work is done and has shown that there is no plan of interest:
    a caller who is out of time stops there. Of a pipeline on 64 positions many schedules may be
    looked at in vain, for seconds each.
    """
    rules = rules or Rules(graph, setting.config)
    config = setting.config
    fewest = num_positions * min((each.chunks for each in named_schedules), default=1)
    # From cheap estimates to exact ones: a way, its plan, its cut; each may be out of the race.
    recomputed = [
        (again, patterns, rules.recomputing(patterns))
        for again, patterns in _recomputed(mesh, space, rules).items()
    ]
    for way in rules.ways(mesh):
        alone_s = sum(rules.alone_s(mesh, way, setting))
        if _even_s(alone_s, num_positions, setting) >= below_s:
            continue
        placement = _placement(graph, way, space.constraints(mesh))
        if placement is None:
            yield None
            continue
        # A placement that breaks the constraints is none.
        plan = replace(
            placement, zero=units_of_storage(config), outputs=training_wishes(graph, config)
        )
        try:
            unmarked = Walk(lower(rules.needed, plan), setting)
        except PlanError:  # a rule for other models: its layouts do not follow from one another
            yield None
            continue
        for again, recompute, chains in recomputed:
            walk = unmarked.recomputing(chains.graph, recompute) if recompute else unmarked
            times = SimpleTimes(walk)
            if _even_s(times.least_s(fewest), num_positions, setting) >= below_s:
                yield None
                continue
            # Where stages begin, for every schedule.
            on = partial(
                _simple_plans, chains, walk, times, again, way.whose, num_positions, pp_place,
                space, below_s, most_bytes, waits,
            )  # fmt: skip
            if later is None:
                yield from on(named_schedules)
                continue
            likely, large = _by_even_bytes(walk, named_schedules, num_positions, space)
            later.append(on(large))
            if not likely:
                yield None
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
    held, both = (_least_bytes(walk, [count], [0], everything) for count in (0, 1))
    for named_schedule in named_schedules:
        in_flight, stages = 1, 1
        if named_schedule.name:
            chunks, count = named_schedule.chunks, space.num_microbatches
            schedule = generate(named_schedule.name, num_positions, count, chunks)
            in_flight, stages = max(peak_in_flight(schedule)), schedule.num_stages
        needed = held / num_positions + in_flight * (both - held) / stages
        is_large = needed > space.memory_bytes
        found[is_large].append(named_schedule)
    return found


def _simple_plans(
    chains: ModelChains,
    walk: Walk,
    times: SimpleTimes,
    again: str,
    whose: str,
    num_positions: int,
    pp_place: int,
    space: SearchSpace,
    below_s: float,
    most_bytes: float,
    waits: Waits | None,
    named_schedules: Sequence[NamedSchedule],
) -> Iterator[SimplePlan | None]:
    """The plans of one way on these schedules, but for those whose parts take too long; ``None`` in
    the place of such a plan.
    """
    plan, setting = walk.program.plan, walk.setting
    ranks = position_ranks(plan.mesh, num_positions, pp_place)
    # Finding where stages begin takes longest.
    promising = [
        each for each in named_schedules if _filled_s(times, each, num_positions, setting) < below_s
    ]
    # What blocks cost is the same for all.
    memory_bytes = most_bytes / SIMPLE_SLACK
    cutter = cutter_of(chains.graph, space.num_microbatches, memory_bytes, waits, chains)
    for cut in _cuts(walk, promising, num_positions, pp_place, space, cutter, below_s):
        if cut is None or cut.busiest_s(times, setting) >= below_s:
            yield None
            continue
        least_s, in_flight, cut_plan = space.num_microbatches * times.least_s(1), [1], plan
        # A schedule is simulated; without one a step is its operators, one after the other.
        if cut.named_schedule.name:
            schedule = generate(
                cut.named_schedule.name,
                num_positions,
                space.num_microbatches,
                cut.named_schedule.chunks,
            )
            splits = SCHEDULES[cut.named_schedule.name].splits_backward and not walk.regions
            least_s = _least_s(times, schedule, cut.spans, ranks, splits=splits)
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

    def busiest_s(self, times: SimpleTimes, setting: Setting) -> float:
        """What all microbatches take at least on the position that has most to do: at most as long
        as the schedule.
        """
        positions = dict.fromkeys(self.placement, 0.0)
        for position, own in zip(self.placement, self.spans, strict=True):
            positions[position] += sum(times.stage(own))
        sharing = setting.hardware.device.sharing
        fastest = 1.0 if sharing is None else sharing.speed(1)  # of a position, while others wait
        each_s = max(sum(positions.values()) / len(positions), max(positions.values()) / fastest)
        return setting.num_microbatches * each_s


def _cuts(
    walk: Walk,
    named_schedules: Sequence[NamedSchedule],
    num_positions: int,
    pp_place: int,
    space: SearchSpace,
    cutter: Cutter,
    below_s: float,
) -> Iterator[_Cut | None]:
    """The stages of each schedule; ``None`` for those that have more than there are places to cut,
    or no cut of which fits and takes less than ``below_s``.
    """
    graph = cutter.graph
    for named_schedule in named_schedules:
        if not named_schedule.name:
            yield _Cut(named_schedule, [0], [], [range(len(graph.ops))])
            continue
        schedule = generate(
            named_schedule.name, num_positions, space.num_microbatches, named_schedule.chunks
        )
        try:
            asked = cut_request_of(walk, schedule, pp_place)
            if space.stage_starts is None and _is_beaten(cutter, asked, below_s):
                yield None
                continue
            starts = space.stage_starts or cut_into_stages(graph, walk, schedule, pp_place, cutter)
            spans = _spans(graph, starts)
        except PlanError:
            yield None
            continue
        yield _Cut(named_schedule, schedule.placement, starts, spans)


def _is_beaten(cutter: Cutter, cut_request: CutRequest, below_s: float) -> bool:
    """Whether it is soon found that no cut fits and takes less, as its stages wait for one another
    and share the memory of their positions (``stages/scheduled.py``). Cutting takes longer.
    """
    if below_s == float("inf"):
        return False  # any plan is of interest
    if not cutter.bounds.may_fit(cut_request):
        return True
    sharing = cut_request.placements[0].walk.setting.hardware.device.sharing
    # Bounds are of ranks that all compute; a rank with a core for itself is faster.
    fastest = 1.0 if sharing is None else sharing.speed(1)
    bound, enough_s = cutter.bounds.scheduled_bound(cut_request), below_s * fastest
    # One turn for each way to see the model as blocks, and some more.
    for _ in range(TURNS):
        if bound.bound_s >= enough_s * (1 - 1e-9) or bound.is_over:
            break
        bound.play(enough_s, ROUNDS)
    return bound.bound_s >= enough_s * (1 - 1e-9)


def _even_s(seconds: float, num_positions: int, setting: Setting) -> float:
    """What all microbatches take at least, however the ``seconds`` of one are dealt out over
    positions.
    """
    return setting.num_microbatches * seconds / num_positions


def _filled_s(
    times: SimpleTimes, named_schedule: NamedSchedule, num_positions: int, setting: Setting
) -> float:
    """What a schedule takes at least, wherever its stages begin.

    With one stage on each position and whole backwards, position ``p`` waits until a microbatch has
    gone through the positions before it, and these wait for its last gradient. So with ``w_p``
    seconds of a microbatch there and ``S_p`` before it, a step of ``m`` microbatches takes
    ``T >= m w_p + S_p``. That is ``T - S_{p+1} >= (1 - 1/m) (T - S_p)``, and over ``P`` positions
    with ``W`` seconds in all ``T >= W / (1 - (1 - 1/m)^P)``.

    Example: 64 microbatches of 8 s on 8 positions take at least 67.6 s, and not 64.
    """
    count, num_stages = setting.num_microbatches, num_positions * named_schedule.chunks
    work_s = times.least_s(num_stages)
    # A rank that shares its cores is faster while others wait.
    is_shared = setting.hardware.device.sharing is not None
    if named_schedule.name not in ("1f1b", "gpipe") or named_schedule.chunks > 1 or is_shared:
        return _even_s(work_s, num_positions, setting)
    return work_s / (1 - (1 - 1 / count) ** num_positions)


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
    of: SimpleTimes,
    schedule: Schedule,
    spans: Sequence[range],
    ranks: Sequence[tuple[int, ...]],
    *,
    splits: bool,
) -> float:
    """The schedule with the least times of its stages. ``ranks``: by position. ``splits``: whether
    backwards come in two parts.
    """
    walk, times = of.walk, []
    for own in spans:
        # A stage is a range of operators.
        forward_s, backward_s = of.stage(own)
        parts = (0.0, backward_s)
        if splits and own.start:
            # Adapters may be saved of either part.
            saved_s = of.saved_s(own)
            input_s, weight_s = walk.backward_parts(own.start, own.stop)
            parts = max(0.0, input_s - saved_s), max(0.0, weight_s - saved_s)
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
