"""What cuts of a request are made of: the blocks that the model is seen as, what these cost in its
placements, and the messages between them. What requests have in common is worked out once.

Example: three layers of 4 s and a head of 6 s. As layers they are four blocks; seen finely, nine
of about 2 s. 1F1B and ``zb_h1`` are cut from the same blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.schedule.live_microbatches import held_together
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.results import CutRequest
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.cutting.model_chains import Chain, ModelChains
from shardwright.policies.autodist.stages.block_costs import BlockCosts, block_costs
from shardwright.policies.autodist.stages.boundaries import Messages, RanksOf
from shardwright.policies.autodist.stages.chain import Part
from shardwright.policies.autodist.stages.stage_costs import PlacedBlocks
from shardwright.policies.autodist.stages.step_ends import StepEnds
from shardwright.policies.autodist.stages.walk import Walk

KEPT = 8
"""The number of chains whose prices of boundaries are kept: the schedules of a placement are tried
one after the other.
"""


class RequestBlocks:
    """The blocks of requests on one graph. ``model_chains``: of that graph."""

    def __init__(
        self, graph: PlannableGraph, space: SearchSpace, model_chains: ModelChains | None = None
    ) -> None:
        self.graph, self.space = graph, space
        self.model_chains = model_chains or ModelChains(graph)
        self._messages: dict[tuple[tuple[Walk, ...], tuple[int, ...]], Messages] = {}
        self._costs: dict[tuple[Walk, tuple[int, ...], bool], BlockCosts] = {}
        self._fine: dict[tuple[Walk, int], list[int]] = {}
        self._inputs_s: dict[tuple[Walk, tuple[int, ...]], list[float]] = {}
        self._ends: dict[Walk, StepEnds] = {}

    def messages(self, cut_request: CutRequest, starts: Sequence[int]) -> Messages:
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

    def inputs_s(self, walk: Walk, starts: Sequence[int]) -> list[float]:
        """The least seconds of inputs' gradients by block; all schedules share them."""
        key = walk, tuple(starts)
        if key not in self._inputs_s:
            self._inputs_s[key] = _inputs_s(walk, starts)
        return self._inputs_s[key]

    def ends(self, cut_request: CutRequest) -> list[StepEnds]:
        """The ends of steps in each of the placements; all schedules share them."""
        walks = [lowered.walk for lowered in cut_request.placements]
        return [self._ends.setdefault(walk, StepEnds(walk)) for walk in walks]

    def num_devices(self, cut_request: CutRequest) -> int:
        """The devices of all stages. Several stages on one position count each for itself."""
        first = cut_request.placements[0].walk
        several = len(cut_request.placements) > 1
        return (
            first.setting.config.plan_ngpus if several else cut_request.num_stages * first.mesh.size
        )

    def placed(self, cut_request: CutRequest, costs: Sequence[BlockCosts]) -> list[PlacedBlocks]:
        """The blocks in each of the placements."""
        shares = len(cut_request.placements) == 1
        return [
            found.placed(lowered.walk.mesh.size, shares=shares)
            for lowered, found in zip(cut_request.placements, costs, strict=True)
        ]

    def chains(self, cut_request: CutRequest) -> Sequence[Chain]:
        """The ways to see the model as blocks, the coarsest first: by layers, which may be computed
        again; and where nothing is, by the numbered modules inside them, and finely.
        """
        # The user has said where stages begin.
        if self.space.stage_starts is not None:
            position = {op.name: index for index, op in enumerate(self.graph.ops)}
            return [([0, *(position[name] for name in self.space.stage_starts)], {})]
        walk, num_stages = cut_request.placements[0].walk, cut_request.num_stages
        by_layer, layers = self.model_chains.by_layer
        found: list[Chain] = []
        # Nothing is computed again: blocks may be cut anywhere.
        is_free = not self.space.recompute  # no module is named that must not be cut
        if len(by_layer) >= num_stages and (layers or (is_free and len(by_layer) > 1)):
            found.append((by_layer, layers))
        if is_free:
            found += [
                (starts, {}) for starts in self.model_chains.nested if len(starts) >= num_stages
            ]
            # Cutting finely depends on the operators' times, so it is done once for each placement.
            if (walk, num_stages) not in self._fine:
                share = self.space.block_share
                self._fine[walk, num_stages] = self.model_chains.fine(walk, num_stages, share)
            found.append((self._fine[walk, num_stages], {}))
        return found

    def costs(
        self, cut_request: CutRequest, starts: Sequence[int], layers: Mapping[int, str]
    ) -> list[BlockCosts]:
        """The costs of the blocks of a chain, by placement."""
        return [self._costs_of(found.walk, starts, layers) for found in cut_request.placements]

    def _costs_of(self, walk: Walk, starts: Sequence[int], layers: Mapping[int, str]) -> BlockCosts:
        """The costs of the blocks; what the user wants computed again is, in all of them."""
        named = self.space.recompute

        def is_named(part: Part) -> bool:
            return any(_matches(part.path, name) for name in named or ())

        # Costs of blocks are asked for again and again, for other schedules on the same cut.
        key = walk, tuple(starts), bool(layers)
        if key not in self._costs:
            parts = self.model_chains.layer_parts if layers else {}
            self._costs[key] = block_costs(walk, starts, parts, None if named is None else is_named)
        return self._costs[key]


def _inputs_s(walk: Walk, starts: Sequence[int]) -> list[float]:
    """The least seconds of each block's backward that a stage which gets values needs for their
    gradients. They are those behind the first block, of which all that a later stage gets is made.
    """
    if len(starts) == 1:
        return [0.0]
    sums = [walk.backward_parts(starts[1], stop)[0] for stop in (*starts[1:], len(walk.backward_s))]
    return [0.0, *(after - before for before, after in itertools.pairwise(sums))]


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


def alone_of(cut_request: CutRequest, num_microbatches: int) -> list[int]:
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


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatchcase(a, b) for a, b in zip(parts, wanted, strict=True)
    )
