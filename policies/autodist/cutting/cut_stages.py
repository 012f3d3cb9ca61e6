"""Cut placements into stages: the chains that the model is seen as, what their blocks cost, and the
plan of the best cut.

Example: three layers of 4, 4 and 4 s and a head of 6 s on two positions. As a chain of layers the
best stages are of 8 and 10 s. Seen more finely, the third layer may be cut in the middle: 9 and 9
s. The finer cut is only taken where it makes the step shorter by more than ``tolerance``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.schedule.live_microbatches import held_together, peak_in_flight
from shardwright.policies.autodist.candidates.lower_bounds import share_despite_overlap
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.results import Candidate, CutRequest
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.candidates.titles import (
    recompute_title,
    scheduled_title,
    stages_title,
)
from shardwright.policies.autodist.cutting.join_stages import joined
from shardwright.policies.autodist.cutting.model_chains import Chain, ModelChains
from shardwright.policies.autodist.cutting.move_starts import (
    Evenness,
    even_positions,
    even_stages,
    evened,
    moved,
    with_begins,
)
from shardwright.policies.autodist.cutting.predicting import Prediction
from shardwright.policies.autodist.stages.action_chains import Chains
from shardwright.policies.autodist.stages.block_costs import BlockCosts, block_costs
from shardwright.policies.autodist.stages.boundaries import Messages, RanksOf
from shardwright.policies.autodist.stages.chain import Part, layer_pattern
from shardwright.policies.autodist.stages.scheduled import Game, Known, ScheduledBound
from shardwright.policies.autodist.stages.shared_positions import Positions
from shardwright.policies.autodist.stages.split_chain import (
    InFlight,
    NoFit,
    NoGain,
    Split,
    may_take_less,
    split_stages,
)
from shardwright.policies.autodist.stages.stage_costs import Block, PlacedBlocks, StageCosts
from shardwright.policies.autodist.stages.stage_minima import Least
from shardwright.policies.autodist.stages.walk import Walk


@dataclass(frozen=True)
class _Cut:
    """The best stages of one chain: those of ``layers``, by block, may be computed again.
    ``step_s``: predicted. ``messages_s``: what positions send one another adds at most, wherever
    stages begin.
    """

    split: Split
    prediction: Prediction
    layers: Mapping[int, str]
    step_s: float
    messages_s: float = 0.0


@dataclass(frozen=True)
class _Cuts:
    """What the chains gave: the cut ``chosen``, if any gains, and what no cut of any chain takes
    less than.
    """

    chosen: _Cut | None
    bound_s: float


Waits = dict[tuple[NamedSchedule, int], tuple[Chains, Known]]
"""The chains of actions, by schedule and number of positions, and what is known of them."""

KEPT = 8
"""The number of chains whose prices of boundaries are kept: the schedules of a placement are tried
one after the other.
"""

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""The shares of what computing layers again can save that are left alone in trials for little
memory.
"""


