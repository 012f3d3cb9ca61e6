"""Timelines, by hand and by property."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import dependencies, random_dataflow, random_schedule

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.live_microbatches import held_together, peak_in_flight
from shardwright.compiler.schedule.published import generate
from shardwright.compiler.schedule.shared_cores import SharedMachines, Sharing
from shardwright.compiler.schedule.simulate import StageTimes, Timeline, ends_s, simulate


def rows(timeline: Timeline) -> list[str]:
    return [
        " ".join(f"{span.action}@{span.start_s:g}-{span.end_s:g}" for span in spans)
        for spans in timeline.spans
    ]


def test_two_ranks_by_hand() -> None:
    """Unequal stages; activations travel for 2, gradients for 1: 0F1 ends at 2, arrives at 4, but
    1B0 runs until 10.
    """
    times = [StageTimes(1, 2, 1), StageTimes(3, 2, 2)]
    timeline = simulate(generate("1f1b", 2, 2), times, {(0, 1): 2, (1, 0): 1})
    assert rows(timeline) == [
        "0F0@0-1 0F1@1-2 0B0@11-14 0B1@18-21",
        "1F0@3-6 1B0@6-10 1F1@10-13 1B1@13-17",
    ]
    assert (timeline.makespan_s, timeline.busy_s) == (21, (8, 14))
    assert timeline.bubble_ratio == pytest.approx(20 / 42)
    assert timeline.bubble_per_work == pytest.approx(20 / 22)
    assert timeline.peak_in_flight == (2, 1)


def test_split_backward_by_hand() -> None:
    """The gradient leaves after 1I0; the weight gradient of rank 1 runs while it travels."""
    timeline = simulate(generate("zb_h1", 2, 1), StageTimes(1, 2, 3), transfer_s=0.5)
    assert rows(timeline) == ["0F0@0-1 0I0@5-7 0W0@7-10", "1F0@1.5-2.5 1I0@2.5-4.5 1W0@4.5-7.5"]


def test_a_pair_of_stages_that_is_not_named_takes_no_time() -> None:
    assert simulate(generate("infer_pipe", 2, 1), transfer_s={(1, 0): 9.0}).makespan_s == 2


def test_stages_of_one_rank_hand_over_at_once() -> None:
    assert simulate(generate("infer_pipe", 1, 1, 3), transfer_s=9.0).makespan_s == 3


def test_skips_delay_only_those_who_use_them() -> None:
    """Without a link from stage 1, stage 2 waits for stage 0 alone."""
    timeline = simulate(
        generate("infer_pipe", 3, 1),
        [StageTimes(1), StageTimes(5), StageTimes(1)],
        0,
        Dataflow.of(3, {0: [1, 2]}),
    )
    assert rows(timeline) == ["0F0@0-1", "1F0@1-6", "2F0@1-2"]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1).map(Random))
def test_actions_start_as_soon_as_they_can_and_not_before(rng: Random) -> None:
    num_ranks = rng.randint(1, 4)
    dataflow = random_dataflow(rng, num_ranks + rng.randint(0, 3))
    schedule = random_schedule(rng, dataflow, num_ranks, rng.randint(1, 4))
    times = [
        StageTimes(rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4))
        for _ in range(schedule.num_stages)
    ]
    transfer = rng.randint(0, 3)
    timeline = simulate(schedule, times, transfer, dataflow)
    spans = {span.action: span for row in timeline.spans for span in row}
    needs = dependencies(schedule, dataflow)
    for rank, row in enumerate(timeline.spans):
        assert tuple(span.action for span in row) == schedule.actions[rank]
        free_s = 0.0
        for span in row:
            there = [
                spans[need].end_s + transfer * (schedule.placement[need.stage] != rank)
                for need in needs[span.action]
            ]
            assert span.start_s == max([free_s, *there])
            assert span.end_s - span.start_s == times[span.action.stage].of(span.action.kind)
            free_s = span.end_s


def test_in_flight() -> None:
    """Rank 0 holds two microbatches of both of its stages when 2B0 begins."""
    schedule = generate("1f1b_interleaved", 2, 2)
    assert str(schedule).splitlines()[0] == "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert peak_in_flight(schedule) == (4, 3)
    assert peak_in_flight(generate("infer_pipe", 2, 2)) == (0, 0)


def test_what_is_held_together() -> None:
    """What is held of two stages of a rank: as many of both as no other moment has of each."""
    schedule = generate("1f1b_interleaved", 2, 4, 2)
    assert held_together(schedule) == (((3, 2), (4, 1)), ((2, 1), (3, 0)))
    assert held_together(schedule, in_any_case=True) == (((3, 2),), ((3, 0), (2, 1)))
    for rank, moments in enumerate(held_together(generate("zb_v", 3, 8))):
        assert max(map(sum, moments)) == peak_in_flight(generate("zb_v", 3, 8))[rank]


def test_what_is_held_in_any_case_is_beside_gradients_and_gone_with_the_input_gradient() -> None:
    assert held_together(generate("gpipe", 2, 4)) == (((4,),), ((4,),))
    assert held_together(generate("gpipe", 2, 4), in_any_case=True) == (((3,),), ((3,),))
    assert held_together(generate("zb_h1", 3, 6)) == (((3,),),) * 3
    assert held_together(generate("zb_h1", 3, 6), in_any_case=True) == (((3,),), ((2,),), ((1,),))
    assert held_together(generate("infer_pipe", 2, 2)) == (((0,),), ((0,),))


def shared(num_ranks: int, num_cores: int, positions: list[list[int]]) -> SharedMachines:
    return SharedMachines.of(Sharing(num_ranks, num_cores), positions, sum(map(len, positions)), 1)


def test_two_ranks_on_one_core_by_hand() -> None:
    """Times are those of two ranks at work; one alone takes half as long. While 1F0 and 0F1 both
    run, neither does.
    """
    timeline = simulate(
        generate("infer_pipe", 2, 2),
        [StageTimes(2), StageTimes(6)],
        0,
        machines=shared(2, 1, [[0], [1]]),
    )
    assert rows(timeline) == ["0F0@0-1 0F1@1-3", "1F0@1-5 1F1@5-8"]
    assert timeline.makespan_s == (2 + 2 + 6 + 6) / 2  # the core is never free


def test_ranks_that_wait_leave_no_core_unused_and_take_none() -> None:
    """Four positions on two cores, an action takes a core a second. One microbatch leaves a core
    free all the time; of four microbatches only the first action and the last one do.
    """
    machines = shared(4, 2, [[0], [1], [2], [3]])
    assert simulate(generate("infer_pipe", 4, 1), StageTimes(2), machines=machines).makespan_s == 4
    assert simulate(
        generate("infer_pipe", 4, 4), StageTimes(2), machines=machines
    ).makespan_s == pytest.approx((16 + 2) / 2)


def test_ranks_of_a_position_and_of_other_units_count_where_they_are() -> None:
    assert shared(4, 2, [[0, 1], [2, 3]]).beside == [[2, 2], [2, 2]]
    apart = SharedMachines.of(Sharing(2, 1), [[0, 1], [2, 3]], 4, 1)
    assert apart.beside == [[2, 0], [0, 2]] and apart.speeds([0, 1]) == [1.0, 1.0]
    units = SharedMachines.of(Sharing(4, 2), [[0], [1]], 2, 2)
    assert (
        units.beside == [[2, 2], [2, 2]]
        and units.speeds([0]) == [2.0]
        and units.speeds([0, 1]) == [1.0, 1.0]
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1).map(Random))
def test_shared_cores_do_all_work_and_no_more_at_a_time(rng: Random) -> None:
    num_ranks = rng.randint(1, 4)
    dataflow = random_dataflow(rng, num_ranks + rng.randint(0, 3))
    schedule = random_schedule(rng, dataflow, num_ranks, rng.randint(1, 4))
    times = [
        StageTimes(rng.randint(0, 4), rng.randint(0, 4), rng.randint(1, 4))
        for _ in range(schedule.num_stages)
    ]
    transfer, num_cores = rng.randint(0, 3), rng.randint(1, num_ranks)
    alone = simulate(schedule, times, transfer, dataflow)
    machines = shared(num_ranks, num_cores, [[rank] for rank in range(num_ranks)])
    timeline = simulate(schedule, times, transfer, dataflow, machines)
    assert [[s.action for s in row] for row in timeline.spans] == [
        [s.action for s in row] for row in alone.spans
    ]
    work = sum(alone.busy_s)
    most = num_ranks / num_cores  # how much faster than with all at work a rank can be
    assert max(alone.makespan_s / most, work / num_ranks) <= timeline.makespan_s * (1 + 1e-9)
    assert timeline.makespan_s <= alone.makespan_s * (1 + 1e-9)
    for row in timeline.spans:
        for span in row:
            seconds = times[span.action.stage].of(span.action.kind)
            assert seconds / most <= (span.end_s - span.start_s) * (1 + 1e-9) + 1e-9
            assert span.end_s - span.start_s <= seconds * (1 + 1e-9)
    if num_cores == num_ranks:
        assert timeline.makespan_s == pytest.approx(alone.makespan_s)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb_v", 2), ("1f1b_interleaved", 3)])
def test_ends_are_those_of_the_timeline(name: str, chunks: int) -> None:
    schedule = generate(name, 3, 6, chunks)
    times = [StageTimes(1 + 0.1 * stage, 2.0, 0.7) for stage in range(schedule.num_stages)]
    transfer_s = {(stage, stage + 1): 0.3 for stage in range(schedule.num_stages - 1)}
    line = simulate(schedule, times, transfer_s)
    assert ends_s(schedule, times, transfer_s) == [spans[-1].end_s for spans in line.spans]
