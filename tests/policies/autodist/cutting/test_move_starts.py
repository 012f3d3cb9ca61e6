"""Begins of stages moved by what a schedule takes: never worse, within the memory, within the
trials allowed. Even stages against all there are, and positions of several stages.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from shardwright.compiler.schedule.published import generate
from shardwright.policies.autodist.cutting.move_starts import (
    MAX_ACTIONS,
    REACH,
    Evenness,
    even_positions,
    even_stages,
    evened,
    moved,
)
from shardwright.policies.autodist.stages.frontier import Again
from shardwright.policies.autodist.stages.shared_positions import Positions
from shardwright.policies.autodist.stages.split_chain import Split, Stage
from shardwright.policies.autodist.stages.stage_costs import Block, PlacedBlocks, StageCosts


def tables_of(num_blocks: int, seed: int) -> StageCosts:
    draw = random.Random(seed)
    blocks = [
        Block(
            draw.random(),
            2 * draw.random(),
            0.0,
            1.0,
            draw.choice((1.0, 2.0)),
            (Again(draw.random(), 0.5),),
        )
        for _ in range(num_blocks)
    ]
    return StageCosts(PlacedBlocks(1, blocks), 4, False)


def positions_of(tables: StageCosts, number: int, memory: float = float("inf")) -> Positions:
    return Positions([tables], generate("1f1b", number, 4), memory)


def split_of(begins: tuple[int, ...], num_blocks: int) -> Split:
    edges = (0, *begins, num_blocks)
    return Split(
        tuple(Stage(start, stop, 1) for start, stop in itertools.pairwise(edges)), 0.0, 0.5, 0.0
    )


def evenness_of(tables: StageCosts, number: int) -> Evenness:
    """Each stage on a position of its own."""
    times = [block.forward_s + block.backward_s for block in tables.blocks]
    return Evenness(times, range(number))


def begins_of(split: Split) -> tuple[int, ...]:
    return tuple(stage.start for stage in split.stages[1:])


def test_begins_move_to_where_the_schedule_is_shortest() -> None:
    wanted = (2, 9)

    def step_s(split: Split, below_s: float = float("inf")) -> float:
        return 1.0 + sum(
            abs(begin - goal) for begin, goal in zip(begins_of(split), wanted, strict=True)
        )

    tables = tables_of(12, 0)
    evenness = evenness_of(tables, 3)
    found = moved(split_of((6, 7), 12), evenness, positions_of(tables, 3), 4, step_s)
    assert begins_of(found) == wanted and found.bound_s == 0.5
    assert [stage.stop for stage in found.stages] == [2, 9, 12]


def test_a_place_that_is_worse_is_stepped_over() -> None:
    seconds, tables = {4: 2.0, 5: 3.0, 6: 1.0}, tables_of(8, 1)
    found = moved(
        split_of((4,), 8),
        evenness_of(tables, 2),
        positions_of(tables, 2),
        4,
        lambda s, below_s: seconds.get(begins_of(s)[0], 9.0),
    )
    assert begins_of(found) == (6,) and REACH == 2


@pytest.mark.parametrize("seed", range(20))
def test_moved_stages_fit_and_are_never_worse(seed: int) -> None:
    tables, counts = tables_of(10, seed), (3, 2, 1)

    def step_s(split: Split, below_s: float = float("inf")) -> float:
        again = sum(
            tables.blocks[block].again[way].time_s
            for s in split.stages
            for block, way in s.recomputed
        )
        return float(max(tables.work_s[s.start, s.stop] for s in split.stages)) + again

    start = split_of((3, 6), 10)
    stages = list(zip(start.stages, counts, strict=True))
    memory = 1.05 * max(float(tables.least_bytes(count)[s.start, s.stop]) for s, count in stages)
    again = [tables.recomputed(s.start, s.stop, count, memory) for s, count in stages]
    own = [Stage(s.start, s.stop, 1, 0, ways) for (s, _), ways in zip(stages, again, strict=True)]
    start = Split(tuple(own), 0.0, 0.0, 0.0)
    found = moved(start, evenness_of(tables, 3), positions_of(tables, 3, memory), 4, step_s)
    assert step_s(found) <= step_s(start)
    used = [
        tables.used_bytes(s.start, s.stop, s.recomputed, count)
        for s, count in zip(found.stages, counts, strict=True)
    ]
    if begins_of(found) != begins_of(start):
        assert found.used_bytes == max(used) <= memory


def test_large_schedules_are_left_as_they_are() -> None:
    trials: list[Split] = []

    def step_s(split: Split, below_s: float = float("inf")) -> float:
        trials.append(split)
        return -float(len(trials))

    tables = tables_of(12, 0)
    positions, evenness, split = positions_of(tables, 2), evenness_of(tables, 2), split_of((6,), 12)
    assert moved(split, evenness, positions, MAX_ACTIONS, step_s) == split and not trials
    moved(split, evenness, positions, MAX_ACTIONS // 6, step_s)
    assert len(trials) == 1 + 3, "the split itself, and three trials of two stages each"


def spans(times: Sequence[float], cuts: Sequence[int]) -> list[float]:
    return [sum(times[a:b]) for a, b in itertools.pairwise((0, *cuts, len(times)))]


def positions(times: Sequence[float], cuts: Sequence[int], placement: Sequence[int]) -> list[float]:
    sums = [0.0] * (max(placement) + 1)
    for position, seconds in zip(placement, spans(times, cuts), strict=True):
        sums[position] += seconds
    return sums


def squares(seconds: Sequence[float]) -> float:
    return sum(each**2 for each in seconds)


def test_no_stages_are_more_even() -> None:
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randint(1, 9)
        times = [float(rng.randint(0, 6)) for _ in range(size)]
        num_stages = rng.randint(1, size)
        found = even_stages(times, num_stages)
        assert len(found) == num_stages - 1 and list(found) == sorted({*found} - {0, size})
        every = itertools.combinations(range(1, size), num_stages - 1)
        least = min((max(spans(times, cuts)), squares(spans(times, cuts))) for cuts in every)
        own = max(spans(times, found)), squares(spans(times, found))
        assert own == pytest.approx(least), (times, num_stages, found)


def longest(times: Sequence[float], cuts: Sequence[int], placement: Sequence[int]) -> float:
    return max(positions(times, cuts, placement))


@pytest.mark.parametrize("placement", [[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 0, 1, 2], [0, 1, 2]])
def test_begins_are_moved_until_positions_are_even(placement: list[int]) -> None:
    rng = random.Random(1)
    far = far_before = far_wanted = 0
    for _ in range(40):
        times = [float(rng.randint(1, 9)) for _ in range(11)]
        times[-1] *= rng.choice([1, 6])  # a head longer than all layers of a stage
        evenness = Evenness(times, placement)
        starts = even_stages(times, len(placement)), even_positions(times, placement)
        found = [evened(evenness, cuts) for cuts in starts]
        for cuts, after in zip(starts, found, strict=True):
            assert after == sorted({*after} - {0, 11}) and len(after) == len(placement) - 1
            before_and_after = evenness.unevenness(np.array([cuts, after]))
            assert before_and_after[1] <= before_and_after[0]
        every = itertools.combinations(range(1, 11), len(placement) - 1)
        enough = 1.1 * min(longest(times, cuts, placement) for cuts in every)
        far_before += longest(times, starts[0], placement) > enough
        far_wanted += longest(times, starts[1], placement) > enough
        far += min(longest(times, cuts, placement) for cuts in found) > enough
    if max(placement) + 1 < len(placement):  # else even stages are even positions
        assert far_wanted < 0.6 * far_before, "lengths that stages should have make no difference"
        assert far < 0.2 * far_before, "local optima that are no good"
    assert far <= 2


def test_a_run_of_begins_is_moved_at_once() -> None:
    """All stages between a long one and a short one pass a block on: each move of one begin alone
    only makes a stage of four blocks one of five.
    """
    cuts = [5, 9, 13, 17]  # stages of 5, 4, 4, 4 and 3 blocks
    assert evened(Evenness([1.0] * 20, range(5)), cuts) == [4, 8, 12, 16]


def test_a_long_head_shares_its_position_with_little() -> None:
    times, placement = [*[4.0] * 8, 24.0], [0, 1, 0, 1]
    cuts = even_stages(times, 4)
    assert longest(times, cuts, placement) > 28.0
    assert positions(times, evened(Evenness(times, placement), cuts), placement) == [28.0, 28.0]
