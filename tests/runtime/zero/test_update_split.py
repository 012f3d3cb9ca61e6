"""Which part of a bucket each rank updates: pieces tile parameters, owners have whole ones, and
ranks have alike much.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime.dealing import balanced_owners, even_sizes
from shardwright.runtime.zero.update_split import owned_sizes, pieces

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=12)
NUM_RANKS = st.integers(1, 7)


def assert_tiled(size, row):
    """The ranges of all ranks, in their order, are the whole parameter."""
    held = [piece for piece in row if piece[0] < piece[1]]
    bounds = [0, *itertools.chain.from_iterable(held), size]
    assert all(a == b for a, b in zip(bounds[::2], bounds[1::2], strict=True))


@given(SIZES, NUM_RANKS)
def test_equal_slices(sizes, num_ranks):
    slices = even_sizes(sum(sizes), num_ranks)
    assert len(set(slices)) == 1 and 0 <= sum(slices) - sum(sizes) < num_ranks
    table = pieces(sizes, slices)
    for size, row in zip(sizes, table, strict=True):
        assert_tiled(size, row)
    for rank, slice_size in enumerate(slices):
        assert sum(row[rank][1] - row[rank][0] for row in table) <= slice_size


@given(SIZES, NUM_RANKS)
def test_owners(sizes, num_ranks):
    owners = balanced_owners(sizes, num_ranks)
    order = sorted(range(len(sizes)), key=owners.__getitem__)
    lying = [sizes[index] for index in order]
    slices = owned_sizes(lying, [owners[index] for index in order], num_ranks)
    assert sum(slices) == sum(sizes)
    # Less than one parameter above the mean: the last one that the fullest rank got went where
    # least was.
    assert max(slices) <= sum(sizes) / num_ranks + max(sizes)
    for index, row in zip(order, pieces(lying, slices), strict=True):
        assert_tiled(sizes[index], row)
        holders = [rank for rank, (start, stop) in enumerate(row) if start < stop]
        assert holders == ([owners[index]] if sizes[index] else [])


def test_pieces_of_parameters():
    assert pieces([3, 4, 2], [3, 3, 3]) == [
        [(0, 3), (3, 3), (3, 3)],
        [(0, 0), (0, 3), (3, 4)],
        [(0, 0), (0, 0), (0, 2)],
    ]
