"""The alarm that ends a search at its limit: when it rings, and what it leaves alone."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest

from shardwright.policies.autodist.candidates.alarm import Alarm, TimeIsOver

MANY = 10**9
"""Steps that take a minute, if nothing ends them."""


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [lambda work: work(), in_a_thread], ids=["main", "other"])
def test_the_step_under_way_is_broken_off_in_any_thread(
    run: Callable[[Callable[[], None]], None],
) -> None:
    """Not before the limit is over by its own clock, which is slower than the wall's here."""
    said: list[str] = []

    def now() -> float:
        return time.monotonic() / 2

    def work() -> None:
        began, alarm = now(), Alarm(0.02, now)
        try:
            with alarm.may_interrupt():
                alarm.note_answer()
                for _ in range(MANY):
                    pass
                said.append("the step has ended")
        except TimeIsOver:
            said.append("broken off")
        assert alarm.has_rung and now() - began >= 0.02

    run(work)
    assert said == ["broken off"]


def test_a_search_without_an_answer_goes_on_until_it_has_one() -> None:
    seconds = [0.0]
    alarm = Alarm(10.0, lambda: seconds[0])
    with alarm.may_interrupt():
        seconds[0] = 11.0
    assert not alarm.has_rung
    with pytest.raises(TimeIsOver), alarm.may_interrupt():
        alarm.note_answer()
    assert alarm.has_rung
    # It has done its work: what follows is not broken off.
    with alarm.may_interrupt():
        alarm.note_answer()


@pytest.mark.parametrize(("takes_s", "ends"), [(1.0, False), (2.0, True)])
def test_the_time_to_give_the_answer_is_kept(takes_s: float, ends: bool) -> None:
    seconds = [0.0]
    alarm = Alarm(10.0, lambda: seconds[0])
    seconds[0] = 8.0
    try:
        with alarm.may_interrupt():
            alarm.note_answer(takes_s)
    except TimeIsOver:
        pass
    assert alarm.has_rung == ends


def test_nothing_is_raised_outside_of_the_block() -> None:
    """And the interpreter is left as it was: a profiler sees calls after it."""
    alarm = Alarm()
    alarm.note_answer()
    alarm.ring()
    assert not alarm.has_rung, "there was nothing to end"
    with pytest.raises(TimeIsOver), alarm.may_interrupt():
        alarm.ring()
        alarm.ring()
    alarm.ring()
    events: list[str] = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        alarm.ring()
    finally:
        sys.setprofile(None)
    assert events[0] == "call" and alarm.has_rung
