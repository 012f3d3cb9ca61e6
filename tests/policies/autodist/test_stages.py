"""Splits into stages: equal to trying all of them, on random chains."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from shardwright.compiler.schedule.generate import generate
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.stages import (
    Again,
    Block,
    NoFit,
    Split,
    Stage,
    all_at_once,
    one_forward_one_backward,
    split_stages,
)


def random_blocks(rng: random.Random, count: int, sizes: Sequence[int], *, alike: bool) -> dict[int, list[Block]]:
    def one(scale: float) -> Block:
        activation = rng.randint(1, 20)
        return Block(
            rng.randint(1, 9) / scale,
            rng.randint(1, 18) / scale,
            rng.randint(0, 5),
            rng.randint(0, 10) / scale,
            activation / scale,
            tuple(Again(rng.randint(0, 9) / scale, rng.randint(0, activation) / scale) for _ in range(rng.randint(0, 2))),
            rng.randint(0, 2),
        )

    found = {}
    for size in sizes:
        scale = float(size)
        found[size] = [one(scale)] * count if alike else [one(scale) for _ in range(count)]
    return found


def all_cuts(num_blocks: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield list(itertools.pairwise([0, *cuts, num_blocks]))


def bytes_of(blocks: Sequence[Block], stage: Stage, count: int) -> float:
    total = 0.0
    for index in range(stage.start, stage.stop):
        total += blocks[index].held_bytes + count * blocks[index].activation_bytes
    return total - count * sum(blocks[index].again[way].saved_bytes for index, way in stage.recomputed)


def again_s(blocks: Sequence[Block], stage: Stage) -> float:
    return sum(blocks[index].again[way].time_s for index, way in stage.recomputed)


def cost_of(blocks: dict[int, list[Block]], stages: Sequence[Stage], num_microbatches: int) -> float:
    times, counted = [], []
    for stage in stages:
        own = blocks[stage.num_devices][stage.start : stage.stop]
        time = sum(b.forward_s + b.backward_s for b in own)
        time += again_s(blocks[stage.num_devices], stage)
        time += own[0].transfer_s if stage.start else 0.0
        times.append(time)
        counted.append((num_microbatches - 1) * time + sum(b.once_s for b in own))
    return sum(times) + max(counted)


def brute_force(blocks, num_devices, num_stages, num_microbatches, memory, in_flight) -> float:  # type: ignore[no-untyped-def]
    num_blocks = len(next(iter(blocks.values())))
    best = float("inf")
    for cuts in all_cuts(num_blocks, num_stages):
        for sizes in itertools.product(blocks, repeat=num_stages):
            if sum(sizes) != num_devices:
                continue
            menus = []
            for place, ((start, stop), size) in zip(range(num_stages, 0, -1), zip(cuts, sizes, strict=True), strict=True):
                ways = [[None, *((i, way) for way in range(len(blocks[size][i].again)))] for i in range(start, stop)]
                stages = [Stage(start, stop, size, tuple(filter(None, chosen))) for chosen in itertools.product(*ways)]
                fitting = [s for s in stages if bytes_of(blocks[size], s, in_flight(place)) <= memory * (1 + 1e-9)]
                # of the subsets that fit, the one that takes least: nothing else of the objective depends on it
                cheapest = sorted(fitting, key=lambda s: again_s(blocks[size], s))[:1]
                menus.append(cheapest)
            if all(menus):
                best = min(best, cost_of(blocks, [menu[0] for menu in menus], num_microbatches))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_a_split_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, num_stages = rng.randint(1, 8), rng.randint(1, 4)
    sizes = rng.sample([1, 2, 4], rng.randint(1, 3))
    num_devices, num_microbatches = rng.randint(num_stages, 8), rng.randint(1, 6)
    blocks = random_blocks(rng, num_blocks, sizes, alike=rng.random() < 0.3)
    in_flight = rng.choice([one_forward_one_backward, all_at_once])(num_microbatches)
    total = sum(b.held_bytes + 2 * b.activation_bytes for b in blocks[sizes[0]])
    memory = rng.choice([float("inf"), total, total * rng.uniform(0.2, 1.0)])
    expected = brute_force(blocks, num_devices, num_stages, num_microbatches, memory, in_flight)
    found = split_stages(blocks, num_devices, num_stages, num_microbatches, memory_bytes=memory, in_flight=in_flight)
    if isinstance(found, NoFit):
        assert expected == float("inf")
        assert found.needed_bytes > memory or found.needed_bytes == float("inf")
        return
    assert found.cost_s == pytest.approx(expected, rel=1e-12)
    assert cost_of(blocks, found.stages, num_microbatches) == pytest.approx(expected, rel=1e-12)
    assert found.bound_s <= found.cost_s
    places = zip(range(num_stages, 0, -1), found.stages, strict=True)
    used = max(bytes_of(blocks[stage.num_devices], stage, in_flight(place)) for place, stage in places)
    assert found.used_bytes == pytest.approx(used, rel=1e-12) and used <= memory * (1 + 1e-9)


def test_equal_blocks_on_equal_devices_meet_the_formula_of_1f1b() -> None:
    blocks = {2: [Block(1.0, 2.0)] * 8}
    found = split_stages(blocks, 8, 4, 16)
    assert isinstance(found, Split)
    assert found.cost_s == (16 + 4 - 1) * 6.0
    assert [stage.stop - stage.start for stage in found.stages] == [2] * 4
    assert found.bound_s == pytest.approx((16 + 3) * 6.0)


def test_no_fit_says_what_the_best_split_needs() -> None:
    blocks = {1: [Block(1.0, 2.0, held_bytes=10.0, activation_bytes=5.0, again=(Again(1.0, 4.0),))] * 4}
    found = split_stages(blocks, 2, 2, 4, memory_bytes=20.0)
    assert isinstance(found, NoFit)
    # the first of two stages holds two microbatches: 1 block there and 3 in the last need max(12, 33); 2 and 2 need max(24, 22)
    assert found.needed_bytes == 24.0


def test_memory_moves_blocks_to_the_stages_that_hold_less() -> None:
    block = Block(1.0, 2.0, held_bytes=1.0, activation_bytes=4.0)
    free, tight = split_stages({1: [block] * 9}, 3, 3, 9), split_stages({1: [block] * 9}, 3, 3, 9, memory_bytes=28.0)
    assert isinstance(free, Split) and isinstance(tight, Split)
    assert [s.stop - s.start for s in free.stages] == [3, 3, 3]
    assert [s.stop - s.start for s in tight.stages] == [2, 3, 4]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_of_any_split_is_below_the_bound(seed: int, schedule: str) -> None:
    rng = random.Random(seed)
    num_blocks, num_stages, num_microbatches = rng.randint(3, 6), rng.randint(2, 3), rng.randint(1, 5)
    blocks = random_blocks(rng, num_blocks, [1], alike=False)
    zero_bubble = schedule.startswith("zb")
    found = split_stages(blocks, num_stages, num_stages, num_microbatches, splits_backward=zero_bubble)
    assert isinstance(found, Split)
    order = generate(schedule, num_stages, num_microbatches)
    for cuts in all_cuts(num_blocks, num_stages):
        own = [blocks[1][start:stop] for start, stop in cuts]
        times = [
            StageTimes(sum(b.forward_s for b in s), *[sum(b.backward_s for b in s) * share for share in (0.3, 0.7)])
            for s in own
        ]
        line = simulate(order, times)
        ends = [spans[-1].end_s + sum(b.once_s for b in s) for spans, s in zip(line.spans, own, strict=True)]
        assert max(ends) >= found.bound_s * (1 - 1e-9)
