"""What the validator accepts and refuses: broken schedules of every kind, and random ones that
run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import can_run, random_dataflow, random_schedule

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.validate import validate
from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule_actions import ScheduleAction, parse_actions

seeds = st.integers(0, 2**32 - 1).map(Random)


def schedule_of(
    num_microbatches: int, *ranks: str, placement: tuple[int, ...] | None = None
) -> Schedule:
    """A schedule written by hand, one stage per rank unless said otherwise."""
    return Schedule(
        num_microbatches, placement or tuple(range(len(ranks))), tuple(map(parse_actions, ranks))
    )


def refusal(schedule: Schedule, **options: object) -> str:
    with pytest.raises(PlanError) as error:
        validate(schedule, **options)
    return str(error.value)


def random_case(rng: Random) -> tuple[Schedule, Dataflow]:
    num_ranks = rng.randint(1, 4)
    dataflow = random_dataflow(rng, num_ranks + rng.randint(0, 4))
    return random_schedule(rng, dataflow, num_ranks, rng.randint(1, 5)), dataflow


def with_rank(schedule: Schedule, rank: int, actions: list[ScheduleAction]) -> Schedule:
    return replace(
        schedule, actions=(*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :])
    )


# ------------------------------------------------------------------------------------------------
# orders that run


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_random_orders_that_run_are_valid(rng: Random) -> None:
    schedule, dataflow = random_case(rng)
    validate(schedule, dataflow)


@settings(max_examples=200, deadline=None)
@given(seeds)
def test_shuffled_orders_are_valid_exactly_when_they_can_run(rng: Random) -> None:
    """Against a topological sort of the definition."""
    schedule, dataflow = random_case(rng)
    rank = rng.randrange(schedule.num_ranks)
    actions = list(schedule.actions[rank])
    for _ in range(rng.randint(1, 3)):
        i, j = rng.randrange(len(actions)), rng.randrange(len(actions))
        actions[i], actions[j] = actions[j], actions[i]
    shuffled = with_rank(schedule, rank, actions)
    if can_run(shuffled, dataflow):
        validate(shuffled, dataflow)
    else:
        assert "deadlocks" in refusal(shuffled, dataflow=dataflow)


# ------------------------------------------------------------------------------------------------
# broken orders


@settings(max_examples=100, deadline=None)
@given(seeds, st.sampled_from(sorted(SCHEDULES)))
def test_anything_lost_doubled_or_misplaced_is_found(rng: Random, name: str) -> None:
    num_ranks = rng.randint(1, 4)
    schedule = generate(name, num_ranks, num_ranks * rng.randint(2, 3))
    rank = rng.randrange(num_ranks)
    actions = list(schedule.actions[rank])
    index = rng.randrange(len(actions))
    action = actions[index]
    lost = with_rank(schedule, rank, actions[:index] + actions[index + 1 :])
    assert " lacks " in refusal(lost)
    assert f"{action} is in schedule {name!r} twice" in refusal(
        with_rank(schedule, rank, [*actions, action])
    )
    if num_ranks > 1:
        other = (rank + 1) % num_ranks
        moved = with_rank(lost, other, [*lost.actions[other], action])
        assert f"{action} runs on the wrong rank in schedule {name!r}" in refusal(moved)


def test_a_circle_of_ranks_is_shown() -> None:
    schedule = schedule_of(2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert refusal(schedule) == (
        "schedule 'custom' deadlocks: ranks wait in a circle\n"
        "  where: rank 0 at 0B0 (action 1) -> rank 1 at 1F1 (action 1) -> rank 0\n"
        "  why:   0B0 on rank 0 waits for 1B0, which rank 1 runs after 1F1; "
        "1F1 on rank 1 waits for 0F1, which rank 0 runs after 0B0\n"
        "  try:   change the order of one of these ranks: on rank 0, 0F1 before 0B0"
    )


def test_only_the_circle_is_shown_not_the_ranks_that_wait_for_it() -> None:
    schedule = schedule_of(2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    assert "  where: rank 1 at 1B0 (action 1) -> rank 2 at 2F1 (action 1) -> rank 1\n" in refusal(
        schedule
    )


def test_a_rank_that_waits_for_itself() -> None:
    assert refusal(schedule_of(1, "0B0 0F0")) == (
        "schedule 'custom' deadlocks: a rank waits for itself\n"
        "  where: rank 0 at 0B0 (action 0) -> rank 0\n"
        "  why:   0B0 on rank 0 waits for 0F0, which rank 0 runs after 0B0\n"
        "  try:   change the order of one of these ranks: on rank 0, 0F0 before 0B0"
    )


@pytest.mark.parametrize(
    "schedule, text",
    [
        (
            schedule_of(2, "0F0 0B0"),
            "schedule 'custom' lacks 2 actions: 0F1, 0B1\n"
            "  why:   each of 1 stages runs each of 2 microbatches\n"
            "  try:   add them on the ranks of their stages; a backward is one B, or an I and a W",
        ),
        (
            schedule_of(1, "0F0 0I0"),
            "schedule 'custom' lacks 1 actions: 0W0\n"
            "  why:   each of 1 stages runs each of 1 microbatches\n"
            "  try:   add them on the ranks of their stages; a backward is one B, or an I and a W",
        ),
        (
            schedule_of(1, "0F0 0B0 0W0"),
            "stage 0 runs the backward of microbatch 0 twice: 0B0 and 0W0\n"
            "  where: schedule 'custom', rank 0\n"
            "  try:   keep one B, or an I and a W",
        ),
        (
            schedule_of(1, "0F0 0F0 0B0"),
            "0F0 is in schedule 'custom' twice\n  where: rank 0, action 1\n  try:   run each "
            "action once, on one rank",
        ),
        (
            schedule_of(1, "0F0 0B0 0F1"),
            "0F1 is out of range in schedule 'custom'\n"
            "  where: rank 0, action 2\n"
            "  why:   there are 1 stages and 1 microbatches, counted from 0",
        ),
        (
            schedule_of(1, "0F0 0B0 1F0", "1B0"),
            "1F0 runs on the wrong rank in schedule 'custom'\n"
            "  where: rank 0, action 2\n"
            "  why:   stage 1 is on rank 1\n"
            "  try:   move the action to that rank, or change the placement",
        ),
        (
            schedule_of(1, "0F0", "1F0", placement=(0, 0)),
            "schedule 'custom' of 1 microbatches, with stages on the ranks [0] and actions "
            "for 2 ranks\n"
            "  try:   give each rank a stage and its actions, and at least one microbatch",
        ),
    ],
)
def test_what_is_refused_and_how(schedule: Schedule, text: str) -> None:
    assert refusal(schedule) == text


def test_many_missing_actions_are_counted() -> None:
    assert "lacks 18 actions: 0F1, 0F2, 0F3, 0F4, 0F5, 0F6, 0F7, 0F8, ...\n" in refusal(
        schedule_of(10, "0F0 0B0")
    )


def test_activations_in_flight_are_bounded() -> None:
    for name, held in (("gpipe", 5), ("1f1b", 3), ("zb_h1", 3), ("zb_v", 6)):
        schedule = generate(name, 3, 5)
        validate(schedule, max_in_flight=held)
        assert f"schedule {name!r} holds more than {held - 1} activations at once" in refusal(
            schedule, max_in_flight=held - 1
        )
    assert refusal(generate("gpipe", 2, 3), max_in_flight=2) == (
        "schedule 'gpipe' holds more than 2 activations at once\n"
        "  where: rank 0, action 2\n"
        "  why:   after 0F2 rank 0 holds 3\n"
        "  try:   run backwards earlier on this rank, or choose '1f1b': its ranks hold no "
        "more than there are ranks"
    )
    validate(generate("infer_pipe", 2, 3), max_in_flight=0)


def test_a_dataflow_of_another_size_is_refused() -> None:
    assert (
        refusal(generate("1f1b", 2, 3), dataflow=Dataflow.chain(3))
        == "a dataflow of 3 stages for a schedule of 2"
    )


def test_stages_that_do_not_feed_each_other_need_no_order() -> None:
    """Two towers whose results meet in the last stage: the second need not wait for the first."""
    towers = Dataflow.of(3, {0: [2], 1: [2]})
    schedule = schedule_of(2, "0F0 0F1 0B0 0B1", "1F1 1F0 1B1 1B0", "2F1 2F0 2B1 2B0")
    validate(schedule, towers)


@pytest.mark.parametrize("actions", ["1F0 0F0 2F0", "0F0 1F0 2F0 2B0 0B0 1B0"])
def test_stages_of_one_rank_run_in_order_even_if_they_do_not_feed_each_other(actions: str) -> None:
    """What several of them use comes with the first, and its gradient goes back after that one's
    backward.
    """
    towers = Dataflow.of(3, {0: [2], 1: [2]})
    text = refusal(schedule_of(1, actions, placement=(0, 0, 0)), dataflow=towers)
    assert "deadlocks: a rank waits for itself" in text


def test_backward_may_be_split_for_some_microbatches_only() -> None:
    validate(schedule_of(2, "0F0 0F1 0B0 0I1 0W1"))


@pytest.mark.parametrize("change", [lambda a: a[::-1], lambda a: a[1:] + a[:1]])
def test_orders_of_published_schedules_turned_round_are_refused(
    change: Callable[..., list[ScheduleAction]],
) -> None:
    for name in SCHEDULES:
        schedule = generate(name, 3, 3)
        if schedule.trains:
            assert "deadlocks" in refusal(with_rank(schedule, 1, change(list(schedule.actions[1]))))
