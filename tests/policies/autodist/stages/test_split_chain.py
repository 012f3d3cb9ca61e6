"""Splits into stages: equal to trying all of them, on random chains."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from covers import spread

from shardwright.compiler.schedule.published import generate
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.stages import frontier
from shardwright.policies.autodist.stages.frontier import FRONTIER_STEPS, Again, Array
from shardwright.policies.autodist.stages.split_chain import (
    InFlight,
    NoFit,
    NoGain,
    Split,
    Stage,
    _Paths,
    one_forward_one_backward,
    split_stages,
)
from shardwright.policies.autodist.stages.stage_costs import Block, PlacedBlocks, StageCosts


def all_at_once(num_microbatches: int) -> InFlight:
    """What GPipe holds."""
    return lambda place: num_microbatches


def random_placed_blocks(
    rng: random.Random, count: int, sizes: Sequence[int], *, alike: bool
) -> list[PlacedBlocks]:
    """One placement for each of ``sizes``, which may name one several times."""

    def one(scale: float) -> Block:
        activation = rng.randint(1, 20)
        return Block(
            rng.randint(1, 9) / scale,
            rng.randint(1, 18) / scale,
            rng.randint(0, 5),
            rng.randint(0, 10) / scale,
            activation / scale,
            tuple(
                Again(rng.randint(0, 9) / scale, rng.randint(0, activation) / scale)
                for _ in range(rng.randint(0, 2))
            ),
        )

    return [
        PlacedBlocks(size, [one(size)] * count if alike else [one(size) for _ in range(count)])
        for size in sizes
    ]


class Messages:
    """Random messages between placements, on devices in nodes of two: dearer where a node begins. A
    placement ``kept_inside`` a node begins nowhere else.
    """

    def __init__(
        self, rng: random.Random, count: int, num_placed_blocks: int, kept_inside: set[int]
    ) -> None:
        self.kept_inside = kept_inside
        few = [
            np.array([[rng.randint(-1, 4) / 2 for _ in range(count + 1)]] * (count + 1)).T
            for _ in range(3)
        ]
        self.tables = {
            (before, after, first): rng.choice(few)
            for before in range(num_placed_blocks)
            for after in range(num_placed_blocks)
            for first in (False, True)
        }

    def message_s(self, before: int, after: int, device: int) -> Array:
        return self.tables[before, after, device % 2 == 0]

    def relief_s(self, placement: int) -> Array:
        least = [
            np.minimum(table, 0.0)
            for (_, after, _), table in self.tables.items()
            if after == placement
        ]
        return np.minimum.reduce(least)

    def fits(self, placement: int, device: int) -> bool:
        return placement not in self.kept_inside or device % 2 == 0


def all_cuts(num_blocks: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield list(itertools.pairwise([0, *cuts, num_blocks]))


def bytes_of(blocks: Sequence[Block], stage: Stage, count: int) -> float:
    total = 0.0
    for index in range(stage.start, stage.stop):
        total += blocks[index].held_bytes + count * blocks[index].activation_bytes
    return total - count * sum(
        blocks[index].again[way].saved_bytes for index, way in stage.recomputed
    )


def again_s(blocks: Sequence[Block], stage: Stage) -> float:
    return sum(blocks[index].again[way].time_s for index, way in stage.recomputed)


def cost_of(
    placements: Sequence[PlacedBlocks],
    stages: Sequence[Stage],
    num_microbatches: int,
    messages: Messages | None = None,
) -> float:
    times, counted, device = [], [], 0
    for number, stage in enumerate(stages):
        own = placements[stage.placement].blocks[stage.start : stage.stop]
        time = sum(b.forward_s + b.backward_s for b in own)
        time += again_s(placements[stage.placement].blocks, stage)
        if number and messages is not None:
            time += messages.message_s(stages[number - 1].placement, stage.placement, device)[
                stage.start, stage.stop
            ]
        times.append(time)
        counted.append((num_microbatches - 1) * time + sum(b.once_s for b in own))
        device += stage.num_devices
    return sum(times) + max(counted)


def brute_force(
    placements, num_devices, num_stages, num_microbatches, memory, in_flight, messages=None
) -> float:  # type: ignore[no-untyped-def]
    best = float("inf")
    for chosen in itertools.product(range(len(placements)), repeat=num_stages):
        begins = [0, *itertools.accumulate(placements[index].num_devices for index in chosen)]
        if begins.pop() != num_devices:
            continue
        if messages is not None and not all(
            messages.fits(*place) for place in zip(chosen, begins, strict=True)
        ):
            continue
        for cuts in all_cuts(len(placements[0].blocks), num_stages):
            cheapest = []
            for place, ((start, stop), index) in zip(
                range(num_stages, 0, -1), zip(cuts, chosen, strict=True), strict=True
            ):
                size, blocks = placements[index].num_devices, placements[index].blocks
                ways = [
                    [None, *((i, way) for way in range(len(blocks[i].again)))]
                    for i in range(start, stop)
                ]
                stages = [
                    Stage(start, stop, size, index, tuple(filter(None, found)))
                    for found in itertools.product(*ways)
                ]
                fitting = [
                    s
                    for s in stages
                    if bytes_of(blocks, s, in_flight(place)) <= memory * (1 + 1e-9)
                ]
                # of the subsets that fit, the one that takes least: nothing else of the objective
                # depends on it
                cheapest += sorted(fitting, key=lambda s: again_s(blocks, s))[:1]
            if len(cheapest) == num_stages:
                best = min(best, cost_of(placements, cheapest, num_microbatches, messages))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_a_split_is_the_best_of_all(seed: int) -> None:
    """Chains have up to three placements of one to four devices, several of one size among them,
    and messages between them.
    """
    rng = random.Random(seed)
    num_blocks, num_stages = rng.randint(1, 7), rng.randint(1, 4)
    sizes = rng.choices([1, 2, 3, 4], k=rng.randint(1, 3))
    num_devices, num_microbatches = rng.randint(num_stages, 8), rng.randint(1, 6)
    placements = random_placed_blocks(rng, num_blocks, sizes, alike=rng.random() < 0.3)
    messages = None
    if rng.random() < 0.8:
        tied = {0} if rng.random() < 0.2 else set()
        messages = Messages(rng, num_blocks, len(placements), tied)
    in_flight = rng.choice([one_forward_one_backward, all_at_once])(num_microbatches)
    total = sum(b.held_bytes + 2 * b.activation_bytes for b in placements[0].blocks)
    memory = rng.choice([float("inf"), total, total * rng.uniform(0.2, 1.0)])
    expected = brute_force(
        placements, num_devices, num_stages, num_microbatches, memory, in_flight, messages
    )
    given = {"memory_bytes": memory, "in_flight": in_flight, "between": messages}
    found = split_stages(placements, num_devices, num_stages, num_microbatches, **given)
    if isinstance(found, NoFit):
        needed = found.needed_bytes
        assert expected == float("inf") and (needed > memory or needed == float("inf"))
        for least, fits in ((needed, needed < float("inf")), (needed * (1 - 1e-6), False)):
            best = brute_force(
                placements, num_devices, num_stages, num_microbatches, least, in_flight, messages
            )
            assert (best < float("inf")) == fits
        return
    assert isinstance(found, Split)
    assert found.cost_s == pytest.approx(expected, rel=1e-12)
    assert cost_of(placements, found.stages, num_microbatches, messages) == pytest.approx(
        expected, rel=1e-12
    )
    assert found.bound_s <= found.cost_s
    places = zip(range(num_stages, 0, -1), found.stages, strict=True)
    used = max(
        bytes_of(placements[stage.placement].blocks, stage, in_flight(place))
        for place, stage in places
    )
    assert found.used_bytes == pytest.approx(used, rel=1e-12) and used <= memory * (1 + 1e-9)
    assert (
        split_stages(
            placements, num_devices, num_stages, num_microbatches, **given, below_s=expected * 1.001
        )
        == found
    )
    dearer = split_stages(
        placements, num_devices, num_stages, num_microbatches, **given, below_s=expected * 0.999
    )
    assert isinstance(dearer, NoGain)
    assert dearer.bound_s == pytest.approx(min(found.bound_s, expected * 0.999), rel=1e-6)


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_eight_layers_on_eight_devices_are_split_best(seed: int, num_stages: int) -> None:
    """Into as many stages as there may be, each on one, two or four devices, with what memory asks
    to be computed again.
    """
    rng = random.Random(1000 * seed + num_stages)
    placements = random_placed_blocks(
        rng, 8, [1, 2, 4] if num_stages > 1 else [8, 8], alike=rng.random() < 0.3
    )
    messages, num_microbatches = Messages(rng, 8, len(placements), set()), rng.randint(1, 6)
    in_flight = rng.choice([one_forward_one_backward, all_at_once])(num_microbatches)
    total = sum(b.held_bytes + 2 * b.activation_bytes for b in placements[0].blocks)
    memory = rng.choice([float("inf"), total * rng.uniform(0.3, 1.0)])
    expected = brute_force(placements, 8, num_stages, num_microbatches, memory, in_flight, messages)
    given = {"memory_bytes": memory, "in_flight": in_flight, "between": messages}
    found = split_stages(placements, 8, num_stages, num_microbatches, **given)
    if isinstance(found, NoFit):
        assert expected == float("inf") and memory < total
        return
    assert isinstance(found, Split) and found.bound_s <= found.cost_s
    assert found.cost_s == pytest.approx(expected, rel=1e-12)
    assert cost_of(placements, found.stages, num_microbatches, messages) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("steps", spread([4, FRONTIER_STEPS], 2, first=1))
def test_no_split_that_fits_is_below_the_bound(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory binds, on frontiers of rounded points too; and often the bound is above that
    without a limit.
    """
    monkeypatch.setattr(frontier, "FRONTIER_STEPS", steps)
    fits = tighter = 0
    for seed in range(150):
        rng = random.Random(seed)
        num_blocks, num_stages, num_microbatches = (
            rng.randint(2, 5),
            rng.randint(1, 3),
            rng.randint(1, 6),
        )
        sizes = rng.choices([1, 2], k=rng.randint(1, 2))
        placements = random_placed_blocks(rng, num_blocks, sizes, alike=rng.random() < 0.5)
        messages = Messages(rng, num_blocks, len(placements), set()) if rng.random() < 0.5 else None
        num_devices = rng.choice(sizes) * num_stages
        in_flight = rng.choice([one_forward_one_backward, all_at_once])(num_microbatches)
        memory = sum(
            b.held_bytes + 2 * b.activation_bytes for b in placements[0].blocks
        ) * rng.uniform(0.2, 0.8)
        expected = brute_force(
            placements, num_devices, num_stages, num_microbatches, memory, in_flight, messages
        )
        if expected == float("inf"):
            continue
        fits += 1
        counts = [in_flight(place) for place in range(num_stages, 0, -1)]
        tables = [
            StageCosts(placement, num_microbatches, rng.random() < 0.3) for placement in placements
        ]
        paths = _Paths(placements, tables, num_devices, num_stages, num_microbatches, messages)
        bound = paths.bound(10 * expected, counts, memory)
        assert bound <= expected * (1 + 1e-9)
        tighter += bound > paths.bound(10 * expected, counts, float("inf")) * (1 + 1e-6)
    assert fits > 60 and tighter > fits / 4


