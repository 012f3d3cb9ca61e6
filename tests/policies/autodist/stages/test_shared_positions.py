"""What stages compute again on a position that they share: it fits at every moment, and nothing
cheaper does.
"""

from __future__ import annotations

import itertools
import random

import pytest

from shardwright.compiler.schedule.published import generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.policies.autodist.stages.frontier import Again
from shardwright.policies.autodist.stages.shared_positions import Positions
from shardwright.policies.autodist.stages.split_chain import Stage
from shardwright.policies.autodist.stages.stage_costs import Block, PlacedBlocks, StageCosts
from shardwright.runtime.schedule_actions import ActionKind

Choice = list[int | None]
"""The way in which each block is computed again."""


def tables_of(rng: random.Random, num_blocks: int) -> StageCosts:
    blocks = []
    for _ in range(num_blocks):
        activation = rng.randint(2, 20)
        again = tuple(
            Again(rng.randint(1, 9), rng.randint(1, activation)) for _ in range(rng.randint(0, 2))
        )
        blocks.append(Block(1.0, 2.0, 0.0, rng.randint(0, 10), activation, again))
    return StageCosts(PlacedBlocks(1, blocks), 4, False)


def stages_of(rng: random.Random, num_blocks: int, num_stages: int) -> list[Stage]:
    edges = [0, *sorted(rng.sample(range(1, num_blocks), num_stages - 1)), num_blocks]
    return [Stage(start, stop, 1) for start, stop in itertools.pairwise(edges)]


def peaks(
    schedule: Schedule, stages: list[Stage], tables: StageCosts, choice: Choice
) -> list[float]:
    """The most bytes by position, action by action."""
    kept = []
    for stage in stages:
        ways = [(tables.blocks[block], choice[block]) for block in range(stage.start, stage.stop)]
        kept.append(
            sum(
                b.activation_bytes - (0 if way is None else b.again[way].saved_bytes)
                for b, way in ways
            )
        )
    found = []
    for rank, actions in enumerate(schedule.actions):
        held = peak = sum(
            float(tables.held_bytes[stages[i].start, stages[i].stop])
            for i in schedule.stages_of(rank)
        )
        for action in actions:
            held += kept[action.stage] * (action.kind is ActionKind.FORWARD)
            held -= kept[action.stage] * (
                action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
            )
            peak = max(peak, held)
        found.append(peak)
    return found


def choice_of(stages: tuple[Stage, ...], num_blocks: int) -> Choice:
    ways = {block: way for stage in stages for block, way in stage.recomputed}
    return [ways.get(block) for block in range(num_blocks)]


def seconds(tables: StageCosts, choice: Choice) -> float:
    return sum(
        block.again[way].time_s
        for block, way in zip(tables.blocks, choice, strict=True)
        if way is not None
    )


@pytest.mark.parametrize(
    "shape", [("1f1b", 3, 1), ("1f1b_interleaved", 2, 2), ("zb_v", 2, 2), ("zb_h1", 3, 1)], ids=str
)
def test_what_is_computed_again_fits_and_nothing_cheaper_does(shape: tuple[str, int, int]) -> None:
    schedule, binds, best = generate(*shape[:2], 4, shape[2]), 0, []
    for seed in range(8):
        rng = random.Random(seed)
        tables, stages = tables_of(rng, 6), stages_of(rng, 6, schedule.num_stages)
        free = max(peaks(schedule, stages, tables, [None] * 6))
        memory = free * rng.uniform(0.65, 1.0)
        positions = Positions([tables], schedule, memory)
        every = itertools.product(*([None, *range(len(block.again))] for block in tables.blocks))
        listed = [(choice, max(peaks(schedule, stages, tables, list(choice)))) for choice in every]
        fitting = [
            seconds(tables, list(choice)) for choice, peak in listed if peak <= memory * (1 + 1e-12)
        ]
        assert positions.least_bytes(stages) == pytest.approx(min(peak for _, peak in listed))
        found = positions.fitted(stages)
        assert (found is None) == (not fitting)
        if found is None:
            continue
        choice = choice_of(found[0], 6)
        assert found[1] == pytest.approx(max(peaks(schedule, stages, tables, choice)))
        assert found[1] <= memory * (1 + 1e-12)
        assert [(s.start, s.stop) for s in found[0]] == [(s.start, s.stop) for s in stages]
        assert seconds(tables, choice) >= min(fitting) - 1e-9
        binds += free > memory
        best.append(seconds(tables, choice) == pytest.approx(min(fitting)))
    assert binds > 2
    assert sum(best) >= len(best) - (shape[2] > 1), (
        "of several fullest moments the choice need not be the best"
    )


def test_a_stage_may_take_more_than_an_even_share() -> None:
    """The first keeps four times what the second does; with half of the memory for each it would
    not fit.
    """
    blocks = [Block(1.0, 2.0, activation_bytes=40.0), *[Block(1.0, 2.0, activation_bytes=10.0)] * 3]
    schedule = generate("1f1b_interleaved", 2, 4, 2)
    stages = [Stage(index, index + 1, 1) for index in range(4)]
    (peak, _) = peaks(
        schedule, stages, tables := StageCosts(PlacedBlocks(1, blocks), 4, False), [None] * 4
    )
    assert Positions([tables], schedule, peak).fitted(stages) == (tuple(stages), peak)
    assert Positions([tables], schedule, peak - 1.0).fitted(stages) is None


def test_layers_of_two_kinds_in_turn_are_chosen_as_if_those_alike_stood_together() -> None:
    rng = random.Random(2)
    kinds = []
    for _ in range(2):
        kept = rng.uniform(5e9, 8e9)
        ways = tuple(
            Again(rng.uniform(0.2, 0.4) * part, kept * part * rng.uniform(0.8, 1.0))
            for part in (0.3, 0.5, 0.9)
        )
        kinds.append(Block(1.0, 2.0, 0.0, 2e9, kept, ways))
    schedule = generate("1f1b_interleaved", 4, 24, 4)
    stages = [Stage(start, start + 8, 1) for start in range(0, 8 * schedule.num_stages, 8)]
    found = []
    # The stages have four layers of each kind, in turn or not.
    for own in ([0, 1] * 4, [0] * 4 + [1] * 4):
        blocks = [kinds[kind] for kind in own * schedule.num_stages]
        tables = StageCosts(PlacedBlocks(1, blocks), 24, False)
        memory = 1.3 * Positions([tables], schedule, 0.0).least_bytes(stages)
        fitted = Positions([tables], schedule, memory).fitted(stages)
        assert fitted is not None and fitted[1] <= memory
        found.append(seconds(tables, choice_of(fitted[0], len(blocks))))
    assert found[0] == pytest.approx(found[1], rel=1e-12) and found[0] > 0