class Cutter:
    """Cuts cut requests on one graph into stages."""

    def __init__(
        self,
        graph: PlannableGraph,
        space: SearchSpace,
        waits: Waits | None = None,
        chains: ModelChains | None = None,
    ) -> None:
        self.graph, self.space = graph, space
        self.chains = chains or ModelChains(graph)
        self._messages: dict[tuple[tuple[Walk, ...], tuple[int, ...]], Messages] = {}
        self._costs: dict[tuple[Walk, tuple[int, ...], bool], BlockCosts] = {}
        self._fine: dict[tuple[Walk, int], list[int]] = {}
        self._inputs: dict[tuple[Walk, tuple[int, ...]], list[float]] = {}
        self.waits: Waits = {} if waits is None else waits

    def cut(self, cut_request: CutRequest, memory_bytes: float) -> Candidate | NoFit | NoGain:
        """The best stages for the schedule of a cut request that take no more than
        ``memory_bytes`` by the model of stages.
        """
        found = self._cut(cut_request, memory_bytes)
        if isinstance(found, NoFit):
            return found
        # A bound without overlap, made one with it.
        bound, config = found.bound_s, cut_request.placements[0].walk.setting.config
        bound *= share_despite_overlap(
            config,
            cut_request.num_positions,
            cut_request.named_schedule.chunks,
            self.space.num_microbatches,
        )
        if found.chosen is None:
            return NoGain(bound)
        return replace(self._candidate(found.chosen), split_bound_s=bound)

    def starts(self, cut_request: CutRequest) -> list[int] | None:
        """The places at which stages 1, 2, ... begin, whatever memory they take; None where there
        are too few places.
        """
        found = self._cut(cut_request, float("inf"), is_bounded=False)
        if isinstance(found, NoFit) or found.chosen is None:
            return None
        return [
            found.chosen.prediction.starts[stage.start] for stage in found.chosen.split.stages[1:]
        ]

    def _cut(
        self, cut_request: CutRequest, memory_bytes: float, *, is_bounded: bool = True
    ) -> _Cuts | NoFit:
        """The best stages of every chain, and which of them is chosen. ``is_bounded``: whether
        their bound is wanted; else it is 0.
        """
        needed = float("inf")
        bounds: list[
            float
        ] = []  # of every chain: what the best one says nothing of may be in another
        found: list[_Cut] = []
        predictions: list[Prediction] = []
        # A finer chain is a model of the same plan: it may find what a coarse one cannot cut.
        for starts, layers in self._chains(cut_request.placements[0].walk, cut_request.num_stages):
            costs = [
                self._costs_of(lowered.walk, starts, layers) for lowered in cut_request.placements
            ]
            messages = self._messages_of(cut_request, starts)
            prediction = Prediction(
                cut_request, costs, starts, messages, self.space.num_microbatches
            )
            predictions.append(prediction)
            split = self._stages(prediction, memory_bytes, is_bounded=is_bounded)
            if isinstance(split, NoFit):
                needed = min(needed, split.needed_bytes)
                continue
            bounds.append(split.bound_s)
            if isinstance(split, Split):
                found.append(_Cut(split, prediction, layers, prediction.step_s(split)))
        if not bounds:
            return NoFit(needed)
        # The first chain within the tolerance of the best: coarse blocks are exact, fine ones are
        # not.
        enough_s = (1 + self.space.tolerance) * min((cut.step_s for cut in found), default=0.0)
        chosen = next((cut for cut in found if cut.step_s <= enough_s), None)
        may_lie_elsewhere = len(cut_request.placements) == 1 < cut_request.num_stages
        if chosen is not None and is_bounded and may_lie_elsewhere:
            # Another cut may send more.
            longest_s = max(each.longest_message_s() for each in predictions)
            chosen = replace(
                chosen, messages_s=chosen.prediction.messages_s(chosen.split, longest_s)
            )
        return _Cuts(chosen, min(bounds))

    def may_fit(self, cut_request: CutRequest) -> bool:
        """Whether some cut with one placement has stages that fit, each as if the memory of its
        position were its own. A bound says more, and takes longer to set up.
        """
        (lowered,) = cut_request.placements
        count, memory_bytes = self.space.num_microbatches, self.space.memory_bytes
        alone = _alone(cut_request, count)
        for starts, layers in self._chains(lowered.walk, cut_request.num_stages):
            costs = self._costs_of(lowered.walk, starts, layers)
            (placed_blocks,) = self._placed_blocks(cut_request, [costs])
            if StageCosts(placed_blocks, count, False).may_fit(alone, memory_bytes):
                return True
        return False

    def scheduled_bound(self, cut_request: CutRequest) -> ScheduledBound:
        """What no cut of a cut request takes less than, as its stages wait for one another on its
        schedule and share the memory of their positions: to be found out by playing.
        """
        named_schedule, count = cut_request.named_schedule, self.space.num_microbatches
        schedule = cut_request.schedule(count)
        if (key := (named_schedule, cut_request.num_positions)) not in self.waits:
            self.waits[key] = Chains(schedule), Known()
        waits, known = self.waits[key]
        alone, memory = _alone(cut_request, count), self.space.memory_bytes
        games = []
        # For each way to see the model as blocks: the least of what its stages can have.
        for starts, layers in self._chains(cut_request.placements[0].walk, schedule.num_stages):
            costs = [
                self._costs_of(lowered.walk, starts, layers) for lowered in cut_request.placements
            ]
            messages = self._messages_of(cut_request, starts)
            placed_blocks = self._placed_blocks(cut_request, costs)
            placements = []
            for number, (lowered, placement) in enumerate(
                zip(cut_request.placements, placed_blocks, strict=True)
            ):
                inputs_s = self._inputs_of(lowered.walk, starts)
                stage_costs = StageCosts(placement, count, False)
                relief_s = messages.relief_by_side_s(number)
                # Stages that differ may lie anywhere, so that what a message takes is not known.
                crossings = (
                    messages.crossings(number, schedule.num_stages)
                    if len(placed_blocks) == 1
                    else ()
                )
                placements.append(Least(stage_costs, relief_s, inputs_s, alone, memory, crossings))
            games.append(Game(waits, placements, self._num_devices(cut_request), known))
        # Overlap of communication can make a step shorter than its actions are, by that share.
        config = cut_request.placements[0].walk.setting.config
        share = share_despite_overlap(
            config, cut_request.num_positions, named_schedule.chunks, count
        )
        return ScheduledBound(games, share)

    def leanest(self, cut_request: CutRequest) -> Candidate | None:
        """The stages that take least memory by the model of stages, whether they fit or not."""
        found = self.cut(cut_request, 0.0)
        if isinstance(found, NoFit) and found.needed_bytes < float("inf"):
            found = self.cut(cut_request, found.needed_bytes * (1 + 1e-9))
        return found if isinstance(found, Candidate) else None

    def saving(self, cut_request: CutRequest) -> list[Candidate]:
        """The stages that take least memory by the model of stages, and some on the way from there
        to nothing computed again: what is computed again takes memory at that moment, so that more
        of it may need more.
        """
        least, free = self.leanest(cut_request), self.cut(cut_request, float("inf"))
        if least is None or not isinstance(free, Candidate):
            return []
        # From most computed again to nothing: between, memory need not fall steadily, as the moment
        # in which a layer is computed again has a peak of its own.
        found = {least.plan.recompute: least}
        for share in SHARES:
            between = self.cut(
                cut_request, least.used_bytes + share * (free.used_bytes - least.used_bytes)
            )
            if isinstance(between, Candidate):
                found.setdefault(between.plan.recompute, between)
        return list(found.values())

    def could_help(self, cut_request: CutRequest, sizes: Sequence[int]) -> bool:
        """Whether a cut request could come below its ``below_s`` with placements on ``sizes``
        ranks beside its own, if more ranks never take less time in all than the placements
        do.
        """
        # If no chain gets below, placements on other sizes are not worth making.
        count = self.space.num_microbatches
        for starts, layers in self._chains(cut_request.placements[0].walk, cut_request.num_stages):
            # No placement on other ranks has been made yet. Each is assumed to be as good, rank by
            # rank, as the best one known, which no real one is likely to beat.
            placements = self._placed_blocks(
                cut_request,
                [
                    self._costs_of(lowered.walk, starts, layers)
                    for lowered in cut_request.placements
                ],
            )
            if may_take_less(
                [*placements, *(_as_good_as(placements, size) for size in sizes)],
                cut_request.placements[0].walk.setting.config.plan_ngpus,
                cut_request.num_positions,
                count,
                cut_request.below_s,
                splits_backward=cut_request.splits_backward,
            ):
                return True
        return False

    def _messages_of(self, cut_request: CutRequest, starts: Sequence[int]) -> Messages:
        """The prices of boundaries; cut requests with the same blocks share what they can."""
        walks, ranks_of = (
            [lowered.walk for lowered in cut_request.placements],
            _ranks_of(cut_request, self.space.num_microbatches),
        )
        key = tuple(walks), tuple(starts)
        known = self._messages.pop(key, None) or Messages(
            walks, starts, ranks_of, only_like_home=len(walks) > 1
        )
        self._messages[key] = known  # the latest is the last
        if len(self._messages) > KEPT:
            del self._messages[next(iter(self._messages))]
        return known if len(walks) > 1 else known.where(ranks_of)

    def _inputs_of(self, walk: Walk, starts: Sequence[int]) -> list[float]:
        """The least seconds of inputs' gradients by block; all schedules share them."""
        key = walk, tuple(starts)
        if key not in self._inputs:
            self._inputs[key] = _inputs_s(walk, starts)
        return self._inputs[key]

    def _num_devices(self, cut_request: CutRequest) -> int:
        """The devices of all stages. Several stages on one position count each for itself."""
        first = cut_request.placements[0].walk
        several = len(cut_request.placements) > 1
        return (
            first.setting.config.plan_ngpus if several else cut_request.num_stages * first.mesh.size
        )

    def _placed_blocks(
        self, cut_request: CutRequest, costs: Sequence[BlockCosts]
    ) -> list[PlacedBlocks]:
        shares = len(cut_request.placements) == 1
        return [
            found.placed(lowered.walk.mesh.size, shares=shares)
            for lowered, found in zip(cut_request.placements, costs, strict=True)
        ]

    def _chains(self, walk: Walk, num_stages: int) -> Sequence[Chain]:
        """The ways to see the model as blocks, the coarsest first: by layers, which may be computed
        again; and where nothing is, by the numbered modules inside them, and finely.
        """
        # The user has said where stages begin.
        if self.space.stage_starts is not None:
            position = {op.name: index for index, op in enumerate(self.graph.ops)}
            return [([0, *(position[name] for name in self.space.stage_starts)], {})]
        by_layer, layers = self.chains.by_layer
        found: list[Chain] = []
        # Nothing is computed again: blocks may be cut anywhere.
        is_free = not self.space.recompute  # no module is named that must not be cut
        if len(by_layer) >= num_stages and (layers or (is_free and len(by_layer) > 1)):
            found.append((by_layer, layers))
        if is_free:
            found += [(starts, {}) for starts in self.chains.nested if len(starts) >= num_stages]
            # Cutting finely depends on the operators' times, so it is done once for each placement.
            if (walk, num_stages) not in self._fine:
                share = self.space.block_share
                self._fine[walk, num_stages] = self.chains.fine(walk, num_stages, share)
            found.append((self._fine[walk, num_stages], {}))
        return found

    def _costs_of(self, walk: Walk, starts: Sequence[int], layers: Mapping[int, str]) -> BlockCosts:
        """The costs of the blocks; what the user wants computed again is, in all of them."""
        named = self.space.recompute

        def is_named(part: Part) -> bool:
            return any(_matches(part.path, name) for name in named or ())

        # Costs of blocks are asked for again and again, for other schedules on the same cut.
        key = walk, tuple(starts), bool(layers)
        if key not in self._costs:
            parts = self.chains.layer_parts if layers else {}
            self._costs[key] = block_costs(walk, starts, parts, None if named is None else is_named)
        return self._costs[key]

    def _stages(
        self, prediction: Prediction, memory_bytes: float, *, is_bounded: bool
    ) -> Split | NoFit | NoGain:
        """The best stages. Where the schedule is another than the one they are cut for, what they
        compute again is chosen for all of a position together, and they are moved, where nobody
        said where they begin. Bytes are those of a position.
        """
        named_schedule = prediction.cut_request.named_schedule
        found = self._split(prediction, memory_bytes, is_bounded=is_bounded)
        if _is_modelled(prediction.cut_request) or isinstance(found, NoGain):
            return found
        positions = Positions(prediction.tables, prediction.schedule, memory_bytes)
        # With even shares; with others the stages that take least of these may.
        if isinstance(found, NoFit):
            enough_bytes = found.needed_bytes * named_schedule.chunks * (1 + 1e-9)
            found = self._split(prediction, enough_bytes, is_bounded=is_bounded)
            needed = (
                positions.least_bytes(found.stages) if isinstance(found, Split) else float("inf")
            )
            if not isinstance(found, Split) or needed > memory_bytes:
                return NoFit(needed)
        fitted = positions.fitted(found.stages)
        if fitted is None:  # by the average of what is in flight it does: the audit will tell
            return replace(found, used_bytes=found.used_bytes * named_schedule.chunks)
        split = replace(found, stages=fitted[0], used_bytes=fitted[1])
        if self.space.stage_starts is not None:
            return split
        # The seconds of every block where it is now: moving begins makes sums more even by these.
        times = [
            block.forward_s + block.backward_s
            for stage in split.stages
            for block in prediction.costs[stage.placement].blocks[stage.start : stage.stop]
        ]
        evenness = Evenness(times, prediction.schedule.placement)
        begins = min(
            [split, *self._evened(split, prediction, evenness, times, positions)],
            key=prediction.step_s,
        )
        return moved(begins, evenness, positions, self.space.num_microbatches, prediction.step_s)

    def _evened(
        self,
        split: Split,
        prediction: Prediction,
        evenness: Evenness,
        times: Sequence[float],
        positions: Positions,
    ) -> list[Split]:
        """The cut with other begins, as far as they fit the memory: of even stages, and such that
        positions have about equal sums.
        """
        # Begins do not say what a block takes where stages may differ.
        if len(prediction.costs) > 1:
            return []
        placement = prediction.schedule.placement
        own = [stage.start for stage in split.stages[1:]]
        starts = [own, even_stages(times, len(placement)), even_positions(times, placement)]
        begins = [*starts[1:], *(evened(evenness, cuts) for cuts in starts)]
        found = (
            with_begins(split, cuts, len(times), positions)
            for cuts in dict.fromkeys(map(tuple, begins))
        )
        return [each for each in found if each is not None]

    def _split(
        self, prediction: Prediction, memory_bytes: float, *, is_bounded: bool
    ) -> Split | NoFit | NoGain:
        """The best stages, where several on one position share its memory evenly. Bytes are those
        of a stage.
        """
        cut_request = prediction.cut_request
        count = self.space.num_microbatches
        return split_stages(
            self._placed_blocks(cut_request, prediction.costs),
            self._num_devices(cut_request),
            cut_request.num_stages,
            count,
            # Several stages of a position share its memory evenly here; :meth:`_evened` is exact.
            memory_bytes=memory_bytes / cut_request.named_schedule.chunks,
            in_flight=_in_flight(cut_request, count),
            splits_backward=cut_request.splits_backward,
            between=prediction.messages,
            below_s=cut_request.below_s,
            limit_bytes=self.space.memory_bytes,
            alone=_alone(cut_request, count),
            is_bounded=is_bounded,
        )

    def _candidate(self, cut: _Cut) -> Candidate:
        split, prediction, layers = cut.split, cut.prediction, cut.layers
        cut_request, costs, starts = prediction.cut_request, prediction.costs, prediction.starts
        count, named_schedule = self.space.num_microbatches, cut_request.named_schedule
        # The modules that are computed again, as the cut has chosen them.
        chosen = [
            costs[stage.placement].ways[block][way]
            for stage in split.stages
            for block, way in stage.recomputed
        ]
        recompute = self.space.recompute
        if recompute is None:
            recompute = _shortened([part for way in chosen for part in way.parts], layers)
        first_ops = [self.graph.ops[starts[stage.start]].name for stage in split.stages[1:]]
        placed = tuple(cut_request.placements[stage.placement].placed for stage in split.stages)
        plan, title = placed[0].plan, cut_request.title
        # Stages of several placements become one plan with a mesh for each; else one plan is dealt
        # out.
        if len(cut_request.placements) > 1:
            plan = joined(
                self.graph, [found.plan for found in placed], first_ops, named_schedule.name, count
            )
            title = scheduled_title(
                stages_title([found.plan.mesh for found in placed]), named_schedule
            )
        elif cut_request.num_positions > 1:
            placed = placed[:1]
            plan = staged(
                plan,
                first_ops,
                cut_request.num_positions,
                named_schedule,
                count,
                cut_request.pp_place,
            )
        title += recompute_title([way.parts for way in chosen], layers)
        plan = replace(plan, recompute=tuple(recompute))
        return Candidate(
            title,
            plan,
            cut.step_s,
            placed,
            split.bound_s,
            modelled_s=split.cost_s,
            messages_s=cut.messages_s,
            used_bytes=split.used_bytes,
            cut_request=cut_request,
        )


