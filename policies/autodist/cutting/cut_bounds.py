"""What no cut of a request takes less than, and whether any can fit: cheaper than cutting.

Example: two positions and a placement whose layers take 8 s of a step. No cut takes less than 4 s;
as positions wait by 1F1B, with four microbatches none takes less than 4.57 s. If the best plan
takes 4.5 s, the request need not be cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.policies.autodist.candidates.lower_bounds import share_despite_overlap
from shardwright.policies.autodist.candidates.results import CutRequest
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.cutting.request_blocks import RequestBlocks, alone_of
from shardwright.policies.autodist.stages.action_chains import Chains
from shardwright.policies.autodist.stages.scheduled import Game, Known, ScheduledBound
from shardwright.policies.autodist.stages.split_chain import may_take_less
from shardwright.policies.autodist.stages.stage_costs import Block, PlacedBlocks, StageCosts
from shardwright.policies.autodist.stages.stage_minima import Least

Waits = dict[tuple[NamedSchedule, int], tuple[Chains, Known]]
"""The chains of actions, by schedule and number of positions, and what is known of them."""

MAX_ENTRIES = 60_000_000
"""How many numbers the tables of one placement may have for a bound: half a GB. More are needed
where hundreds of positions cut layers finely, as 256 do with 128 layers: 16 GB and more.
"""


class CutBounds:
    """The bounds of the cuts of requests on one graph."""

    def __init__(self, blocks: RequestBlocks, waits: Waits | None = None) -> None:
        self.blocks, self.space = blocks, blocks.space
        self.waits: Waits = {} if waits is None else waits

    def may_fit(self, cut_request: CutRequest) -> bool:
        """Whether some cut with one placement has stages that fit, each as if the memory of its
        position were its own. A bound says more, and takes longer to set up.
        """
        count, memory_bytes = self.space.num_microbatches, self.space.memory_bytes
        alone = alone_of(cut_request, count)
        for starts, layers in self.blocks.chains(cut_request):
            costs = self.blocks.costs(cut_request, starts, layers)
            (placed_blocks,) = self.blocks.placed(cut_request, costs)
            if StageCosts(placed_blocks, count, False).may_fit(alone, memory_bytes):
                return True
        return False

    def may_take_less(self, cut_request: CutRequest, below_s: float) -> bool:
        """Whether some cut may take less than so many seconds, memory and messages aside: as its
        stages have whole blocks, and wait for the first microbatch. Soon known.
        """
        for starts, layers in self.blocks.chains(cut_request):
            costs = self.blocks.costs(cut_request, starts, layers)
            if may_take_less(
                self.blocks.placed(cut_request, costs),
                self.blocks.num_devices(cut_request),
                cut_request.num_stages,
                self.space.num_microbatches,
                below_s,
                splits_backward=cut_request.splits_backward,
                between=self.blocks.messages(cut_request, starts),
            ):
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
        alone, memory = alone_of(cut_request, count), self.space.memory_bytes
        games: list[Game] = []
        # For each way to see the model as blocks: the least of what its stages can have.
        for starts, layers in self.blocks.chains(cut_request):
            if Least.num_entries(len(starts), alone) > MAX_ENTRIES:
                return ScheduledBound([])  # the least game counts, and it may be this one
            costs = self.blocks.costs(cut_request, starts, layers)
            messages = self.blocks.messages(cut_request, starts)
            placed_blocks = self.blocks.placed(cut_request, costs)
            placements = []
            for number, (lowered, placement) in enumerate(
                zip(cut_request.placements, placed_blocks, strict=True)
            ):
                inputs_s = self.blocks.inputs_s(lowered.walk, starts)
                stage_costs = StageCosts(placement, count, False)
                relief_s = messages.relief_by_side_s(number)
                # Stages that differ may lie anywhere, so that what a message takes is not known.
                crossings = (
                    messages.crossings(number, schedule.num_stages)
                    if len(placed_blocks) == 1
                    else ()
                )
                placements.append(Least(stage_costs, relief_s, inputs_s, alone, memory, crossings))
            games.append(Game(waits, placements, self.blocks.num_devices(cut_request), known))
        # Overlap of communication can make a step shorter than its actions are, by that share.
        config = cut_request.placements[0].walk.setting.config
        share = share_despite_overlap(
            config, cut_request.num_positions, named_schedule.chunks, count
        )
        return ScheduledBound(games, share)

    def could_help(self, cut_request: CutRequest, sizes: Sequence[int]) -> bool:
        """Whether a cut request could come below its ``below_s`` with placements on ``sizes``
        ranks beside its own, if more ranks never take less time in all than the placements
        do.
        """
        # If no chain gets below, placements on other sizes are not worth making.
        count = self.space.num_microbatches
        for starts, layers in self.blocks.chains(cut_request):
            # No placement on other ranks has been made yet. Each is assumed to be as good, rank by
            # rank, as the best one known, which no real one is likely to beat.
            costs = self.blocks.costs(cut_request, starts, layers)
            placements = self.blocks.placed(cut_request, costs)
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
