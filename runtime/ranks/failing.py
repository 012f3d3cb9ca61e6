"""Calls that fail on some ranks: who is told, and when a rank may go on after one.

A check of numbers in forward may fail on one rank alone. The others wait for that rank in their
next collective. So a rank tells the error of a call, and how many collectives it had begun. Who
waits for it finds that in the store of the job (:mod:`shardwright.runtime.ranks.late`).

A program may catch the error and go on with the next batch. That is right where the rank had not
communicated in the call: nobody has got anything of it. It is right too where all ranks that it had
communicated with failed alike. Otherwise its next collectives would meet those of the failed call
on other ranks, and the numbers would be wrong. So before the next call the rank waits until the
others have said how they fared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from torch.utils.checkpoint import _StopRecomputationError

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.ranks.hub import in_words
from shardwright.runtime.ranks.late import Failure, Members
from shardwright.runtime.waiting import LIMIT_HINT, Wait

Calls = Mapping[str, int]


class Notes(Members, Protocol):
    """Where ranks tell how they are."""

    def say_failed(self, failure: Failure) -> None: ...


class FailingCalls(AbstractContextManager[None]):
    """Around each call of a module. ``calls``: how many collectives of each group this rank has
    begun, by the group's key.
    """

    def __init__(self, notes: Notes, rank: int, calls: Callable[[], Calls]) -> None:
        self._notes, self._rank, self._calls = notes, rank, calls
        self._before: Calls = {}
        self._depth = 0
        self._failure: Failure | None = None
        self._over: Calls = {}  # of the failures that this rank has gone on from

    def __enter__(self) -> None:
        if self._depth == 0:
            if self._failure is not None:
                self._go_on(self._failure)
            self._before = self._calls()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        self._depth -= 1
        # What another rank is to blame for has been told where it was noticed. A recomputation
        # that has got all that backward needs ends by an exception, too, on all ranks.
        if (
            self._depth == 0
            and isinstance(error, Exception)
            and not isinstance(error, DistributedError | _StopRecomputationError)
        ):
            # The collectives that were begun since: others take part in these, and will fail alike.
            begun = {
                group: number
                for group, number in self._calls().items()
                if number != self._before.get(group, 0)
            }
            line = str(error).partition("\n")[0]
            text = f"{type(error).__name__}: {line}"
            self._failure = Failure(text, begun, before=self._over)
            self._notes.say_failed(self._failure)

    def _go_on(self, failure: Failure) -> None:
        """Return when all ranks that took part in the call have failed like this one. Raises
        :class:`DistributedError` if one has not.
        """
        # All ranks of these collectives.
        members = {int(rank) for group in failure.calls for rank in group.split(",")} - {self._rank}
        wait = Wait(
            f"rank {self._rank} waits for {in_words(sorted(members))} before it goes on "
            "after an error"
        )
        while members:
            told = self._notes.failures(sorted(members))
            # Alike: it failed in the same collectives. Others: it failed elsewhere.
            alike = {rank for rank, found in told.items() if _is_alike(found, failure)}
            others = [
                rank for rank, found in told.items() if rank not in alike and not found.is_over
            ]
            if others:
                raise self._alone(others, failure, told[others[0]].text)
            members -= alike
            if members and not wait.pause():
                raise self._alone(sorted(members), failure, self._notes.states(sorted(members)))
        self._failure = None
        self._over = {**self._over, **failure.calls}
        self._notes.say_failed(replace(failure, is_over=True))  # others may have yet to read it

    def _alone(self, others: list[int], failure: Failure, why: str) -> DistributedError:
        return DistributedError(
            f"rank {self._rank} cannot go on after an error that {in_words(others)} did not have",
            why=f"here it was {failure.text}; there: {why}",
            hint=f"end all ranks, or see that the error comes on all of them; {LIMIT_HINT}",
        )


def _is_alike(found: Failure, mine: Failure) -> bool:
    """Whether another rank has failed in the same call, as far as both have begun collectives of
    the same groups. It may have failed again since.
    """
    for calls in (found.calls, found.before):
        common = calls.keys() & mine.calls.keys()
        if common and all(calls[group] == mine.calls[group] for group in common):
            return True
    return False