def _inputs_s(walk: Walk, starts: Sequence[int]) -> list[float]:
    """The least seconds of each block's backward that a stage which gets values needs for their
    gradients. They are those behind the first block, of which all that a later stage gets is made.
    """
    if len(starts) == 1:
        return [0.0]
    sums = [walk.backward_parts(starts[1], stop)[0] for stop in (*starts[1:], len(walk.backward_s))]
    return [0.0, *(after - before for before, after in itertools.pairwise(sums))]


def _as_good_as(placements: Sequence[PlacedBlocks], num_devices: int) -> PlacedBlocks:
    """A placement of as many seconds times devices, block by block, as the best of some."""

    def least(blocks: Sequence[Block]) -> Block:
        # Its seconds, scaled to another number of devices: no speedup is better than that.
        scales = [placement.num_devices / num_devices for placement in placements]
        both = list(zip(blocks, scales, strict=True))
        return Block(
            *(
                min(getattr(b, name) * s for b, s in both)
                for name in ("forward_s", "backward_s", "once_s")
            )
        )

    return PlacedBlocks(
        num_devices,
        [
            least(found)
            for found in zip(*(placement.blocks for placement in placements), strict=True)
        ],
    )


def _ranks_of(cut_request: CutRequest, num_microbatches: int) -> RanksOf:
    """Where stages lie: side by side, or at the position of the mesh that the schedule gives them
    to.
    """
    sizes = [lowered.placed.plan.mesh.size for lowered in cut_request.placements]
    if len(sizes) > 1 or cut_request.num_stages == 1:
        return lambda placement, device: tuple(range(device, device + sizes[placement]))
    positions = position_ranks(
        cut_request.placements[0].placed.plan.mesh, cut_request.num_positions, cut_request.pp_place
    )
    position_of = cut_request.schedule(num_microbatches).placement
    return lambda placement, device: positions[position_of[device // sizes[0]]]


def _in_flight(cut_request: CutRequest, num_microbatches: int) -> InFlight:
    """Microbatches that a stage holds by its place from the end, taken from the schedule: its even
    share of the most that its position holds.
    """
    if cut_request.num_stages == 1:
        return lambda place: 1
    schedule = cut_request.schedule(num_microbatches)
    peaks = [peak / cut_request.named_schedule.chunks for peak in peak_in_flight(schedule)]
    return lambda place: peaks[schedule.placement[schedule.num_stages - place]]


def _alone(cut_request: CutRequest, num_microbatches: int) -> list[int]:
    """The microbatches that each stage holds at once beside its gradients, whatever it computes
    again.
    """
    if cut_request.num_stages == 1:
        return [1]
    schedule = cut_request.schedule(num_microbatches)
    found = [0] * schedule.num_stages
    for rank, moments in enumerate(held_together(schedule, in_any_case=True)):
        for stage, *counts in zip(schedule.stages_of(rank), *moments, strict=True):
            found[stage] = max(counts)
    return found


def _is_modelled(cut_request: CutRequest) -> bool:
    """Whether stages are cut for the time of this schedule."""
    return (
        cut_request.by_hand is None
        and cut_request.named_schedule.name in ("", "1f1b", "gpipe")
        and cut_request.named_schedule.chunks == 1
    )


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatchcase(a, b) for a, b in zip(parts, wanted, strict=True)
    )


def _shortened(parts: Sequence[Part], layers: Mapping[int, str]) -> tuple[str, ...]:
    """Their paths; ``model.layers.*`` or ``model.layers.*.mlp`` where those of all layers of a list
    are meant.
    """
    # ``{"model.layers.*": 32}``: a pattern is written only if all 32 are meant.
    every = Counter(map(layer_pattern, layers.values()))
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.pattern, []).append(part)
    names: list[str] = []
    for pattern, members in found.items():
        stem = f"{pattern.partition('*')[0]}*"
        names += [pattern] if len(members) == every[stem] > 1 else [part.path for part in members]
    return tuple(names)
