"""Messages that arrive late, and what their rank does meanwhile.

    with LateMessages(delay_s=0.004) as late:
        module(**batch).backward()
        stamps = late.take()

Inside of the block every collective of this process, whatever starts it, is there ``delay_s`` after
it was sent, at the earliest, and one after the other, as on a slow link. It was sent when the last
rank has sent its part, if ranks of one machine tell each other (``board``). A rank that waits
sleeps.

Example: an all-reduce is sent at 1 ms. Gloo's threads are done with it at 3 ms. With a delay of
4 ms it is there at 5 ms. Gloo's threads and the system have taken 1.5 ms of a core to copy and to
add. The rank is idle for the other 2.5 ms, unless the program has something to do meanwhile. They
are what it can hide. The 1.5 ms cost their time in any case: they take a core that computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Any

import numpy as np

from shardwright.runtime.ranks.communicator import Communicator

METHODS = ("_call", "_start")
"""All that is sent goes through these two of ``Communicator``."""


@dataclass
class Stamps:
    """One message, in seconds.

    - ``sent_s``, ``last_s``: the times at which this rank sent its part, and the last rank did.
    - ``awaited_s``, ``there_s``: the times at which it was waited for, and there.
    - ``busy_s``: how long the thread that waits had computed between sending and waiting.
    - ``cpu_s``: the CPU time of all threads of the process from sending until it was there.
    """

    sent_s: float = 0.0
    last_s: float = 0.0
    awaited_s: float = 0.0
    there_s: float = 0.0
    busy_s: float = 0.0
    cpu_s: float = 0.0


class LateMessages:
    """See the top of the file. ``board``: memory of all ranks, ``[ranks, messages]``, in which each
    notes when it sent its latest messages.
    """

    def __init__(self, delay_s: float, rank: int = 0, board: np.ndarray | None = None) -> None:
        self.delay_s = delay_s
        self._rank, self._board = rank, np.zeros((1, 1)) if board is None else board
        self._num_sent, self._free_at_s = 0, 0.0
        self._found: list[Stamps] = []
        self._originals = {name: getattr(Communicator, name) for name in METHODS}

    def __enter__(self) -> LateMessages:
        for name, original in self._originals.items():
            setattr(Communicator, name, self._with_late_results(original))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(Communicator, name, original)

    def take(self) -> np.ndarray:
        """``[messages, fields of Stamps]``, of those since the last call."""
        found, self._found = self._found, []
        return np.array([astuple(stamps) for stamps in found])

    def _with_late_results(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(
            communicator: Communicator, collective: str, x: Any, function: Any, *args: Any
        ) -> Any:
            return method(communicator, collective, x, lambda *a: self._sent(function, *a), *args)

        return called

    def _sent(self, function: Callable[..., Any], *args: Any) -> _Late:
        stamps = Stamps(sent_s=time.perf_counter(), cpu_s=-time.process_time())
        self._found.append(stamps)
        self._free_at_s = max(self._free_at_s, stamps.sent_s) + self.delay_s
        sent_by = self._board[:, self._num_sent % self._board.shape[1]]
        self._num_sent += 1
        sent_by[self._rank] = stamps.sent_s
        work = function(*args)
        stamps.busy_s = -time.thread_time()
        return _Late(work, stamps, sent_by, self.delay_s, self._free_at_s)


class _Late:
    """A collective that is there at ``least_s`` at the earliest, and ``delay_s`` after the last
    rank has sent its part. ``sent_by``: when each did.
    """

    def __init__(
        self, work: Any, stamps: Stamps, sent_by: np.ndarray, delay_s: float, least_s: float
    ) -> None:
        self._work, self._stamps, self._sent_by = work, stamps, sent_by
        self._delay_s, self._least_s = delay_s, least_s

    def wait(self, *limit: Any) -> Any:
        stamps = self._stamps
        self._note_waiting()
        result = None if self._work is None else self._work.wait(*limit)
        if not stamps.there_s:
            # What is complete was sent by all.
            stamps.last_s = float(self._sent_by.max())
            arrives_s = max(self._least_s, stamps.last_s + self._delay_s)
            time.sleep(max(0.0, arrives_s - time.perf_counter()))
            stamps.there_s = time.perf_counter()
            stamps.cpu_s += time.process_time()
        return result

    @property
    def parts(self) -> tuple[Any, ...]:
        """What a transport waits for first."""
        self._note_waiting()
        return getattr(self._work, "parts", (self,))

    def _note_waiting(self) -> None:
        if not self._stamps.awaited_s:
            self._stamps.awaited_s = time.perf_counter()
            self._stamps.busy_s += time.thread_time()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
