"""How long ranks wait, and what they say meanwhile."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwright.runtime import waiting
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.waiting import OutOfTimeError, Pulse, Wait, in_time, notice_s, timeout_s


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves; ``stall`` is added to the next sleep."""

    class Clock:
        now, stall = 0.0, 0.0

        def sleep(self, seconds):
            self.now += seconds + self.stall
            self.stall = 0.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    return made


def test_the_clock_is_set_by_the_environment_when_a_wait_begins(monkeypatch):
    assert (timeout_s(), notice_s()) == (600.0, 5.0)
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT_S", "42.5")
    monkeypatch.setenv("SHARDWRIGHT_NOTICE_S", "2")
    assert (timeout_s(), notice_s(), Wait("").limit_s) == (42.5, 2.0, 42.5)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "1e300"])
def test_what_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT_S", text)
    with pytest.raises(ConfigError) as caught:
        timeout_s()
    assert str(caught.value) == (
        "SHARDWRIGHT_TIMEOUT_S is a number of seconds above 0, and at most a year\n"
        f"  why:   it is '{text}'\n"
        "  try:   set it like SHARDWRIGHT_TIMEOUT_S=600, or unset it"
    )


@pytest.mark.parametrize(
    ("given", "expected"), [(timedelta(minutes=30), 600.0), (timedelta(seconds=90), 90.0)]
)
def test_the_users_own_timeout_of_the_process_group_counts(monkeypatch, given, expected):
    store = dist.HashStore()
    store.set_timeout(given)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert timeout_s() == expected


def waited(wait, signs=()):
    """Seconds until the limit, with a sign of life at each pause while there are any."""
    signs = iter(signs)
    while True:
        wait.heard(next(signs, None))
        if not wait.pause():
            return wait.waited_s


def test_a_wait_has_a_limit_and_says_whom_it_is_for(clock, caplog):
    assert waited(Wait("rank 1 waits for rank 0", 30.0)) == pytest.approx(30.0)
    assert caplog.messages == [
        f"rank 1 waits for rank 0, for {seconds} s so far" for seconds in (5, 10, 20)
    ]


def test_signs_of_life_restart_the_clock_and_repeated_ones_do_not(clock):
    assert waited(Wait("", 1.0), range(1000)) > 10.0
    assert waited(Wait("", 1.0), [7] * 1000) < 1.1


def test_time_in_which_the_whole_process_stood_still_does_not_count(clock):
    wait = Wait("", 30.0)
    assert wait.pause()
    clock.stall = 3600.0
    assert wait.pause() and wait.waited_s < 2.0


def test_a_call_that_blocks_is_given_up():
    release = threading.Event()
    with pytest.raises(OutOfTimeError):
        in_time(lambda: release.wait(600), Wait("", 0.1))
    release.set()
    assert in_time(lambda: 3, Wait("")) == 3
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0, Wait(""))


def test_a_pulse_beats_while_its_block_runs(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT_S", "0.08")
    beats, third = [], threading.Event()

    def beat(number):
        beats.append(number)
        if number == 3:
            third.set()

    with Pulse(beat):
        assert beats[0] == 0
        assert third.wait(600)
    assert beats[:4] == [0, 1, 2, 3]
