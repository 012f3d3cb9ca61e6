"""Cut placements into stages: the best cut of the chains that the model is seen as, and its plan.

Example: three layers of 4, 4 and 4 s and a head of 6 s on two positions. As a chain of layers the
best stages are of 8 and 10 s. Seen more finely, the third layer may be cut in the middle: 9 and 9
s. The finer cut is only taken where it makes the step shorter by more than ``tolerance``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.schedule.live_microbatches import peak_in_flight
from shardwright.policies.autodist.candidates.lower_bounds import share_despite_overlap
from shardwright.policies.autodist.candidates.results import Candidate, CutRequest
from shardwright.policies.autodist.candidates.scheduled_plans import staged
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.candidates.titles import (
    recompute_title,
    scheduled_title,
    stages_title,
)
from shardwright.policies.autodist.cutting.cut_bounds import CutBounds, Waits
from shardwright.policies.autodist.cutting.join_stages import joined
from shardwright.policies.autodist.cutting.model_chains import ModelChains
from shardwright.policies.autodist.cutting.move_starts import (
    Evenness,
    even_positions,
    even_stages,
    evened,
    moved,
    with_begins,
)
from shardwright.policies.autodist.cutting.predicting import Prediction
from shardwright.policies.autodist.cutting.request_blocks import RequestBlocks, alone_of
from shardwright.policies.autodist.stages.chain import Part, layer_pattern
from shardwright.policies.autodist.stages.shared_positions import Positions
from shardwright.policies.autodist.stages.split_chain import (
    InFlight,
    NoFit,
    NoGain,
    Split,
    split_stages,
)


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


SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""The shares of what computing layers again can save that are left alone in trials for little
memory.
"""


class Cutter:
    """Cuts cut requests on one graph into stages. ``blocks``: what cuts are made of; ``bounds``:
    what no cut takes less than.

    Args:
        waits: what is known of schedules, shared with other cutters.
        chains: those of the graph, shared with other cutters.
    """

    def __init__(
        self,
        graph: PlannableGraph,
        space: SearchSpace,
        waits: Waits | None = None,
        chains: ModelChains | None = None,
    ) -> None:
        self.graph, self.space = graph, space
        self.blocks = RequestBlocks(graph, space, chains)
        self.bounds = CutBounds(self.blocks, waits)

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
        for starts, layers in self.blocks.chains(cut_request):
            costs = self.blocks.costs(cut_request, starts, layers)
            messages = self.blocks.messages(cut_request, starts)
            prediction = Prediction(
                cut_request,
                costs,
                starts,
                messages,
                self.blocks.ends(cut_request),
                self.space.num_microbatches,
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
            self.blocks.placed(cut_request, prediction.costs),
            self.blocks.num_devices(cut_request),
            cut_request.num_stages,
            count,
            # Several stages of a position share its memory evenly here; :meth:`_evened` is exact.
            memory_bytes=memory_bytes / cut_request.named_schedule.chunks,
            in_flight=_in_flight(cut_request, count),
            splits_backward=cut_request.splits_backward,
            between=prediction.messages,
            below_s=cut_request.below_s,
            limit_bytes=self.space.memory_bytes,
            alone=alone_of(cut_request, count),
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


def _in_flight(cut_request: CutRequest, num_microbatches: int) -> InFlight:
    """Microbatches that a stage holds by its place from the end, taken from the schedule: its even
    share of the most that its position holds.
    """
    if cut_request.num_stages == 1:
        return lambda place: 1
    schedule = cut_request.schedule(num_microbatches)
    peaks = [peak / cut_request.named_schedule.chunks for peak in peak_in_flight(schedule)]
    return lambda place: peaks[schedule.placement[schedule.num_stages - place]]


def _is_modelled(cut_request: CutRequest) -> bool:
    """Whether stages are cut for the time of this schedule."""
    return (
        cut_request.by_hand is None
        and cut_request.named_schedule.name in ("", "1f1b", "gpipe")
        and cut_request.named_schedule.chunks == 1
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
