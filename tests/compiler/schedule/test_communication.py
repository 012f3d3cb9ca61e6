"""Messages derived from orders of computation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedules import schedules_of

from shardwright.compiler.schedule.communication import communicate
from shardwright.compiler.schedule.dataflow import Dataflow, receiving_stages
from shardwright.compiler.schedule.generate import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.simulate import simulate
from shardwright.compiler.schedule.validate import validate
from shardwright.compiler.schedule.waits import Positions
from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule import ActionKind, Message, message_of, parse_actions


def lines(schedule: Schedule) -> list[str]:
    return str(schedule).splitlines()


def messages(schedule: Schedule, kind: ActionKind) -> list[Message]:
    return [message_of(action) for actions in schedule.actions for action in actions if action.kind is kind]


def test_1f1b_with_receives_posted_ahead() -> None:
    """Rank 0 posts for the first gradient before its second forward, rank 1 for the second activation before 1B0."""
    assert lines(communicate(generate("1f1b", 2, 2))) == [
        "rank 0: 0F0 0SEND_F0>1 0F1 0RECV_B0<1 0SEND_F1>1 0B0 0RECV_B1<1 0B1 0REDUCE1",
        "rank 1: 1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1REDUCE1",
    ]


def test_1f1b_with_blocking_receives() -> None:
    assert lines(communicate(generate("1f1b", 2, 2), posted_ahead=False)) == [
        "rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0REDUCE1",
        "rank 1: 1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1REDUCE1",
    ]


def test_inference_sends_forward_only_and_reduces_nothing() -> None:
    assert lines(communicate(generate("infer_pipe", 2, 2))) == [
        "rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1",
        "rank 1: 1RECV_F0<0 1RECV_F1<0 1F0 1F1",
    ]


def test_one_rank_sends_nothing() -> None:
    assert lines(communicate(generate("1f1b_interleaved", 1, 1))) == ["rank 0: 0F0 1F0 1B0 1REDUCE0 0B0 0REDUCE0"]


def test_input_gradients_are_sent_and_reductions_wait_for_weight_gradients() -> None:
    assert lines(communicate(generate("zb_h1", 2, 1)))[1] == "rank 1: 1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1REDUCE0"


def test_the_turn_of_the_v_needs_no_message() -> None:
    schedule = communicate(generate("zb_v", 2, 4))
    pairs = {(sender, receiver) for _, sender, receiver, _ in messages(schedule, ActionKind.SEND)}
    assert pairs == {(0, 1), (2, 3), (3, 2), (1, 0)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_message_is_sent_and_received_once_and_buffers_are_few(name: str) -> None:
    """A channel never has more posted than what is on the way and what comes next."""
    for p, m, v, schedule in schedules_of(name, 4, 8):
        full = communicate(schedule)
        crossing = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
        expected = crossing * m * (2 if schedule.trains else 1)
        assert len(messages(full, ActionKind.SEND)) == len(set(messages(full, ActionKind.SEND))) == expected
        assert sorted(messages(full, ActionKind.SEND)) == sorted(messages(full, ActionKind.RECV))
        assert full.compute_only() == schedule
        assert most_posted(full) <= (2 if v == 1 else 4), (p, m, v)


def most_posted(schedule: Schedule) -> int:
    """The most receives any rank has posted and not used yet."""
    most = 0
    for actions in schedule.actions:
        posted: set[tuple[str, int, int]] = set()
        for action in actions:
            if action.kind is ActionKind.RECV:
                posted.add(("F" if action.what == "activations" else "B", action.stage, action.microbatch))
            else:
                posted.discard(("F" if action.kind is ActionKind.FORWARD else "B", action.stage, action.microbatch))
            most = max(most, len(posted))
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_receive_is_posted_before_its_message_leaves(name: str) -> None:
    """In the times of papers: a rank posts as soon as it is done with the action before."""
    for _, _, _, schedule in schedules_of(name, 4, 8):
        full, timeline, at = communicate(schedule), simulate(schedule), Positions(schedule)
        for rank, actions in enumerate(full.actions):
            done = 0
            for action in actions:
                done += action.is_compute
                if action.kind is ActionKind.RECV:
                    maker, index = at.producer(message_of(action))
                    posted_s = timeline.spans[rank][done - 1].end_s if done else 0.0
                    assert posted_s < timeline.spans[maker][index].end_s


def test_messages_are_derived_anew() -> None:
    once = communicate(generate("zb_v", 3, 5))
    assert communicate(once) == once
    assert communicate(communicate(once, posted_ahead=False)) == once


def test_a_value_goes_straight_to_the_stage_that_uses_it() -> None:
    """An encoder's states go to all decoder stages, token ids without gradient from the first to the last."""
    dataflow = Dataflow.of(4, {0: [1, 3], 1: [2, 3], 2: [3]}, without_gradient=[(0, 3)])
    schedule = communicate(generate("1f1b", 4, 3), dataflow)
    validate(schedule, dataflow)
    sent = {(what, sender, receiver) for what, sender, receiver, _ in messages(schedule, ActionKind.SEND)}
    assert sent == {
        *(("activations", *pair) for pair in [(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)]),
        *(("gradients", *pair) for pair in [(1, 0), (2, 1), (3, 1), (3, 2)]),
    }
    with pytest.raises(PlanError, match=r"lacks 0SEND_F0>3\n  why:   stage 3 uses activations of stage 0, which is on another"):
        validate(communicate(generate("1f1b", 4, 3)), dataflow)


def test_a_value_is_sent_once_to_each_rank() -> None:
    """Stage 0 is used by all five later stages of two ranks, and by a stage of its own rank."""
    placement = (0, 1, 2, 0, 1, 2)
    assert receiving_stages({1, 2, 3, 4, 5}, placement, 0) == (1, 2)
    assert receiving_stages({3, 4, 5}, placement, 0) == (4, 5)
    assert receiving_stages({3}, placement, 0) == ()


@pytest.mark.parametrize(
    "consumers, without_gradient, text",
    [
        (
            {1: [0]},
            [],
            "stage 0 cannot use what stage 1 produces\n"
            "  why:   activations go from earlier to later stages, and there are 2, counted from 0\n"
            "  try:   number the stages in the order in which the model runs them",
        ),
        (
            {0: [2]},
            [],
            "stage 2 cannot use what stage 0 produces\n"
            "  why:   activations go from earlier to later stages, and there are 2, counted from 0\n"
            "  try:   number the stages in the order in which the model runs them",
        ),
    ],
)
def test_what_no_dataflow_can_be(consumers: dict, without_gradient: list, text: str) -> None:
    with pytest.raises(PlanError) as error:
        Dataflow.of(2, consumers, without_gradient)
    assert str(error.value) == text


def test_a_gradient_needs_an_activation() -> None:
    with pytest.raises(PlanError) as error:
        Dataflow(3, frozenset({(0, 1)}), frozenset({(0, 2)}))
    assert str(error.value) == (
        "a gradient from stage 2 to stage 0, which sends it no activation\n"
        "  try:   name gradients only between stages that activations connect"
    )


def test_a_schedule_that_cannot_run_gets_no_messages() -> None:
    schedule = generate("1f1b", 2, 2)
    broken = replace(schedule, actions=(schedule.actions[0], parse_actions("1B0 1F0 1F1 1B1")))
    with pytest.raises(PlanError, match="deadlocks"):
        communicate(broken)
