"""The time of a step of a split, as the audit of its program adds it up: its schedule, simulated
with its stages and messages.

Three things are priced in a simpler way than the audit does. Values go from each stage to the next
one, also those that come from an earlier one; adapters that a boundary adds run once also where
their stage computes again what reads them; and sums of gradients and gatherings of parameters come
after the last action, also where they may run beside others.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.shared_cores import SharedMachines
from shardwright.compiler.schedule.simulate import StageTimes, ends_s, simulate
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.results import CutRequest
from shardwright.policies.autodist.stages.block_costs import BlockCosts
from shardwright.policies.autodist.stages.boundaries import Boundary, Messages
from shardwright.policies.autodist.stages.split_chain import Split, Stage
from shardwright.policies.autodist.stages.stage_costs import StageCosts
from shardwright.policies.autodist.stages.step_ends import StepEnds
from shardwright.policies.autodist.stages.walk import Setting


@dataclass(frozen=True)
class Prediction:
    """The times of the splits of one cut request. ``costs``, ``ends``: one for each of its
    placements; the blocks begin at ``starts``.
    """

    cut_request: CutRequest
    costs: Sequence[BlockCosts]
    starts: Sequence[int]
    messages: Messages
    ends: Sequence[StepEnds]
    num_microbatches: int

    def step_s(self, split: Split, below_s: float = float("inf")) -> float:
        """Seconds of a step: without a schedule by the formula of the split, which is exact there.

        ``below_s``: what takes longer is of no interest; where what one position does itself takes
        as long, that is the answer.
        """
        if self.cut_request.num_stages == 1:
            return split.cost_s + self._more_at_end_s(split, self._ranks(split))[0]
        # The first device of each stage.
        devices = [0]
        for stage in split.stages:
            devices.append(devices[-1] + stage.num_devices)
        # What crosses between stages, given the placements on both sides.
        boundaries = [
            self.messages.boundary(before.placement, after.placement, device)
            for before, after, device in zip(
                split.stages, split.stages[1:], devices[1:], strict=False
            )
        ]
        # One microbatch of each stage, then the messages between neighbours, then the schedule.
        times = [self._times(split, index, boundaries) for index in range(len(split.stages))]
        transfers: dict[tuple[int, int], float] = {}
        for index, (boundary, stage) in enumerate(zip(boundaries, split.stages[1:], strict=True)):
            span = stage.start, stage.stop
            transfers[index, index + 1] = float(boundary.there_s[span])
            transfers[index + 1, index] = float(boundary.back_s[span])
        ranks = self._ranks(split)
        machines = self._machines(ranks)
        if machines is None:
            # Simulating takes longest, and most cuts near a good one give some position too much.
            busy_s = self._busiest_s(times)
            if busy_s >= below_s:
                return busy_s
            ends = ends_s(self.schedule, times, transfers)
        else:
            line = simulate(self.schedule, times, transfers, machines=machines)
            ends = [spans[-1].end_s for spans in line.spans]
        # What a position does once, after its last action.
        once = self._more_at_end_s(split, ranks)
        for index, stage in enumerate(split.stages):
            once[self.schedule.placement[index]] += float(
                self.tables[stage.placement].once_s[stage.start, stage.stop]
            )
        return max(end_s + seconds for end_s, seconds in zip(ends, once, strict=True))

    def longest_message_s(self) -> float:
        """What a message between stages of the one placement takes at most, wherever they begin."""
        size = self.cut_request.placements[0].walk.mesh.size
        boundaries = [
            self.messages.boundary(0, 0, size * stage)
            for stage in range(1, self.cut_request.num_stages)
        ]
        return max(float(max(each.there_s.max(), each.back_s.max())) for each in boundaries)

    def messages_s(self, split: Split, longest_s: float) -> float:
        """What positions send one another adds to a step at most, if no message takes more than
        ``longest_s``: all messages of the chain of actions that has most, and what each position
        waits for at its end.
        """
        num_stages = self.cut_request.num_stages
        times = [StageTimes(0.0, 0.0, 0.0, 0.0)] * num_stages
        pairs = itertools.pairwise(range(num_stages))
        transfers = {way: longest_s for pair in pairs for way in (pair, pair[::-1])}
        ends_more_s = self._more_at_end_s(split, self._ranks(split))
        return max(ends_s(self.schedule, times, transfers)) + max(0.0, *ends_more_s)

    def _busiest_s(self, times: Sequence[StageTimes]) -> float:
        """What the position that has most to do takes for it, without waiting."""
        busy = [0.0] * self.schedule.num_ranks
        for position, own in zip(self.schedule.placement, times, strict=True):
            parts_s = own.input_gradient_s + own.weight_gradient_s
            whole_s = parts_s if own.backward_s is None else own.backward_s
            busy[position] += own.forward_s + min(parts_s, whole_s)
        return self.num_microbatches * max(busy)

    @cached_property
    def schedule(self) -> Schedule:
        return self.cut_request.schedule(self.num_microbatches)

    @cached_property
    def tables(self) -> list[StageCosts]:
        """What stages cost in each placement of the cut request."""
        found = zip(self.cut_request.placements, self.costs, strict=True)
        placements = (
            costs.placed(lowered.walk.mesh.size, shares=len(self.cut_request.placements) == 1)
            for lowered, costs in found
        )
        return [StageCosts(placement, self.num_microbatches, False) for placement in placements]

    @property
    def _setting(self) -> Setting:
        return self.cut_request.placements[0].walk.setting

    @cached_property
    def _known(self) -> dict[Hashable, StageTimes]:
        """The times of stages so far: cuts that differ a little have most stages in common."""
        return {}

    def _times(self, split: Split, index: int, boundaries: Sequence[Boundary]) -> StageTimes:
        """One microbatch of a stage."""
        stages = split.stages
        # What comes in depends on where this stage begins and ends, what goes out on the next one.
        around = [id(boundary) for boundary in boundaries[max(0, index - 1) : index + 1]]
        behind = [(after.start, after.stop) for after in stages[index + 1 : index + 2]]
        key = stages[index], not index, *around, *behind
        if key not in self._known:
            self._known[key] = self._stage_times(split, index, boundaries)
        return self._known[key]

    def _stage_times(self, split: Split, index: int, boundaries: Sequence[Boundary]) -> StageTimes:
        stage = split.stages[index]
        table, span = self.tables[stage.placement], (stage.start, stage.stop)
        again_s = sum(table.blocks[block].again[way].time_s for block, way in stage.recomputed)
        forward_s, backward_s = (
            float(table.forward_s[span]),
            float(table.backward_s[span]) + again_s,
        )
        # Copies around messages: what comes in at the front, and goes out at the back.
        more = []
        if index:
            more.append(boundaries[index - 1].taken_s[span])
        if index < len(boundaries):
            after = split.stages[index + 1]
            more.append(boundaries[index].sent_s[after.start, after.stop])
        # The first stage has no stage in front: nothing waits for gradients of its inputs.
        input_s, weight_s = self._parts(stage, backward_s) if index else (0.0, backward_s)
        for forth, back in more:
            forward_s += float(forth)
            backward_s += float(back)
            input_s, weight_s = (input_s + float(back), weight_s) if index else (0.0, backward_s)
        again = stage.recomputed or any(
            self.costs[stage.placement].computes_again[stage.start : stage.stop]
        )
        if again:  # such a backward is not split
            input_s, weight_s = backward_s, 0.0
        return StageTimes(forward_s, input_s, weight_s, backward_s)

    def _parts(self, stage: Stage, backward_s: float) -> tuple[float, float]:
        """The two parts of the backward of a stage that gets values from others: for inputs and for
        weights.
        """
        if not self.cut_request.splits_backward:
            return backward_s, 0.0
        walk = self.cut_request.placements[stage.placement].walk
        edges = [*self.starts, len(walk.backward_s)]
        start, stop = edges[stage.start], edges[stage.stop]
        input_s, weight_s = walk.backward_parts(start, stop)
        added_s = backward_s - sum(walk.backward_s[start:stop])  # of adding to gradients
        return input_s, weight_s + added_s

    def _ranks(self, split: Split) -> list[tuple[int, ...]]:
        """The ranks of each position."""
        cut_request = self.cut_request
        if len(cut_request.placements) == 1:
            return position_ranks(
                cut_request.placements[0].placed.plan.mesh,
                cut_request.num_positions,
                cut_request.pp_place,
            )
        # Stages that differ lie on consecutive ranks, in the order of the stages.
        found, device = [], 0
        for stage in split.stages:
            found.append(tuple(range(device, device + stage.num_devices)))
            device += stage.num_devices
        return found

    def _machines(self, ranks: Sequence[tuple[int, ...]]) -> SharedMachines | None:
        sharing, config = self._setting.hardware.device.sharing, self._setting.config
        return (
            SharedMachines.of(sharing, ranks, config.plan_ngpus, config.num_units)
            if sharing
            else None
        )

    def _more_at_end_s(self, split: Split, ranks: Sequence[tuple[int, ...]]) -> list[float]:
        """What the end of a step takes longer on each position than its stages count."""
        stages = split.stages
        on = self.schedule.placement if len(stages) > 1 else (0,)
        num_places = len(self.cut_request.placements[0].walk.program.graph.ops)
        starts = [*(self.starts[stage.start] for stage in stages), num_places]
        places: list[list[tuple[int, int]]] = [[] for _ in ranks]
        for position, edges in zip(on, itertools.pairwise(starts), strict=True):
            places[position].append(edges)
        if len(self.ends) == 1:
            return self.ends[0].more_s(ranks, places)
        # With several placements each position has one stage, and no two hold a parameter.
        chosen = dict(zip(on, (stage.placement for stage in stages), strict=True))
        return [
            self.ends[chosen[position]].more_s([own], [places[position]])[0]
            for position, own in enumerate(ranks)
        ]
