"""Late collectives: what a rank says and does when a collective takes long.

Ranks wait for collectives in slices of a second. While results come in time that costs nothing.
After a slice without a result :meth:`Late.look` asks two questions of the store of the job:

- Has a member failed in a call in which it has communicated, without coming to this collective?
  Then it never will, and :class:`Left` ends the wait, long before the limit.
- Which members are in this collective too? After
  ``collective_notice_s`` seconds a warning names the others, once
  for each collective:

    rank 0 waits in all_reduce over tp with rank 1, next to 'down.bias', gencode0.py:47: y =
    all_reduce(x, tp), for 30 s so far; rank 1 has not come to it: rank 1 (process 4711 on node3) is
    stopped

  Where ranks have not made the same calls, a member waits in another collective of the same ranks;
  then its own words follow, here and in the error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from shardwright.runtime.ranks.hub import in_words
from shardwright.runtime.waiting import Wait, collective_notice_s, logger

SLICE = timedelta(seconds=1)
"""How long to wait for a collective before looking how the others are."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank has said of its failure. ``calls``: for each group whose collectives it may owe,
    by the key of the group, how many of them it had begun; empty if the rank may still come.
    ``is_over``: it has gone on since. ``before``: the ``calls`` of failures before this one, which
    others may have yet to read.
    """

    text: str
    calls: Mapping[str, int] = field(default_factory=dict)
    is_over: bool = False
    before: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that a rank waits in. ``call``: the same on all members, ``"all_reduce over
    tp"``; ``text``: who waits in it for what.
    """

    call: str
    text: str


class Members(Protocol):
    """What the store of the job knows of the members of a group."""

    def failures(self, ranks: Sequence[int]) -> Mapping[int, Failure]:
        """The errors of ranks that have failed, also of those that have gone on since."""

    def say_waiting(self, group: str, number: int, waiting: Waiting) -> None:
        """Tell the others that this rank waits in the ``number``-th collective of a group."""

    def waiting(self, ranks: Sequence[int], group: str, number: int) -> Mapping[int, Waiting]:
        """What the ranks have said that wait in the ``number``-th collective of a group."""

    def states(self, ranks: Sequence[int]) -> str:
        """What the ranks do now, in words."""


class Left(RuntimeError):
    """A member of a group will not come to a collective."""


@functools.cache
def key_of(ranks: tuple[int, ...]) -> str:
    """What a group is called in the store."""
    return ",".join(map(str, ranks))


class Late:
    """One collective without a result. ``number``: how many its group had begun with it. ``what``:
    who waits in it for what. ``elsewhere``: in which other collectives members wait, if that has
    been found out.
    """

    def __init__(
        self,
        members: Members,
        rank: int,
        ranks: Sequence[int],
        number: int,
        what: Callable[[], Waiting],
    ) -> None:
        self.elsewhere = ""
        self._members = members
        self._others = [other for other in ranks if other != rank]
        self._group = key_of(ranks)
        self._number = number
        self._what = what
        self._clock = Wait("", math.inf)
        self._notice_s = collective_notice_s()
        self._has_told = self._has_said = False

    def look(self) -> None:
        """Called after each slice. Raises :class:`Left` if the collective cannot end."""
        self._clock.passed(SLICE.total_seconds())
        # The first slice was over before there was a clock.
        waited_s = self._clock.waited_s + SLICE.total_seconds()
        found = self._members.failures(self._others)
        failures = {rank: failure for rank, failure in found.items() if not failure.is_over}
        left = [
            rank
            for rank, failure in failures.items()
            if failure.calls.get(self._group, self._number) < self._number
        ]
        if left:
            raise Left(f"{in_words(left)} will not come to it")
        if not self._has_told and waited_s >= self._notice_s / 4:
            self._has_told = True
            self._members.say_waiting(self._group, self._number, self._what())
        if not self._has_said and waited_s >= self._notice_s:
            self._has_said = True
            mine = self._what()
            missed = self._who_is_missed(failures, mine.call)
            logger.warning("%s, for %.0f s so far; %s", mine.text, waited_s, missed)

    def _who_is_missed(self, failures: Mapping[int, Failure], call: str) -> str:
        there = self._members.waiting(self._others, self._group, self._number)
        missing = [rank for rank in self._others if rank not in there]
        if not missing:
            # Each rank counts the collectives of a group: of the same number, but another one.
            self.elsewhere = "; ".join(
                f"{waiting.text}: another collective"
                for waiting in there.values()
                if waiting.call != call
            )
            return self.elsewhere or "all of them are in it"
        verb = "has" if len(missing) == 1 else "have"
        # Who has failed explains why the rest is late.
        failed = [rank for rank in missing if rank in failures]
        return (
            f"{in_words(missing)} {verb} not come to it: {self._members.states(failed or missing)}"
        )