def test_equal_blocks_on_equal_devices_meet_the_formula_of_1f1b() -> None:
    found = split_stages([PlacedBlocks(2, [Block(1.0, 2.0)] * 8)], 8, 4, 16)
    assert isinstance(found, Split)
    assert found.cost_s == (16 + 4 - 1) * 6.0
    assert [stage.stop - stage.start for stage in found.stages] == [2] * 4
    assert found.bound_s == pytest.approx((16 + 3) * 6.0)


def test_no_fit_says_what_the_best_split_needs() -> None:
    block = Block(1.0, 2.0, held_bytes=10.0, activation_bytes=5.0, again=(Again(1.0, 4.0),))
    found = split_stages([PlacedBlocks(1, [block] * 4)], 2, 2, 4, memory_bytes=20.0)
    assert isinstance(found, NoFit)
    # the first of two stages holds two microbatches: 1 block there and 3 in the last need max(12,
    # 33); 2 and 2 need max(24, 22)
    assert found.needed_bytes == 24.0


def test_memory_moves_blocks_to_the_stages_that_hold_less() -> None:
    block = Block(1.0, 2.0, held_bytes=1.0, activation_bytes=4.0)
    free, tight = (
        split_stages([PlacedBlocks(1, [block] * 9)], 3, 3, 9, memory_bytes=limit)
        for limit in (float("inf"), 28.0)
    )
    assert isinstance(free, Split) and isinstance(tight, Split)
    assert [s.stop - s.start for s in free.stages] == [3, 3, 3]
    assert [s.stop - s.start for s in tight.stages] == [2, 3, 4]


