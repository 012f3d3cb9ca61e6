"""What schedules make splits wait for bounds every split, and is near the best one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from covers import spread

from shardwright.compiler.schedule.live_microbatches import held_together
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.stages.action_chains import Chains
from shardwright.policies.autodist.stages.frontier import Again
from shardwright.policies.autodist.stages.scheduled import Game, Known
from shardwright.policies.autodist.stages.stage_costs import Block, PlacedBlocks, StageCosts
from shardwright.policies.autodist.stages.stage_minima import Crossings, Least

SHAPES = [
    ("1f1b", 2, 1),
    ("1f1b", 3, 1),
    ("gpipe", 2, 2),
    ("zb_h1", 3, 1),
    ("zb_v", 2, 2),
    ("1f1b_interleaved", 2, 2),
]
"""Schedules, positions, and stages of each."""


def all_cuts(num_blocks: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield list(itertools.pairwise([0, *cuts, num_blocks]))


def random_block(rng: random.Random) -> Block:
    activation = rng.randint(1, 20)
    again = tuple(
        Again(rng.randint(0, 9), rng.randint(0, activation)) for _ in range(rng.randint(0, 2))
    )
    return Block(
        rng.randint(1, 9),
        rng.randint(1, 18),
        rng.randint(0, 5),
        rng.randint(0, 10),
        activation,
        again,
    )


def stage_times(
    blocks: list[Block], inputs_s: list[float], stage: int, again_s: float | None
) -> StageTimes:
    """``again_s``: of what is computed again; None for nothing, so that a backward may be in two
    parts.
    """
    backward_s = sum(block.backward_s for block in blocks)
    if again_s is not None:
        return StageTimes(sum(block.forward_s for block in blocks), backward_s + again_s, 0.0)
    input_s = sum(inputs_s) if stage else 0.0
    return StageTimes(sum(block.forward_s for block in blocks), input_s, backward_s - input_s)


Choice = tuple[StageTimes, float]
"""What a stage takes, and keeps of a microbatch."""


def ways(blocks: list[Block], inputs_s: list[float], stage: int) -> Iterator[Choice]:
    """What one stage may have."""
    for chosen in itertools.product(*((None, *block.again) for block in blocks)):
        again = [way for way in chosen if way is not None]
        kept = sum(block.activation_bytes for block in blocks) - sum(
            way.saved_bytes for way in again
        )
        yield (
            stage_times(
                blocks, inputs_s, stage, sum(way.time_s for way in again) if again else None
            ),
            kept,
        )


def moments_of(order: Schedule, held: list[float], kept: list[float]) -> Iterator[float]:
    """What positions hold, at all moments that count in any case."""
    for rank, moments in enumerate(held_together(order, in_any_case=True)):
        for moment in moments:
            yield sum(
                held[stage] + n * kept[stage]
                for stage, n in zip(order.stages_of(rank), moment, strict=True)
            )


def alone(order: Schedule) -> list[int]:
    """The microbatches that each stage holds in any case."""
    found = dict.fromkeys(range(order.num_stages), 0)
    for rank, moments in enumerate(held_together(order, in_any_case=True)):
        found.update(zip(order.stages_of(rank), map(max, zip(*moments, strict=True)), strict=True))
    return list(found.values())


def least_of_cut(
    order: Schedule,
    cuts: list[tuple[int, int]],
    chains: list[tuple[list[Block], list[float]]],
    memory: float,
    crossings: Crossings = (),
) -> float:
    """``chains``: by stage, the blocks of its placement, and of their backwards the part for what a
    stage gets. ``crossings``: messages between stages.
    """
    transfers: dict[tuple[int, int], float] = {}
    for stage, (there_s, back_s) in enumerate(crossings):
        if stage:
            transfers[stage - 1, stage] = float(there_s[cuts[stage]])
            transfers[stage, stage - 1] = float(back_s[cuts[stage]])
    stages = [
        (blocks[start:stop], inputs_s[start:stop])
        for (start, stop), (blocks, inputs_s) in zip(cuts, chains, strict=True)
    ]
    once, held = (
        [0.0] * order.num_ranks,
        [sum(block.held_bytes for block in blocks) for blocks, _ in stages],
    )
    for stage, (blocks, _) in enumerate(stages):
        once[order.placement[stage]] += sum(block.once_s for block in blocks)
    best = float("inf")
    for found in itertools.product(*(ways(*own, stage) for stage, own in enumerate(stages))):
        if max(used for used in moments_of(order, held, [kept for _, kept in found])) <= memory * (
            1 + 1e-9
        ):
            line = simulate(order, [times for times, _ in found], transfers)
            best = min(
                best,
                max(spans[-1].end_s + more for spans, more in zip(line.spans, once, strict=True)),
            )
    return best


def least_of_all(
    order: Schedule,
    blocks: list[Block],
    inputs_s: list[float],
    memory: float,
    crossings: Crossings = (),
) -> float:
    chains = [(blocks, inputs_s)] * order.num_stages
    return min(
        least_of_cut(order, cuts, chains, memory, crossings)
        for cuts in all_cuts(len(blocks), order.num_stages)
    )


def least_whole(order: Schedule, blocks: list[Block]) -> float:
    """Bytes that any cut needs with nothing computed again."""
    found = []
    for cuts in all_cuts(len(blocks), order.num_stages):
        held = [sum(block.held_bytes for block in blocks[start:stop]) for start, stop in cuts]
        kept = [sum(block.activation_bytes for block in blocks[start:stop]) for start, stop in cuts]
        found.append(max(used for used in moments_of(order, held, kept)))
    return min(found)


def least(
    order: Schedule,
    blocks: list[Block],
    inputs_s: list[float],
    memory: float,
    num_devices: int = 1,
    crossings: Crossings = (),
) -> Least:
    tables = StageCosts(PlacedBlocks(num_devices, blocks), order.num_microbatches, False)
    return Least(
        tables,
        np.zeros((len(blocks) + 1, len(blocks) + 1, 2)),
        inputs_s,
        alone(order),
        memory,
        crossings,
    )


def test_a_split_whose_stages_fit_is_told_from_none() -> None:
    """The least memory that is enough for the stages of some cut, each by itself, is enough, and
    none below.
    """
    for seed in range(20):
        rng = random.Random(seed)
        blocks = [random_block(rng) for _ in range(rng.randint(2, 6))]
        counts = [rng.randint(1, 4) for _ in range(rng.randint(2, len(blocks)))]

        def needed(span: tuple[int, int], count: int, blocks: list[Block] = blocks) -> float:
            return sum(
                block.held_bytes
                + count
                * (
                    block.activation_bytes
                    - max((way.saved_bytes for way in block.again), default=0.0)
                )
                for block in blocks[slice(*span)]
            )

        memory = min(max(map(needed, cuts, counts)) for cuts in all_cuts(len(blocks), len(counts)))
        costs = StageCosts(PlacedBlocks(1, blocks), 4, False)
        assert costs.may_fit(counts, memory) and not costs.may_fit(counts, memory - 0.5)


def random_crossings(rng: random.Random, order: Schedule, num_blocks: int) -> Crossings:
    """Messages of other lengths at every boundary; none between stages of one rank."""
    nothing = np.zeros((num_blocks + 1, num_blocks + 1))
    found = [(nothing, nothing)]
    for before, own in itertools.pairwise(order.placement):
        there, back = (
            np.array([[rng.uniform(0.5, 9.0) for _ in nothing] for _ in nothing]) for _ in range(2)
        )
        found.append((nothing, nothing) if before == own else (there, back))
    return found


def played(game: Game, enough_s: float) -> float:
    """The bound of a whole game, in turns."""
    while game.bound_s < enough_s and not game.is_over:
        before_s = game.bound_s
        game.play(enough_s, 8)
        assert game.bound_s >= before_s
    return game.bound_s


def bound_of(
    order: Schedule,
    blocks: list[Block],
    inputs_s: list[float],
    memory: float,
    enough_s: float = float("inf"),
    known: Known | None = None,
    crossings: Crossings = (),
) -> float:
    placed = least(order, blocks, inputs_s, memory, crossings=crossings)
    return played(Game(Chains(order), [placed], order.num_stages, known), enough_s)


@pytest.mark.parametrize("shape", spread(SHAPES, 2, whole=True), ids=str)
@pytest.mark.parametrize("memory_binds", [False, True])
def test_no_split_on_a_schedule_is_below_its_bound(
    shape: tuple[str, int, int], memory_binds: bool
) -> None:
    schedule, positions, chunks = shape
    bounded = 0
    for seed in range(6):
        rng = random.Random(seed)
        num_microbatches = (
            positions * rng.randint(1, 3) if SCHEDULES[schedule].whole_rounds else rng.randint(1, 5)
        )
        order = generate(schedule, positions, num_microbatches, chunks)
        blocks = [random_block(rng) for _ in range(rng.randint(positions * chunks, 4))]
        inputs_s = [0.0, *(block.backward_s * rng.uniform(0.2, 0.8) for block in blocks[1:])]
        memory = (
            rng.uniform(0.9, 0.99) * least_whole(order, blocks) if memory_binds else float("inf")
        )
        best = least_of_all(order, blocks, inputs_s, memory)
        if best < float("inf"):
            bound = bound_of(order, blocks, inputs_s, memory)
            assert 0 < bound <= best * (1 + 1e-9)
            # Stages that only worse splits have are left out.
            for enough_s in (
                0.5 * bound,
                1.01 * best,
                1.2 * best,
            ):
                assert bound_of(order, blocks, inputs_s, memory, enough_s) <= best * (1 + 1e-9)
            # What was found for other blocks, and another memory, holds here, too.
            known, others = Known(), [random_block(rng) for _ in blocks]
            bound_of(order, others, inputs_s, 2 * memory, known=known)
            assert bound_of(order, blocks, inputs_s, memory, known=known) <= best * (1 + 1e-9)
            bounded += 1
            if seed % 3:
                continue
            # With messages between stages, of which each counts.
            crossings = random_crossings(rng, order, len(blocks))
            best = least_of_all(order, blocks, inputs_s, memory, crossings)
            for enough_s in (float("inf"), 1.01 * best):
                with_messages = bound_of(
                    order, blocks, inputs_s, memory, enough_s, crossings=crossings
                )
                assert with_messages <= best * (1 + 1e-9)
                assert enough_s < float("inf") or bound < with_messages
    assert bounded


def test_a_bound_is_at_once_what_was_known_of_a_placement_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, known = generate("zb_v", 4, 16, 2), Known()
    inputs_s = [1.0] * 32
    first = bound_of(order, [Block(1.0, 2.0)] * 32, inputs_s, float("inf"), known=known)
    monkeypatch.setattr(Chains, "longest", None)  # no chain is looked for any more
    alike = [Block(1.0, 2.001)] * 32
    assert bound_of(order, alike, inputs_s, float("inf"), 0.999 * first, known) >= 0.999 * first


@pytest.mark.parametrize("seed", range(6))
def test_no_split_into_stages_that_differ_is_below_its_bound(seed: int) -> None:
    """Stages are of two placements, on one device and on two, on four devices in all."""
    rng = random.Random(seed)
    order = generate(rng.choice(["1f1b", "zb_h1"]), 3, rng.randint(1, 4))
    sizes, count = (1, 2), 4
    chains = []
    for _ in sizes:
        blocks = [random_block(rng) for _ in range(count)]
        chains.append(
            (blocks, [0.0, *(block.backward_s * rng.uniform(0.2, 0.8) for block in blocks[1:])])
        )
    memory = rng.uniform(0.5, 1.5) * sum(
        block.held_bytes + 2 * block.activation_bytes for block in chains[0][0]
    )
    best = min(
        least_of_cut(order, cuts, [chains[number] for number in numbers], memory)
        for cuts in all_cuts(count, 3)
        for numbers in itertools.product(range(2), repeat=3)
        if sum(sizes[number] for number in numbers) == 4
    )
    placements = [
        least(order, *chain, memory, size) for chain, size in zip(chains, sizes, strict=True)
    ]
    free, near, nearer, same = (
        played(Game(Chains(order), placements, 4), factor * best)
        for factor in (math.inf, 1.5, 1.01, 1.0)
    )
    assert (best == float("inf")) == (free == float("inf"))
    assert best == float("inf") or 0.5 * best < free
    assert max(free, near, nearer, same) <= best * (1 + 1e-9)


def test_averages_have_no_stage_with_which_every_split_is_too_long() -> None:
    """Four stages on nine devices, one of them on six. An average of splits may give each of them
    the six in turn, with nearly all blocks.
    """
    order, blocks = generate("zb_h1", 4, 64), 40
    memory, inputs_s = float("inf"), [1.0] * blocks
    placements = [
        least(order, [Block(1.0 / n, 2.0 / n)] * blocks, [s / n for s in inputs_s], memory, n)
        for n in (1, 6)
    ]
    least_s = 64 * 3.0 * blocks / 9
    free = played(Game(Chains(order), placements, 9), float("inf"))
    bound = played(Game(Chains(order), placements, 9), 1.1 * least_s)
    assert free < 0.75 * least_s
    assert 1.2 * free < bound <= 1.1 * least_s


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b_interleaved", 2), ("zb_v", 2)])
def test_stages_of_one_position_cannot_all_have_its_memory(schedule: str, chunks: int) -> None:
    """Equal blocks, of which a stage alone need compute next to nothing again."""
    order = generate(schedule, 2, 16, chunks)
    blocks = [Block(1.0, 2.0, 0.0, 0.0, 1.0, (Again(1.0, 1.0),))] * 32
    inputs_s = [1.0] * 32
    most = max(
        8 * sum(moment) for moments in held_together(order, in_any_case=True) for moment in moments
    )
    free, bound = (
        bound_of(order, blocks, inputs_s, memory) for memory in (float("inf"), 0.5 * most)
    )
    assert free < 16 * 16 * 3.0 * 1.1
    assert bound > 1.05 * free
    step_s = max(
        spans[-1].end_s for spans in simulate(order, [StageTimes(8.0, 24.0, 0.0)] * 4).spans
    )
    assert bound <= step_s, "all computed again, which takes no memory"


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [("1f1b", 1, 3 / 16), pytest.param("1f1b_interleaved", 2, 3 / 32, marks=pytest.mark.slow)],
)
def test_what_ranks_wait_for_is_in_the_bound(schedule: str, chunks: int, bubble: float) -> None:
    """The bound of equal blocks has the bubble of the papers, but for what an average of splits
    avoids.
    """
    blocks = [Block(1.0, 2.0)] * 64
    free = bound_of(generate(schedule, 4, 16, chunks), blocks, [1.0] * 64, float("inf"))
    step_s = 16 * 16 * 3.0 * (1 + bubble)
    assert step_s * 0.94 < free <= step_s * (1 + 1e-9)
    assert free > 16 * 16 * 3.0 * (1 + bubble / 3)


def test_the_bound_of_one_microbatch_is_all_that_comes_one_after_the_other() -> None:
    """Forwards of all stages and their gradients, of which none but the first stage's and those of
    weights can wait.
    """
    blocks, inputs_s = [Block(1.0, 2.0)] * 8, [0.0, *[1.0] * 7]
    assert bound_of(generate("1f1b", 2, 1), blocks, inputs_s, float("inf")) == pytest.approx(
        24.0, rel=1e-3
    )
    given = generate("zb_v", 2, 1, 2), blocks[:6], inputs_s[:6], float("inf")
    best = least_of_all(*given)
    assert 0.9 * best < bound_of(*given) <= best
