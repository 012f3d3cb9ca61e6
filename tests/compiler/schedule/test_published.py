"""Every published schedule in every size up to 8 ranks, 16 microbatches, 3 chunks: valid, and as
good as published.

In formulas p is the number of ranks, m of microbatches, v of chunks, r a rank. Times are F = I = W
and B = 2F.
"""

import subprocess
import sys
from itertools import takewhile

import pytest
from schedules import schedules_of

from shardwright.compiler.schedule.live_microbatches import held_together, peak_in_flight
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.simulate import simulate
from shardwright.compiler.schedule.validate import validate
from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule_actions import ActionKind


def approx(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def warmups(schedule: Schedule) -> list[int]:
    """How many forwards each rank runs before those that alternate with backwards."""
    first = [
        list(takewhile(lambda action: action.kind is ActionKind.FORWARD, actions))
        for actions in schedule.actions
    ]
    return [len(forwards) - 1 for forwards in first]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_valid(name: str) -> None:
    count = 0
    for _, _, _, schedule in schedules_of(name):
        validate(schedule)
        count += 1
    assert count == {"gpipe": 384, "infer_pipe": 384, "1f1b_interleaved": 2 * 42}.get(name, 128)


def test_the_entry_of_a_schedule_says_what_it_does() -> None:
    for name, method in SCHEDULES.items():
        for p, m, v, schedule in schedules_of(name, 4, 4):
            kinds = {action.kind for actions in schedule.actions for action in actions}
            assert schedule.trains == method.trains
            assert (ActionKind.INPUT_GRADIENT in kinds) == method.splits_backward
            assert (ActionKind.BACKWARD in kinds) == (method.trains and not method.splits_backward)
            assert (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages) == (
                p,
                m,
                p * v,
            )
            assert (schedule.placement[-1] == 0) == (method.v_shaped or p == 1)


def test_gpipe() -> None:
    """Huang et al. 2019: a bubble of (p-1)/(m+p-1), and all microbatches held."""
    for p, m, v, schedule in schedules_of("gpipe"):
        assert peak_in_flight(schedule) == (m * v,) * p
        if v == 1:
            assert simulate(schedule).bubble_ratio == approx((p - 1) / (m + p - 1))


def test_1f1b() -> None:
    """Narayanan et al. 2021, section 2.2.1: the bubble of GPipe, (p-1)/m of the work; at most p-r
    microbatches held.
    """
    for p, m, _, schedule in schedules_of("1f1b"):
        timeline = simulate(schedule)
        assert timeline.bubble_ratio == approx((p - 1) / (m + p - 1))
        assert timeline.bubble_per_work == approx((p - 1) / m)
        assert timeline.peak_in_flight == tuple(min(p - r, m) for r in range(p))
        assert warmups(schedule) == [min(p - r, m) - 1 for r in range(p)]
        validate(schedule, max_in_flight=p)


def test_1f1b_interleaved() -> None:
    """Narayanan et al. 2021, section 2.2.2: a bubble of (p-1)/(v*m) of the work.

    At most 2(p-r-1) + (v-1)p + 1 stage activations are held, which on the first rank is 1 +
    (p-1)/(pv) times the memory of 1F1B (Korthikanti et al., "Reducing Activation Recomputation in
    Large Transformer Models", 2022, section 4.2.3).
    """
    for p, m, v, schedule in schedules_of("1f1b_interleaved"):
        timeline = simulate(schedule)
        assert timeline.bubble_per_work == approx((p - 1) / (v * m))
        held = [min(2 * (p - r - 1) + (v - 1) * p + 1, v * m) for r in range(p)]
        assert list(timeline.peak_in_flight) == held
        assert warmups(schedule) == [count - 1 for count in held]
        if held[0] < v * m:
            assert held[0] / v == approx(p * (1 + (p - 1) / (p * v)))


def test_zb_h1() -> None:
    """Qi et al. 2023: a third of the bubble of 1F1B, and its peak memory; with few microbatches
    never more than its bubble.
    """
    for p, m, _, schedule in schedules_of("zb_h1"):
        timeline, plain = simulate(schedule), simulate(generate("1f1b", p, m))
        assert timeline.bubble_per_work <= plain.bubble_per_work + 1e-12
        if m >= p:
            assert timeline.bubble_per_work == approx(plain.bubble_per_work / 3)
        assert timeline.peak_in_flight == (max(plain.peak_in_flight),) * p


def test_zb_v() -> None:
    """Qi et al. 2024: only the first microbatch's way down the ranks is left of the bubble, with
    the peak of 1F1B at most.
    """
    for p, m, _, schedule in schedules_of("zb_v"):
        timeline, plain = simulate(schedule), simulate(generate("1f1b", p, m))
        assert timeline.bubble_per_work <= plain.bubble_per_work + 1e-12
        if m >= 2 * p:
            assert timeline.bubble_per_work == approx((p - 1) / (6 * m))
        # Of stages half as large.
        assert max(timeline.peak_in_flight) == 2 * max(plain.peak_in_flight)


def test_infer_pipe() -> None:
    for p, m, v, schedule in schedules_of("infer_pipe"):
        timeline = simulate(schedule)
        assert timeline.peak_in_flight == (0,) * p
        if v == 1 or m % p == 0:
            assert timeline.bubble_per_work == approx((p - 1) / (v * m))


def test_chunks_default_to_the_least() -> None:
    assert generate("1f1b_interleaved", 2, 4) == generate("1f1b_interleaved", 2, 4, 2)
    assert generate("gpipe", 2, 4).placement == (0, 1)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("1f1", 2, 4), "unknown pipeline schedule '1f1'\n  try:   did you mean '1f1b'?"),
        (("1f1b", 0, 4), "a pipeline with 0 ranks\n  try:   ask for at least one of the ranks"),
        (
            ("1f1b", 2, 0),
            "a pipeline with 0 microbatches\n  try:   ask for at least one of the microbatches",
        ),
        (
            ("1f1b", 2, 4, 2),
            "schedule '1f1b' with 2 stages per rank\n  why:   it works with exactly 1\n"
            "  try:   make 2 stages for 2 ranks, or choose another schedule",
        ),
        (
            ("1f1b_interleaved", 4, 8, 1),
            "schedule '1f1b_interleaved' with 1 stages per rank\n  why:   it works with at "
            "least 2\n"
            "  try:   make 8 stages for 4 ranks, or choose another schedule",
        ),
        (
            ("1f1b_interleaved", 4, 6),
            "schedule '1f1b_interleaved' with 6 microbatches on 4 ranks\n"
            "  why:   it takes 4 microbatches at a time, and 6 is not a multiple of that\n"
            "  try:   use 4 or 8 microbatches, or schedule '1f1b' or 'zb_v', which take any number",
        ),
        (
            ("1f1b_interleaved", 4, 3),
            "schedule '1f1b_interleaved' with 3 microbatches on 4 ranks\n"
            "  why:   it takes 4 microbatches at a time, and 3 is not a multiple of that\n"
            "  try:   use 4 microbatches, or schedule '1f1b' or 'zb_v', which take any number",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments: tuple, text: str) -> None:
    with pytest.raises(PlanError) as error:
        generate(*arguments)
    assert str(error.value) == text


def test_schedules_need_no_torch() -> None:
    code = """
import sys
import shardwright.compiler.schedule.draw, shardwright.compiler.schedule.files
import shardwright.compiler.schedule.published
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_schedule_and_what_it_holds_are_worked_out_once() -> None:
    schedule = generate("1f1b_interleaved", 4, 8, 3)
    assert generate("1f1b_interleaved", 4, 8, 3) is schedule
    assert generate("1f1b_interleaved", 4, 8, 2) is not schedule
    assert held_together(schedule) is held_together(schedule)
    assert held_together(schedule) != held_together(schedule, in_any_case=True)
    assert peak_in_flight(schedule) is peak_in_flight(schedule)
