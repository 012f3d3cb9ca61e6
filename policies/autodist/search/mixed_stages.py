"""Pipelines whose stages differ: how many there are, on how many ranks each may be, and which
placements each may choose.

Example: six ranks have no placement of the model on four of them so far, as four does not divide
six. ``one rank | one rank | tp=4`` may be better than ``pp=3 x tp=2`` where the last stage has a
large head. So the model is placed on four ranks, too, and the chain of blocks is cut once more,
where every stage may take any of the placements on one, two and four ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from shardwright.compiler.ir.graph import IRGraph
from shardwright.policies.autodist.candidates.mesh_requests import (
    PlacedMesh,
    PlacedModel,
    mesh_requests,
)
from shardwright.policies.autodist.candidates.meshes import stage_sizes
from shardwright.policies.autodist.candidates.results import Candidate, CutRequest, LoweredPlacement
from shardwright.policies.autodist.candidates.titles import mesh_title, scheduled_title
from shardwright.policies.autodist.search.auditing import Audits
from shardwright.policies.autodist.search.search_state import SearchState
from shardwright.policies.autodist.stages.chain import layer_blocks
from shardwright.policies.autodist.stages.frontier import Array

MAX_POSITIONS = 8
"""The most stages that may differ."""

AUDITS = 2
"""How many of the plans whose stages differ are lowered and audited."""

NEAR = 1.01
"""How much longer than the best of them others may be predicted to take."""

ABOVE_SCHEDULE = 1.05
"""How much longer the formula that stages are cut by may say a step takes than its schedule does:
the formula lets every stage wait for the slowest.
"""

USEFUL = 1e-3
"""A second placement is added if, block by block, it can take that share less than the first."""


class MixedStages:
    """The part of a search that lets stages differ."""

    def __init__(self, state: SearchState, audits: Audits) -> None:
        self.state, self.audits = state, audits
        self.graph, self.config, self.space = state.graph, state.config, state.space
        self.cutter = state.cutter
        self.result, self.placements = state.result, state.placements

    def run(self, placed_meshes: Sequence[PlacedMesh]) -> None:
        """Pipelines whose stages differ, with the placements that others were made of, as far as
        they may be better.
        """
        cut_requests = self._cut_requests()
        if not cut_requests or self.state.is_late():
            return
        self._lower_more(placed_meshes, cut_requests)
        best, whole = self.result.best, self.config.plan_ngpus
        # Stages are smaller than the whole: they choose among placements on fewer ranks.
        smaller = [lowered for lowered in self.placements if lowered.walk.mesh.size < whole]
        placements = chosen_placements(
            self.graph, smaller, memory_binds=best is None or bool(best.plan.recompute)
        )
        tried: list[Candidate] = []
        # One placement is no choice.
        for cut_request in cut_requests if len(placements) > 1 else ():
            if self.state.is_late():
                break
            below = min(
                [
                    ABOVE_SCHEDULE * cut_request.below_s,
                    *(NEAR * candidate.modelled_s for candidate in tried),
                ]
            )
            candidate = self.state.cut(
                replace(cut_request, placements=placements, below_s=below), self.space.memory_bytes
            )
            if candidate is None:
                continue
            # Stages really differ: a candidate.
            if len({id(placed) for placed in candidate.placed}) > 1:
                tried.append(candidate)
            else:  # it is known by now, and none that differ are better
                self.result.bound(
                    replace(cut_request, placements=placements), candidate.split_bound_s
                )
        # Only these are audited now; the others wait.
        rest, self.result.others = self.result.others, tried
        try:
            self.audits.audit_promising(AUDITS)
        finally:
            self.result.others += rest

    def _cut_requests(self) -> list[CutRequest]:
        """Numbers of stages and schedules, without placements."""
        if not self.space.mixed or not self.state.may_have(2):
            return []
        most = min(MAX_POSITIONS, self.config.plan_ngpus)
        numbers = (
            range(2, most + 1) if self.space.num_positions is None else (self.space.num_positions,)
        )
        # Nothing slower than the best plan is of interest.
        best = self.result.best
        below = self.space.worth_s
        if best is not None:
            below = min(below, max(best.step_s, best.predicted_s, best.modelled_s))
        found: list[CutRequest] = []
        for number in numbers:
            if not 1 < number <= self.config.plan_ngpus:
                continue
            # A position with several stages of different placements is not searched.
            for named_schedule in self.state.named_schedules(number):
                if named_schedule.chunks == 1:
                    title = scheduled_title(f"{number} stages that may differ", named_schedule)
                    found.append(CutRequest(title, (), number, named_schedule, below_s=below))
        return found

    def _lower_more(
        self, placed_meshes: Sequence[PlacedMesh], cut_requests: Sequence[CutRequest]
    ) -> None:
        """Placements that nothing was made of so far, also on numbers of ranks that equal positions
        cannot have: if some as good as the others, in seconds of all their ranks, could help.
        """
        placements, whole = tuple(self.placements), self.config.plan_ngpus
        known = {lowered.placed.plan.mesh for lowered in placements}
        unused = [
            placed_mesh
            for placed_mesh in placed_meshes
            if placed_mesh.mesh.size < whole and placed_mesh.fastest.plan.mesh not in known
            # Sizes such as 3 of 8, which equal positions cannot have.
        ]
        opened = {placed_mesh.mesh.size for placed_mesh in placed_meshes}
        further = [
            size
            for size in stage_sizes(whole)
            if size not in opened and self.space.meshes.get(size)
        ]
        sizes = sorted({*further, *(placed_mesh.mesh.size for placed_mesh in unused)})
        # Even perfect placements on these sizes would not help: spare the time.
        if placements and not any(
            self.cutter.bounds.could_help(replace(cut_request, placements=placements), sizes)
            for cut_request in cut_requests
        ):
            return
        self._lower_all(placed_mesh.fastest for placed_mesh in unused)
        best = self.result.best
        # For the memory too, where that binds.
        most = 2 if best is None or best.plan.recompute else 1
        for mesh in itertools.chain.from_iterable(self.space.meshes[size] for size in further):
            listed = mesh_requests(
                self.graph, self.space, max(2, whole // mesh.size), mesh, tuple(range(mesh.size))
            )
            placed = [
                self.state.placed(mesh_request, mesh_title(1, mesh))
                for mesh_request in itertools.islice(listed, most)
                if not self.state.is_late()
            ]
            self._lower_all(filter(None, placed))

    def _lower_all(self, placements: Iterable[PlacedModel]) -> None:
        for placed in placements:
            if not self.state.is_late():
                self.state.lowered(placed, tuple(range(placed.plan.mesh.size)))


def chosen_placements(
    graph: IRGraph, placements: Sequence[LoweredPlacement], *, memory_binds: bool
) -> tuple[LoweredPlacement, ...]:
    """The placements that stages may choose from.

    For each number of ranks these are the best placement for the whole model; the one that beats it
    by most where each block may choose between the two; and where memory binds the one that holds
    least.
    """
    starts = layer_blocks(graph)[0]
    found: list[LoweredPlacement] = []
    by_size: dict[int, list[LoweredPlacement]] = {}
    # By number of ranks.
    for lowered in placements:
        by_size.setdefault(lowered.walk.mesh.size, []).append(lowered)
    for _, listed in sorted(by_size.items()):
        # ``[blocks]`` of each placement, in seconds.
        seconds = [_block_seconds(lowered, starts) for lowered in listed]
        best = min(range(len(listed)), key=lambda index: float(seconds[index].sum()))
        # The seconds where each block has the faster of the two.
        joint = [float(np.minimum(seconds[best], other).sum()) for other in seconds]
        second = min(range(len(listed)), key=lambda index: joint[index])
        chosen = {best: None}
        if joint[second] < (1 - USEFUL) * joint[best]:
            chosen[second] = None
        if memory_binds:
            chosen[min(range(len(listed)), key=lambda index: _held_bytes(listed[index]))] = None
        found += [listed[index] for index in chosen]
    return tuple(found)


def _block_seconds(lowered: LoweredPlacement, starts: Sequence[int]) -> Array:
    """The seconds of each block for one microbatch, with its share of what comes once per step."""
    walk = lowered.walk
    times = np.array(walk.forward_s) + np.array(walk.backward_s)
    for parameter in walk.parameters:
        times[parameter.places[0]] += (
            parameter.added_s + parameter.once_s / walk.setting.num_microbatches
        )
    seconds: Array = np.add.reduceat(times, np.array(starts))
    return seconds


def _held_bytes(lowered: LoweredPlacement) -> float:
    walk = lowered.walk
    return sum(parameter.held_bytes for parameter in walk.parameters) + walk.kept.first(
        0, len(walk.forward_s)
    )
