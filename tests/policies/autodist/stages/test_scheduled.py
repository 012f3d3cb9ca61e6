"""What schedules make splits wait for bounds every split, and is near the best one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from shardwright.compiler.schedule.generate import SCHEDULES, generate
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.stages.frontier import Again
from shardwright.policies.autodist.stages.menu import Block, Menu, Tables
from shardwright.policies.autodist.stages.scheduled import Chains, Least, least_step_s

SHAPES = [("1f1b", 2, 1), ("1f1b", 3, 1), ("gpipe", 2, 2), ("zb_h1", 3, 1), ("zb_v", 2, 2), ("1f1b_interleaved", 2, 2)]
"""Schedules, positions, and stages of each."""


def all_cuts(num_blocks: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield list(itertools.pairwise([0, *cuts, num_blocks]))


def random_block(rng: random.Random) -> Block:
    activation = rng.randint(1, 20)
    again = tuple(Again(rng.randint(0, 9), rng.randint(0, activation)) for _ in range(rng.randint(0, 2)))
    return Block(rng.randint(1, 9), rng.randint(1, 18), rng.randint(0, 5), rng.randint(0, 10), activation, again)


def stage_times(blocks: list[Block], inputs_s: list[float], stage: int, again_s: float | None) -> StageTimes:
    """``again_s``: of what is computed again; None for nothing, so that a backward may be in two parts."""
    backward_s = sum(block.backward_s for block in blocks)
    if again_s is not None:
        return StageTimes(sum(block.forward_s for block in blocks), backward_s + again_s, 0.0)
    input_s = sum(inputs_s) if stage else 0.0
    return StageTimes(sum(block.forward_s for block in blocks), input_s, backward_s - input_s)


def ways(blocks: list[Block], inputs_s: list[float], stage: int, count: int, memory: float) -> Iterator[StageTimes]:
    """What one stage may take, within its memory."""
    for chosen in itertools.product(*((None, *block.again) for block in blocks)):
        again = [way for way in chosen if way is not None]
        used = sum(block.held_bytes + count * block.activation_bytes for block in blocks)
        if used - count * sum(way.saved_bytes for way in again) <= memory * (1 + 1e-9):
            yield stage_times(blocks, inputs_s, stage, sum(way.time_s for way in again) if again else None)


def least_of_all(
    schedule: str, positions: int, chunks: int, num_microbatches: int, blocks: list[Block], inputs_s: list[float],
    counts: list[int], memory: float,
) -> float:  # fmt: skip
    order = generate(schedule, positions, num_microbatches, chunks)
    best = float("inf")
    for cuts in all_cuts(len(blocks), positions * chunks):
        once = [0.0] * positions
        for stage, (start, stop) in enumerate(cuts):
            once[order.placement[stage]] += sum(block.once_s for block in blocks[start:stop])
        each = [
            list(ways(blocks[start:stop], inputs_s[start:stop], stage, counts[stage], memory))
            for stage, (start, stop) in enumerate(cuts)
        ]
        for times in itertools.product(*each):
            line = simulate(order, times)
            best = min(best, max(spans[-1].end_s + more for spans, more in zip(line.spans, once, strict=True)))
    return best


def bound_of(
    schedule: str, positions: int, chunks: int, num_microbatches: int, blocks: list[Block], inputs_s: list[float],
    counts: list[int], memory: float, enough_s: float = float("inf"),
) -> float:  # fmt: skip
    tables = Tables(Menu(1, blocks), num_microbatches, False)
    least = Least(tables, np.zeros((len(blocks) + 1, len(blocks) + 1, 2)), inputs_s, counts, memory)
    return least_step_s(Chains(generate(schedule, positions, num_microbatches, chunks)), least, enough_s)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("memory_binds", [False, True])
def test_no_split_on_a_schedule_is_below_its_bound(shape: tuple[str, int, int], memory_binds: bool) -> None:
    schedule, positions, chunks = shape
    bounded = 0
    for seed in range(5):
        rng = random.Random(seed)
        num_microbatches = positions * rng.randint(1, 3) if SCHEDULES[schedule].whole_rounds else rng.randint(1, 5)
        blocks = [random_block(rng) for _ in range(rng.randint(positions * chunks, 5))]
        inputs_s = [0.0, *(block.backward_s * rng.uniform(0.2, 0.8) for block in blocks[1:])]
        counts = [rng.randint(1, 3) for _ in range(positions * chunks)]
        total = sum(block.held_bytes + 2 * block.activation_bytes for block in blocks)
        memory = total * rng.uniform(0.4, 0.9) if memory_binds else float("inf")
        given = schedule, positions, chunks, num_microbatches, blocks, inputs_s, counts, memory
        best, bound = least_of_all(*given), bound_of(*given)
        assert (bound == float("inf")) == (best == float("inf"))
        if best < float("inf"):
            assert 0 < bound <= best * (1 + 1e-9)
            assert bound_of(*given, 0.5 * bound) <= best * (1 + 1e-9)
            bounded += 1
    assert bounded > 1


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [("1f1b", 1, 3 / 16), pytest.param("1f1b_interleaved", 2, 3 / 32, marks=pytest.mark.slow)],
)
def test_what_ranks_wait_for_is_in_the_bound(schedule: str, chunks: int, bubble: float) -> None:
    """Of equal blocks: the bubble of the papers, but for what an average of splits avoids."""
    blocks = [Block(1.0, 2.0)] * 64
    free = bound_of(schedule, 4, chunks, 16, blocks, [1.0] * 64, [1] * (4 * chunks), float("inf"))
    step_s = 16 * 16 * 3.0 * (1 + bubble)
    assert step_s * 0.94 < free <= step_s * (1 + 1e-9)
    assert free > 16 * 16 * 3.0 * (1 + bubble / 3)


def test_the_bound_of_one_microbatch_is_all_that_comes_one_after_the_other() -> None:
    """Forwards of all stages and their gradients, of which none but the first stage's and those of weights can wait."""
    blocks, inputs_s = [Block(1.0, 2.0)] * 8, [0.0, *[1.0] * 7]
    assert bound_of("1f1b", 2, 1, 1, blocks, inputs_s, [1, 1], float("inf")) == pytest.approx(24.0, rel=1e-3)
    best = least_of_all("zb_v", 2, 2, 1, blocks[:6], inputs_s[:6], [1] * 4, float("inf"))
    bound = bound_of("zb_v", 2, 2, 1, blocks[:6], inputs_s[:6], [1] * 4, float("inf"))
    assert 0.9 * best < bound <= best
