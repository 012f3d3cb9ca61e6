"""Actions of schedules and their text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule import COMPUTES, ActionKind, ScheduleAction, message_of, parse_action, parse_actions

numbers = st.integers(0, 2000)
plain = st.builds(ScheduleAction, st.sampled_from(sorted({*COMPUTES, ActionKind.REDUCE})), numbers, numbers)
messages = st.builds(
    ScheduleAction,
    st.sampled_from([ActionKind.SEND, ActionKind.RECV]),
    numbers,
    numbers,
    numbers,
    st.sampled_from(["activations", "gradients"]),
)


@pytest.mark.parametrize(
    "text, action",
    [
        ("0F3", ScheduleAction(ActionKind.FORWARD, 0, 3)),
        ("12B0", ScheduleAction(ActionKind.BACKWARD, 12, 0)),
        ("1I3", ScheduleAction(ActionKind.INPUT_GRADIENT, 1, 3)),
        ("1W3", ScheduleAction(ActionKind.WEIGHT_GRADIENT, 1, 3)),
        ("0SEND_F3>1", ScheduleAction(ActionKind.SEND, 0, 3, 1, "activations")),
        ("1RECV_F3<0", ScheduleAction(ActionKind.RECV, 1, 3, 0, "activations")),
        ("1SEND_B3>0", ScheduleAction(ActionKind.SEND, 1, 3, 0, "gradients")),
        ("0RECV_B3<1", ScheduleAction(ActionKind.RECV, 0, 3, 1, "gradients")),
        ("0REDUCE3", ScheduleAction(ActionKind.REDUCE, 0, 3)),
    ],
)
def test_text_forms(text: str, action: ScheduleAction) -> None:
    assert str(action) == text
    assert parse_action(text) == action
    if action.is_message:
        assert message_of(action) == (action.what, *((0, 1) if text in ("0SEND_F3>1", "1RECV_F3<0") else (1, 0)), 3)


@given(st.lists(plain | messages, max_size=20))
def test_text_is_read_back(actions: list[ScheduleAction]) -> None:
    assert parse_actions(" ".join(map(str, actions))) == tuple(actions)
    assert parse_actions(",\n".join(map(str, actions))) == tuple(actions)


@given(st.text("0123FBIWSENDRCVUX_<>- ", max_size=12))
def test_only_text_forms_are_read(text: str) -> None:
    """What is read is written the same, up to zeros in front."""
    try:
        action = parse_action(text)
    except PlanError:
        return
    assert str(action) == re.sub(r"\d+", lambda number: str(int(number[0])), text)


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X3", "0f3", "0F3 ", "-1F3", "0SEND_F3", "0SEND_F3<1", "0RECV_F3>1", "0F3>1", "0SEND_W3>1", "٣F3"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_action(text)
    assert str(error.value) == (
        f"{text!r} is not an action of a schedule\n"
        "  why:   an action is written <stage><kind><microbatch>, and messages name the other stage\n"
        "  try:   write for example 0F3, 0B3, 0I3, 0W3, 0SEND_F3>1, 1RECV_F3<0, 0REDUCE3"
    )


@pytest.mark.parametrize(
    "arguments", [(ActionKind.SEND, 0, 3), (ActionKind.RECV, 0, 3, 1), (ActionKind.FORWARD, 0, 3, 1, "activations")]
)
def test_peers_belong_to_messages(arguments: tuple) -> None:
    with pytest.raises(PlanError, match="SEND and RECV have a peer stage and a payload, other actions have neither"):
        ScheduleAction(*arguments)
