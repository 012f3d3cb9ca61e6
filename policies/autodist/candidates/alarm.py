"""Ends a search when its limit is over, whatever step is under way then.

Example: the limit of 20 s is over while a plan is audited, which would take another 3 s. The audit
is broken off, as Ctrl-C would break it off, and the best plan so far is the answer. A search that
has no plan yet is left alone until it has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator

SHORTEST_S = 0.01
"""The least time between two looks at the clock."""


class TimeIsOver(KeyboardInterrupt):
    """The limit of a search is over. Whatever lets Ctrl-C end a search lets this end it, too."""


class Alarm:
    """Raises :class:`TimeIsOver` once, inside :meth:`may_interrupt`, when the limit is over and
    there is an answer.

    It is raised in the thread that searches, between two of its instructions. A signal would not
    do: only the main thread gets it, and its handler may be the user's. A library that is called,
    such as a solver, is not broken off before it returns.

    Args:
        left_s: seconds until the limit is over; infinite for none.
        now: the clock that the limit is of, that of the machine if none is given.
    """

    def __init__(
        self, left_s: float = float("inf"), now: Callable[[], float] | None = None
    ) -> None:
        self._now = now or time.monotonic
        self._ends = self._now() + left_s
        self._has_answer = self._has_rung = False
        self._lock = threading.Lock()
        self._thread: int | None = None  # the one inside ``may_interrupt``
        self._stopped = threading.Event()  # for whoever watches the clock

    @property
    def has_rung(self) -> bool:
        """Whether this has ended the search."""
        return self._has_rung

    @contextlib.contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """A block that may be broken off, at its end at the latest. Nothing is raised after it."""
        self._thread = threading.get_ident()
        try:
            self._set()
            yield
        finally:
            self._stop()

    def note_answer(self, takes_s: float = 0.0) -> None:
        """Note that there is an answer, and that so many seconds of the limit are needed to give
        it. Where these are not left, the search ends here.
        """
        if not self._has_answer:
            self._has_answer = True
            self._ends -= takes_s
            self._set()

    def ring(self) -> None:
        """End the search, if it may be broken off now."""
        with self._lock:
            if self._thread is not None and not self._has_rung:
                self._has_rung = True
                _raise_in(self._thread, TimeIsOver)

    def _set(self) -> None:
        if not self._has_answer or self._thread is None or self._has_rung:
            return
        if self._now() >= self._ends:
            self._has_rung = True
            raise TimeIsOver
        if self._ends == float("inf"):
            return
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, args=(self._stopped,), daemon=True).start()

    def _watch(self, stopped: threading.Event) -> None:
        """Ring when the limit is over. Its clock may be slower than the wall's."""
        while not stopped.is_set():
            left_s = self._ends - self._now()
            if left_s <= 0:
                return self.ring()
            stopped.wait(min(max(left_s, SHORTEST_S), threading.TIMEOUT_MAX))

    def _stop(self) -> None:
        self._stopped.set()
        with self._lock:
            self._thread = None
        # If it has rung and nothing is raised yet, a jump back raises it here, and not outside. It
        # is not taken back, as CPython 3.11 would go on looking for it, and hang under a profiler.
        for _ in range(2):
            pass


def _raise_in(thread: int, what: type[BaseException]) -> None:
    """Raise an exception in a thread, at its next call or jump back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(what))
