"""What is said of a collective that takes long: in which call the other members wait."""

import logging

import pytest

from shardwright.runtime.ranks import late
from shardwright.runtime.ranks.late import Late, Waiting
from shardwright.runtime.waiting import COLLECTIVE_NOTICE_VARIABLE

SUM = Waiting("all_reduce over tp", "rank 1 waits in all_reduce over tp with rank 0")
MINE = Waiting("all_gather over world", "rank 0 waits in all_gather over world with rank 1")


class Told:
    """A store in which rank 1 has said where it waits, if anywhere."""

    def __init__(self, waiting):
        self.there = {} if waiting is None else {1: waiting}
        self.told = []

    def failures(self, ranks):
        return {}

    def say_waiting(self, group, number, waiting):
        self.told.append((group, number, waiting))

    def waiting(self, ranks, group, number):
        return self.there

    def states(self, ranks):
        return "rank 1 runs"


@pytest.mark.parametrize(
    ("waiting", "words", "elsewhere"),
    [
        (None, "rank 1 has not come to it: rank 1 runs", ""),
        (MINE, "all of them are in it", ""),
        (SUM, f"{SUM.text}: another collective", f"{SUM.text}: another collective"),
    ],
)
def test_who_is_missed(monkeypatch, caplog, waiting, words, elsewhere):
    """Ranks that have not made the same calls meet in collectives of one number that are two."""
    monkeypatch.setenv(COLLECTIVE_NOTICE_VARIABLE, "1")
    members = Told(waiting)
    waits = Late(members, 0, (0, 1), 7, lambda: MINE)
    with caplog.at_level(logging.WARNING, late.logger.name):
        waits.look()
    assert caplog.messages == [f"{MINE.text}, for 1 s so far; {words}"]
    assert members.told == [("0,1", 7, MINE)] and waits.elsewhere == elsewhere
