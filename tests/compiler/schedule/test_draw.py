"""Pictures of schedules."""

import pytest
from schedules import schedules_of

from shardwright.compiler.schedule.draw import draw_text
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.simulate import StageTimes, simulate

SVG = "{http://www.w3.org/2000/svg}"


def test_text_as_wide_as_it_needs() -> None:
    assert draw_text(simulate(generate("1f1b", 3, 3))) == (
        "rank 0 0F0 0F1 0F2 ················0B0---- ····0B1---- ····0B2----\n"
        "rank 1 ····1F0 1F1 ········1B0---- 1F2 1B1---- ····1B2---- ········\n"
        "rank 2 ········2F0 2B0---- 2F1 2B1---- 2F2 2B2---- ················\n"
        "time 15, bubble 40.0% of it, most activations held: 3, 2, 1\n"
    )


def test_text_in_a_narrow_terminal() -> None:
    assert draw_text(simulate(generate("zb_h1", 2, 3)), width=30) == (
        "rank 0 F F ··I W F I W I W\nrank 1 ··F I F I W F I W W\ntime 10, bubble 10.0% of "
        "it, most activations held: 2, 2\n"
    )


def test_text_of_unequal_times() -> None:
    """Ends are rounded to characters; what is too short for a name is still seen."""
    times = [StageTimes(0.5, 1, 0.25), StageTimes(1, 1, 0.75)]
    assert draw_text(simulate(generate("1f1b", 2, 2), times), width=31) == (
        "rank 0 F F········0B0 ·····0B1\n"
        "rank 1 ··F0 1B0-- F1 1B1-- ····\n"
        "time 7.25, bubble 37.9% of it, most activations held: 2, 1\n"
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [12, 40, 77])
def test_text_keeps_to_the_width_and_shows_waiting_as_dots(name: str, width: int) -> None:
    for _, _, _, schedule in schedules_of(name, 4, 5, 2):
        timeline = simulate(schedule)
        *ranks, _ = draw_text(timeline, width).splitlines()
        assert len(ranks) == schedule.num_ranks
        assert all(len(line) <= width for line in ranks)
        full = draw_text(timeline).splitlines()
        for line, actions, busy_s in zip(full, schedule.actions, timeline.busy_s, strict=False):
            assert all(str(action) in line for action in actions)
            assert line.count("·") == (timeline.makespan_s - busy_s) * len("0F0 ")
