"""Splits and seeds of workers: Energon's."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import data
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.data.energon.worker_config import bit_reversed, global_boundaries
from shardwright.runtime.errors import ConfigError, UsageError
from shardwright.runtime.layout import Layout, Mesh


def configs(world_size, num_workers, **options):
    return [
        data.WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, **options)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    ("num_samples", "ranks", "workers", "expected"),
    [
        (10, 2, 3, [[0, 2, 4, 5], [5, 7, 9, 10]]),
        (55, 2, 2, [[0, 14, 28], [28, 42, 55]]),
        (7, 2, 2, [[0, 2, 4], [4, 6, 7]]),
        (7, 2, 0, [[0, 4], [4, 7]]),
    ],
)
def test_known_boundaries(num_samples, ranks, workers, expected):
    assert [c.boundaries(num_samples) for c in configs(ranks, workers)] == expected


def test_known_orders_and_seeds():
    """The numbers are those of megatron-energon 7.4.1."""
    assert bit_reversed(range(6)) == [0, 3, 1, 4, 2, 5]
    assert bit_reversed(range(7)) == [0, 3, 1, 5, 2, 4, 6]
    assert bit_reversed(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversed(range(11)) == [0, 5, 2, 8, 1, 6, 3, 9, 4, 7, 10]
    assert [[c.worker_seed(w) for w in range(2)] for c in configs(2, 2)] == [
        [273211461, 3250511459],
        [2273462765, 3477560568],
    ]
    assert configs(2, 0)[1].worker_seed() == 3250511459  # without processes the id is the rank
    assert configs(2, 2, seed_offset=1)[0].worker_seed() != 273211461


@given(st.integers(0, 200), st.integers(1, 24))
def test_the_split_is_balanced_and_depends_on_the_number_of_workers_alone(num_samples, workers):
    bounds = global_boundaries(num_samples, workers)
    sizes = {stop - start for start, stop in pairwise(bounds)}
    assert bounds[-1] == num_samples and max(sizes) - min(sizes) <= 1
    for ranks in range(1, workers + 1):
        if workers % ranks == 0:
            found = [c.boundaries(num_samples) for c in configs(ranks, workers // ranks)]
            assert [b for own in found for b in own[:-1]] + [num_samples] == bounds


def test_equal_if_rank_size_and_workers_are():
    first, *_ = configs(2, 3)
    assert first == data.WorkerConfig(rank=0, world_size=2, num_workers=3, seed_offset=9)
    assert first != configs(2, 3)[1]
    assert len({first, *configs(2, 3, data_parallel_group="g")}) == 2
    assert data.WorkerConfig.default_worker_config(3) == data.default_worker_config(num_workers=3)
    assert data.default_worker_config() == data.WorkerConfig(rank=0, world_size=1, num_workers=4)


def test_configs_of_a_plan():
    plan = Plan(Mesh((("dp", 2), ("tp", 2))), inputs={"x": Layout.parse("[8/dp, 4]")})
    found = [
        data.WorkerConfig.from_roles(data.roles(plan, num_ranks=8, rank=rank), 2)
        for rank in range(8)
    ]
    assert [config.rank for config in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {config.world_size for config in found} == {4}
    stages = tuple(StagePlan(f"op{i}", Mesh((("tp", 1),)), (i,)) for i in range(3))
    middle = data.roles(Plan(Mesh((("rank", 3),)), stages=stages), rank=1)
    with pytest.raises(UsageError, match="rank 1 reads no data"):
        data.WorkerConfig.from_roles(middle, 2)


def test_wrong_numbers_are_refused():
    for numbers, message in [((2, 2, 1), "no data-parallel rank 2 of 2"), ((0, 1, -1), "-1 is no")]:
        with pytest.raises(ConfigError, match=message):
            data.WorkerConfig(rank=numbers[0], world_size=numbers[1], num_workers=numbers[2])
