"""Buckets and owners as plain data."""

from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime.dealing import (
    Entry,
    balanced_owners,
    deal_buckets,
    deal_owners,
    in_use_order,
)

ENTRIES = st.lists(
    st.builds(
        Entry,
        st.sampled_from(["units", "tp"]),
        st.sampled_from(["f4", "f8"]),
        st.integers(1, 9),
        st.booleans(),
    ),
    max_size=12,
)


@given(ENTRIES, st.integers(1, 20))
def test_buckets_hold_what_is_alike_in_order_and_no_more_than_fits(
    entries: list[Entry], cap: int
) -> None:
    buckets = deal_buckets(entries, cap)
    assert sorted(index for members in buckets for index in members) == list(range(len(entries)))
    assert [members[-1] for members in buckets] == sorted(members[-1] for members in buckets)
    for members in buckets:
        assert (
            members == sorted(members)
            and len({entries[index]._replace(num_bytes=0) for index in members}) == 1
        )
        assert len(members) == 1 or sum(entries[index].num_bytes for index in members) <= cap


def test_what_is_never_used_comes_first() -> None:
    assert in_use_order(["a", "b", "c", "d"], ["d", "b", "elsewhere"]) == [0, 2, 3, 1]


def test_the_largest_first() -> None:
    assert balanced_owners([1, 5, 4, 3, 3], 2) == [1, 0, 1, 1, 0]


def test_owners_are_among_the_places_of_a_tensor_and_heed_what_these_have() -> None:
    loads = {0: 4, 1: 0, 2: 0}
    owners = deal_owners([("b", 3, (0, 1)), ("a", 3, (0, 1)), ("c", 9, (0, 2))], loads)
    assert owners == {"c": 2, "a": 1, "b": 1} and loads == {0: 4, 1: 6, 2: 9}
