"""Actions of schedules and their text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule_actions import (
    ActionKind,
    ScheduleAction,
    parse_action,
    parse_actions,
)

numbers = st.integers(0, 2000)
drawn = st.builds(ScheduleAction, st.sampled_from(ActionKind), numbers, numbers)


@pytest.mark.parametrize(
    "text, action",
    [
        ("0F3", ScheduleAction(ActionKind.FORWARD, 0, 3)),
        ("12B0", ScheduleAction(ActionKind.BACKWARD, 12, 0)),
        ("1I3", ScheduleAction(ActionKind.INPUT_GRADIENT, 1, 3)),
        ("1W3", ScheduleAction(ActionKind.WEIGHT_GRADIENT, 1, 3)),
    ],
)
def test_text_forms(text: str, action: ScheduleAction) -> None:
    assert str(action) == text
    assert parse_action(text) == action


@given(st.lists(drawn, max_size=20))
def test_text_is_read_back(actions: list[ScheduleAction]) -> None:
    assert parse_actions(" ".join(map(str, actions))) == tuple(actions)
    assert parse_actions(",\n".join(map(str, actions))) == tuple(actions)


@given(st.text("0123FBIWX_- ", max_size=12))
def test_only_text_forms_are_read(text: str) -> None:
    """What is read is written the same, up to zeros in front."""
    try:
        action = parse_action(text)
    except PlanError:
        return
    assert str(action) == re.sub(r"\d+", lambda number: str(int(number[0])), text)


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X3", "0f3", "0F3 ", "-1F3", "0SEND_F3>1", "0REDUCE3", "٣F3"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_action(text)
    assert str(error.value) == (
        f"{text!r} is not an action of a schedule\n"
        "  why:   an action is written <stage><kind><microbatch>, with kind F, B, I or W\n"
        "  try:   write for example 0F3, 0B3, 0I3, 0W3; messages and reductions follow from these"
    )
