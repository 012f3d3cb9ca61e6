"""Where the ranks of one process meet: collectives, mailboxes, and who waits for whom.

The part of :mod:`shardwright.runtime.ranks.threads` that knows nothing of what is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.ranks.turns import Turns
from shardwright.runtime.waiting import LIMIT_HINT, Wait

Combine = Callable[[list[Any]], Any]
"""Makes what a collective yields from what the members gave, by index; it keeps none of that."""


class RankAbortedError(Exception):
    """Ends a rank because another one failed; :func:`~.threads.run_ranks` raises the other's
    exception.
    """


@dataclass(eq=False)
class Meeting:
    """One collective call of one group."""

    what: str  # the collective, its group and its shapes: must be the same on all members
    ranks: tuple[int, ...]
    combine: Combine
    # By index; no tensors any more once it is done.
    given: dict[int, Any] = field(default_factory=dict)
    outcome: Any = None
    done: bool = False
    num_left: int = 0

    def missing(self) -> set[int]:
        """The ranks that have not joined."""
        return {rank for index, rank in enumerate(self.ranks) if index not in self.given}


@dataclass(eq=False)
class _Waiting:
    """What a blocked rank waits for."""

    what: str  # the call it waits in, up to the ranks it waits for
    ready: Callable[[], bool]
    missing: Callable[[], set[int]]
    is_message: bool = False


class Hub:
    """Where the ranks of one :func:`~.threads.run_ranks` meet. All its state is guarded by the lock
    of its turns.
    """

    def __init__(self, num_ranks: int, timeout_s: float | None) -> None:
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._limit_hint = LIMIT_HINT if timeout_s is None else None
        self.turns = Turns(num_ranks)
        self._meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self._mail: dict[Hashable, deque[Tensor]] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._ended: set[int] = set()
        self.failure: tuple[int | None, BaseException] | None = None
        self.working: set[int] = set()  # those for which the others wait as long as it takes
        self.interrupted: list[str] = []  # who waited for a message when some rank failed

    def join(
        self,
        what: str,
        ranks: tuple[int, ...],
        index: int,
        number: int,
        given: Any,
        combine: Combine,
    ) -> Meeting:
        """Give the part of member ``index`` to the group's call ``number``; the last one to join
        computes the outcome.
        """
        with self.turns.lock:
            self._raise_if_aborted()
            # The first one to come opens the meeting.
            meeting = self._meetings.setdefault((ranks, number), Meeting(what, ranks, combine))
            if meeting.what != what:
                others = sorted(meeting.ranks[i] for i in meeting.given)
                raise DistributedError(
                    f"the ranks {list(ranks)} disagree about their collective call {number}",
                    why=f"rank {ranks[index]} calls {what}, but {in_words(others)} called "
                    f"{meeting.what}",
                )
            meeting.given[index] = given
            # The last one to come computes for all.
            if len(meeting.given) == len(ranks):
                with _on_its_way():
                    meeting.outcome = combine([meeting.given[i] for i in range(len(ranks))])
                meeting.given = dict.fromkeys(meeting.given)
                meeting.done, meeting.num_left = True, len(ranks)
                self._call_ready()
            return meeting

    def outcome(self, meeting: Meeting, index: int, number: int) -> Any:
        """Wait for the outcome of a meeting. It is shared by all members: copy it."""
        with self.turns.lock:
            self._wait(
                meeting.ranks[index],
                _Waiting(f"{meeting.what} for", lambda: meeting.done, meeting.missing),
            )
            meeting.num_left -= 1
            if meeting.num_left == 0:
                del self._meetings[meeting.ranks, number]
            return meeting.outcome

    def post(self, address: Hashable, x: Tensor) -> None:
        """Put a copy of a tensor into a mailbox, behind those that are there."""
        with _on_its_way():
            x = x.clone()
        with self.turns.lock:
            self._mail.setdefault(address, deque()).append(x)
            self._call_ready()

    def fetch(
        self, address: Hashable, rank: int, src: int, what: str, *, is_message: bool = False
    ) -> Tensor:
        """Wait, as ``rank``, for the next tensor that rank ``src`` posts to a mailbox. ``what``:
        the call, up to "rank 3".
        """
        with self.turns.lock:
            box = self._mail.setdefault(address, deque())
            self._wait(rank, _Waiting(what, lambda: bool(box), lambda: {src}, is_message))
            x = box.popleft()
            if not box:
                del self._mail[address]
            return x

    def end(self, rank: int) -> None:
        """``rank`` has returned and joins no further call."""
        with self.turns.lock:
            self._ended.add(rank)
            self._find_stuck()
            self.turns.end()

    def abort(self, rank: int | None, error: BaseException) -> None:
        """Wake all ranks and end them. Only the first call counts; ``rank`` is ``None`` where no
        single one is to blame.
        """
        with self.turns.lock:
            if self.failure is None:
                self.failure = (rank, error)
            self.turns.free()

    def _raise_if_aborted(self) -> None:
        if self.failure is not None:
            raise RankAbortedError

    def _wait(self, rank: int, waiting: _Waiting) -> None:
        self._waiting[rank] = waiting
        clock: Wait | None = None  # most waits need none
        try:
            # Rank by rank until something happens: a result, a failure, or nothing for too long.
            while not waiting.ready():
                self._raise_if_aborted()
                self._find_stuck()
                if self.failure is not None:
                    continue
                clock = clock or Wait("", self._timeout_s)
                clock.what = _waits(rank, waiting)
                pause_s = clock.until_notice_s
                if self.turns.wait(rank, pause_s):
                    continue
                # A rank that still computes is a sign of life.
                if waiting.missing() & self.working:
                    clock.heard(object())
                if not clock.passed(pause_s):
                    late = f"ranks have waited {clock.limit_s:g} s in a collective"
                    self.abort(
                        None, DistributedError(late, why=self._who_waits(), hint=self._limit_hint)
                    )
        except RankAbortedError:
            if waiting.is_message:
                self.interrupted.append(_waits(rank, waiting))
            raise
        finally:
            del self._waiting[rank]

    def _call_ready(self) -> None:
        """Let those run on who waited for what has come."""
        for rank, waiting in self._waiting.items():
            if waiting.ready():
                self.turns.call(rank)

    def _find_stuck(self) -> None:
        """Abort if some rank waits for one that has ended, or all wait for each other."""
        # A rank that could go on is not blocked.
        blocked = {rank: waiting for rank, waiting in self._waiting.items() if not waiting.ready()}
        gone = sorted(
            set().union(*(waiting.missing() for waiting in blocked.values())) & self._ended
        )
        if gone:
            self.abort(
                None,
                DistributedError(
                    f"{in_words(gone)} ended while others wait for it", why=self._who_waits()
                ),
            )
        # Nobody is left who could answer anybody.
        elif len(blocked) + len(self._ended) == self.num_ranks and blocked:
            self.abort(
                None, DistributedError("the ranks wait for each other", why=self._who_waits())
            )

    def _who_waits(self) -> str:
        return "; ".join(
            _waits(rank, waiting)
            for rank, waiting in sorted(self._waiting.items())
            if not waiting.ready()
        )


def _on_its_way() -> AbstractContextManager[object]:
    """Where a copy is made that lies between the ranks, in the thread of whichever comes last: a
    dispatch mode of that rank (one that counts the bytes alive, say) must not take it for its own.
    """
    return _disable_current_modes()


def _waits(rank: int, waiting: _Waiting) -> str:
    return f"rank {rank} waits in {waiting.what} {in_words(sorted(waiting.missing()))}"


def in_words(ranks: Sequence[int]) -> str:
    """``ranks 0, 2``, for messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
