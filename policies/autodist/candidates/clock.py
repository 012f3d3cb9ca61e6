"""The time that a search has, and how much of it its steps take.

Example: of a limit of 100 s a fifth is kept for what comes last. After 40 s half of the rest is
over, so ``spent()`` is 0.5. If the latest placements took 6 s at most, another one is only begun
while ``spent(6)`` is at most 1: until 74 s.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from shardwright.policies.autodist.solver.stopwatch import Stopwatch

OVERTIME, OVERTIME_S = 1.2, 2.0
"""A search that has nothing to answer with when its limit is over goes on until it has worked that
many times the limit, or as many seconds more, whatever is later. Work is what the process had of
the time: on a busy machine less than the wall's, and at least a quarter of it.
"""

UNHURRIED_S, LEAST_STEADY = 120.0, 0.2
"""A search of more than that many seconds has its time so that nothing is left out, and not so that
each step takes longer: steps that take whatever time they get are given their shares of so many
seconds, or of that share of the limit, whatever is more.
"""

SHORTEST_S = 1e-9
"""A limit of no time at all, as one of several searches has that share a limit, counts as that
much.
"""

LATEST = 4
"""The number of latest steps of a kind whose time is remembered."""


def steady_share(limit_s: float) -> float:
    """The share of a limit that is dealt out to steps which take whatever time they get.

    Example: all of 60 s, 120 of 300 s, and 200 of 1000 s.
    """
    return max(LEAST_STEADY, min(1.0, UNHURRIED_S / max(limit_s, SHORTEST_S)))


class Clock:
    """How much of a limit is over, from when the clock was made. ``limit_s``: infinite for none.
    ``watch``: begins now; for tests. ``steady``: see :func:`steady_share`; given where the limit is
    a part of a longer one.
    """

    def __init__(
        self,
        limit_s: float = float("inf"),
        watch: Stopwatch | None = None,
        *,
        steady: float | None = None,
    ) -> None:
        self.limit_s = limit_s
        self.steady = steady_share(limit_s) if steady is None else steady
        self._watch = watch or Stopwatch()
        self._is_ended = False
        self._reserved = 0.0
        self._took_s: dict[str, deque[float]] = {}  # the latest steps, by kind

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return self._watch.wall_s

    @property
    def left_s(self) -> float:
        """Until the limit is over; negative after that."""
        return 0.0 if self._is_ended else self._free_s - self.seconds

    def spent(self, more_s: float = 0.0) -> float:
        """The share of the limit that is over, or will be after ``more_s``."""
        return (
            float("inf")
            if self._is_ended
            else (self.seconds + more_s) / max(self._free_s, SHORTEST_S)
        )

    @property
    def steady_s(self) -> float:
        """The seconds that are dealt out to steps which take whatever time they get."""
        return self.steady * self.limit_s

    def share_of(self, seconds: float) -> float:
        """The share of the whole limit that so many seconds are."""
        return seconds / max(self.limit_s, SHORTEST_S)

    def moment(self, share: float) -> float:
        """When a share of the limit is over, as a time of ``time.monotonic()``."""
        if self._is_ended:
            return float("-inf")
        return time.monotonic() + share * self._free_s - self.seconds

    def reserve(self, share: float) -> None:
        """Keep a share of the limit for what comes last: shares are those of the rest, until 0 is
        kept.
        """
        self._reserved = share

    @property
    def _free_s(self) -> float:
        """What of the limit is not kept for later."""
        return (1 - self._reserved) * self.limit_s

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """A step of a kind, whose time is noted."""
        began = self.seconds
        try:
            yield
        finally:
            self._took_s.setdefault(kind, deque(maxlen=LATEST)).append(self.seconds - began)

    def longest_s(self, kind: str) -> float:
        """The longest of the latest steps of a kind. The first ones take longer, for all that is
        worked out once, and are forgotten.
        """
        return max(self._took_s.get(kind, ()), default=0.0)

    def end(self) -> None:
        """Leave no time, as somebody waits for the answer."""
        self._is_ended = True

    @property
    def is_over(self) -> bool:
        """Whether even a search without an answer ends: overtime is over."""
        return self._watch.worked_s > self._latest_s

    @property
    def latest(self) -> float:
        """When even a search without an answer ends, as a time of ``time.monotonic()``."""
        left_s = self._latest_s - self._watch.worked_s
        return time.monotonic() + self._watch.slowdown * left_s

    @property
    def _latest_s(self) -> float:
        return max(OVERTIME * self.limit_s, self.limit_s + OVERTIME_S)
