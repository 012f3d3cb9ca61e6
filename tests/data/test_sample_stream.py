"""Streams of one source and of blends."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data.permutation import Order
from shardwright.data.sample_stream import BLOCK, BlendedStream, Pattern, SingleStream
from shardwright.runtime.errors import ConfigError


def blend(orders, weights):
    return BlendedStream([SingleStream(order, i) for i, order in enumerate(orders)], weights)


def flat(stream, start, stop):
    return [
        (run.source, run.epoch, index) for run in stream.runs(start, stop) for index in run.indices
    ]


def test_epochs_follow_each_other():
    stream = SingleStream(Order(5, 0, shuffle=True))
    found = flat(stream, 0, 15)
    assert [epoch for _, epoch, _ in found] == [0] * 5 + [1] * 5 + [2] * 5
    assert all(sorted(i for _, e, i in found if e == epoch) == list(range(5)) for epoch in range(3))
    assert flat(stream, 3, 12) == found[3:12]


def test_blocks_of_positions_do_not_show():
    stream = SingleStream(Order(BLOCK + 10, 0, shuffle=True))
    found = flat(stream, 0, BLOCK + 10)
    assert len(set(found)) == BLOCK + 10
    assert flat(stream, BLOCK - 3, BLOCK + 3) == found[BLOCK - 3 : BLOCK + 3]
    assert len(stream.runs(BLOCK - 3, BLOCK + 3)) == 1


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 200),
    st.integers(0, 60),
)
def test_a_blend_is_the_same_however_it_is_cut(sources, start, count):
    orders = [Order(size, number, shuffle=True) for number, (size, _) in enumerate(sources)]
    stream = blend(orders, [weight for _, weight in sources])
    whole = flat(stream, 0, start + count)
    assert flat(stream, start, start + count) == whole[start:]
    # Each source is read in its own order, and every epoch of it is whole before the next begins.
    for number, order in enumerate(orders):
        mine = [(epoch, index) for source, epoch, index in whole if source == number]
        alone = SingleStream(order, number)
        assert mine == [(e, i) for _, e, i in flat(alone, 0, len(mine))]
        early = sum(source == number for source, _, _ in whole[:start])
        assert stream.turns_before(start)[number] == early


def test_weights_are_kept_at_every_length():
    pattern = Pattern.of_weights([3, 1])
    assert pattern.sources.tolist() == [0, 0, 1, 0] and pattern.turns.tolist() == [0, 1, 0, 2]
    stream = blend([Order(100, 0), Order(100, 1)], [0.7, 0.3])
    assert stream.epoch_size == 334
    for length in (10, 100, 334):
        counts = Counter(source for source, _, _ in flat(stream, 0, length))
        assert abs(counts[0] - 0.7 * length) <= 1
    seen = {(source, index) for source, _, index in flat(stream, 0, 334)}
    assert len(seen) == 200


def test_weights_that_cannot_be_kept_are_refused():
    assert Pattern.of_weights([1 / 3, 0.31415926, 0.35]).length <= 16384 + 2
    for weights in ([1, 0], [1, -1], [1, float("nan")]):
        with pytest.raises(ConfigError, match="positive numbers"):
            Pattern.of_weights(weights)
    with pytest.raises(ConfigError, match="would never be read"):
        Pattern.of_weights([1, 1e-7])
    with pytest.raises(ConfigError, match="2 sources has 1 weights"):
        blend([Order(1, 0)] * 2, [1])
