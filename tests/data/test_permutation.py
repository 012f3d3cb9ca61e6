"""Permutations that are computed: they are permutations, mix well, and never change."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data.permutation import SORTED_SIZE, Order, key, permute


@pytest.mark.parametrize("size", [1, 2, 3, 7, 256, SORTED_SIZE, SORTED_SIZE + 1, 5000, 70_001])
def test_every_sample_once(size):
    positions = np.arange(size)
    assert sorted(permute(positions, size, 5).tolist()) == positions.tolist()


@given(st.integers(1, 9000), st.integers(0, 2**64 - 1), st.data())
def test_a_part_is_computed_alone(size, seed, data):
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = permute(np.arange(size), size, seed)
    assert permute(np.arange(start, stop), size, seed).tolist() == whole[start:stop].tolist()


def test_all_orders_of_few_samples_occur_about_equally():
    orders = Counter(tuple(permute(np.arange(4), 4, key(seed)).tolist()) for seed in range(4800))
    assert len(orders) == 24
    assert sum((count - 200) ** 2 / 200 for count in orders.values()) < 60  # chi-square, 23 degrees


def test_a_large_one_leaves_no_trace_of_the_order():
    size = 100_003
    mixed = permute(np.arange(size), size, key(1))
    assert abs(np.corrcoef(np.arange(size), mixed)[0, 1]) < 0.02
    assert abs(np.corrcoef(mixed[:-1], mixed[1:])[0, 1]) < 0.02
    assert (mixed == np.arange(size)).sum() < 10
    halves = np.histogram(mixed[: size // 2], bins=10, range=(0, size))[0]
    assert halves.min() > 4700 and halves.max() < 5300


def test_known_answers():
    """States of runs that are under way depend on them."""
    assert permute(np.arange(8), 8, key(0, 0)).tolist() == [4, 5, 1, 6, 7, 3, 0, 2]
    found = permute(np.arange(4), 10_000_000, key(0, 0)).tolist()
    assert found == [28404, 2722997, 4513763, 8768738]


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 3))
def test_blocks_stay_together(size, block, epoch):
    order = Order(size, 3, shuffle=True, block=block)
    found = order.indices(epoch, 0, size).tolist()
    assert sorted(found) == list(range(size))
    blocks = [index // block for index in found]
    assert len([b for b, other in zip(blocks, [None, *blocks], strict=False) if b != other]) == len(
        set(blocks)
    )
    pieces = [order.indices(epoch, i, i + 1).item() for i in range(size)]
    assert pieces == found


def test_epochs_and_seeds_differ():
    orders = [
        tuple(Order(50, seed, shuffle=True, block=block).indices(epoch, 0, 50).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
        for block in (None, 10)
    ]
    assert len(set(orders)) == 8
    assert Order(5, 0).indices(3, 1, 4).tolist() == [1, 2, 3]