def test_the_first_of_blocks_alike_are_computed_again_those_that_save_most_first() -> None:
    """The frontier has so many points here that they are rounded, which left the choice among
    blocks alike to chance.
    """
    ways = tuple(Again(0.1 * 1.07**n, 1e9 * 1.01**n + n * n) for n in range(6))
    layer, head = Block(1.0, 2.0, 0.0, 0.0, 2e9, ways), Block(1.0, 2.0, 0.0, 0.0, 1e9)
    table = StageCosts(PlacedBlocks(1, [head, *[layer] * 24, head]), 1, False)
    frontier = table._frontiers.of(0, 26)
    assert frontier.rounded > 0
    for memory in np.linspace(27e9, 48e9, 12):
        chosen = table.recomputed(0, 26, 1, memory)
        saved = [ways[way].saved_bytes for _, way in chosen]
        assert [block for block, _ in chosen] == list(range(1, len(chosen) + 1))
        assert saved == sorted(saved, reverse=True)
        assert table.used_bytes(0, 26, chosen, 1) <= memory
        least = frontier.chosen(50e9 - memory)
        assert sorted(way for _, way in least) == sorted(way for _, way in chosen)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_of_any_split_is_below_the_bound(seed: int, schedule: str) -> None:
    rng = random.Random(seed)
    num_blocks, num_stages, num_microbatches = (
        rng.randint(3, 6),
        rng.randint(2, 3),
        rng.randint(1, 5),
    )
    placements = random_placed_blocks(rng, num_blocks, [1], alike=False)
    zero_bubble = schedule.startswith("zb")
    found = split_stages(
        placements, num_stages, num_stages, num_microbatches, splits_backward=zero_bubble
    )
    assert isinstance(found, Split)
    order = generate(schedule, num_stages, num_microbatches)
    for cuts in all_cuts(num_blocks, num_stages):
        own = [placements[0].blocks[start:stop] for start, stop in cuts]
        times = [
            StageTimes(
                sum(b.forward_s for b in s),
                *[sum(b.backward_s for b in s) * share for share in (0.3, 0.7)],
            )
            for s in own
        ]
        line = simulate(order, times)
        ends = [
            spans[-1].end_s + sum(b.once_s for b in s)
            for spans, s in zip(line.spans, own, strict=True)
        ]
        assert max(ends) >= found.bound_s * (1 - 1e-9)
