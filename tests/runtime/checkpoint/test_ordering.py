"""Names of several ranks in one order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime.checkpoint.ordering import united, united_groups
from shardwright.runtime.errors import CheckpointError


@given(
    st.lists(st.booleans(), min_size=1, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8)
)
def test_parts_of_one_order_unite_in_an_order_that_agrees_with_both(first, second):
    names = "abcdefgh"
    ours = [name for name, taken in zip(names, first, strict=False) if taken]
    theirs = [name for name, taken in zip(names, second, strict=True) if taken]
    result = united(ours, theirs)
    assert sorted(result) == sorted({*ours, *theirs})
    assert [name for name in result if name in ours] == ours and [
        name for name in result if name in theirs
    ] == theirs


def test_stages_follow_each_other():
    assert united(("a", "b"), ("c", "d")) == ("a", "b", "c", "d")
    assert united(("tied", "wpe", "h0"), ("tied", "h1", "ln")) == ("tied", "wpe", "h0", "h1", "ln")


def test_groups_meet_by_their_position():
    decay, plain = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    ours = ((("a",), decay), (("b",), plain))
    assert united_groups(ours, (((), decay), (("c",), plain))) == (
        (("a",), decay),
        (("b", "c"), plain),
    )
    same = ((("a",), decay), (("b",), decay))
    assert united_groups(same, ((("c",), decay), (("d",), decay))) == (
        (("a", "c"), decay),
        (("b", "d"), decay),
    )


def test_ranks_with_other_groups_are_refused():
    decay, plain = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    ours = ((("a",), decay), (("b",), plain))
    with pytest.raises(
        CheckpointError,
        match=r"the ranks have different parameter groups\n  why:   2 and 1 of them",
    ):
        united_groups(ours, ((("c",), decay),))
    with pytest.raises(CheckpointError, match=r"why:   in group 1 'weight_decay' is 0.0 and 0.1\n"):
        united_groups(ours, ((("c",), decay), (("d",), decay)))
