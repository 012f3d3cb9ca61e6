"""Waiting: how long the ranks of a job wait for each other, and what they say meanwhile.

Every wait of this package takes its clock from here. It has a limit, it says whom it waits for, and
it ends in words:

    wait = Wait("rank 1 waits for rank 0: compiling Net")
    while not is_there():
        wait.heard(sign_of_life())  # a new one restarts the clock
        if not wait.pause():
            raise DistributedError(f"rank 0 has not come within {wait.limit_s:g} s")

What it says goes to the log as a warning of the logger ``shardwright.runtime.waiting``, which
Python prints on stderr unless the program says otherwise: after :func:`notice_s` seconds, and again
each time the wait has become twice as long.

Three environment variables set the clock, in seconds. They are read when a wait begins:

- ``SHARDWRIGHT_TIMEOUT_S``: the limit. Without it the ``timeout`` that ``init_process_group`` was
  given, if that is not torch's default, else 600. The process groups that this package makes have
  the same limit.
- ``SHARDWRIGHT_NOTICE_S``: after how many seconds a wait is told of for the first time, 5 by
  default.
- ``SHARDWRIGHT_COLLECTIVE_NOTICE_S``: the same of a collective of a step, 30 by default: ranks are
  seldom equally fast.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from shardwright.runtime.errors import ConfigError

Result = TypeVar("Result")

TIMEOUT_VARIABLE, NOTICE_VARIABLE = "SHARDWRIGHT_TIMEOUT_S", "SHARDWRIGHT_NOTICE_S"
COLLECTIVE_NOTICE_VARIABLE = "SHARDWRIGHT_COLLECTIVE_NOTICE_S"
DEFAULT_TIMEOUT_S, DEFAULT_NOTICE_S, DEFAULT_COLLECTIVE_NOTICE_S = 600.0, 5.0, 30.0
LIMIT_HINT = f"the limit is that of {TIMEOUT_VARIABLE}, in seconds"

_LONGEST_TIMEOUT_S = 365 * 86400.0
"""What torch and the operating system can still count in their own units."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5
_STALL_S = 1.0
"""A pause that took longer than asked for by this much was one of the whole process, as by Ctrl-Z:
it does not count.
"""

logger = logging.getLogger(__name__)


def timeout_s() -> float:
    """The limit of a wait. Raises :class:`ConfigError` where the variable is no number above 0."""
    return _seconds(TIMEOUT_VARIABLE) or _timeout_of_job() or DEFAULT_TIMEOUT_S


def timeout() -> timedelta:
    """:func:`timeout_s` in the form that torch takes."""
    return timedelta(seconds=timeout_s())


def notice_s() -> float:
    """After how long a wait is told of. Raises :class:`ConfigError` where the variable is no number
    above 0.
    """
    return _seconds(NOTICE_VARIABLE) or DEFAULT_NOTICE_S


def collective_notice_s() -> float:
    """After how long a collective is told of. Raises :class:`ConfigError` where the variable is no
    number above 0.
    """
    return _seconds(COLLECTIVE_NOTICE_VARIABLE) or DEFAULT_COLLECTIVE_NOTICE_S


def _seconds(variable: str) -> float | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_TIMEOUT_S:
        raise ConfigError(
            f"{variable} is a number of seconds above 0, and at most a year",
            why=f"it is {text!r}",
            hint=f"set it like {variable}=600, or unset it",
        )
    return seconds


def _timeout_of_job() -> float | None:
    """What the user gave to ``init_process_group``; ``None`` if it is a default of torch."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    constants = dist.constants
    defaults = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)
    # init_process_group gives its store the timeout of the group, which has no public accessor.
    given = timeout_of(dist.distributed_c10d._get_default_store())
    return None if given in defaults else min(given.total_seconds(), _LONGEST_TIMEOUT_S)


def timeout_of(store: dist.distributed_c10d.Store) -> timedelta:
    """What ``init_process_group`` gave to the store of the default process group: the group's own
    limit.
    """
    given: timedelta = getattr(store, "timeout")  # noqa: B009 - the stubs of torch lack it
    return given


class Wait:
    """One wait. ``what``: who waits for whom and for what. ``limit_s``: how long without a sign of
    life, by default :func:`timeout_s`. Only the time in which this process runs counts. Without a
    text nothing is said.
    """

    def __init__(self, what: str, limit_s: float | None = None) -> None:
        self.what = what
        self.limit_s = timeout_s() if limit_s is None else limit_s
        self.waited_s = 0.0
        self._silent_s = 0.0
        self._notice_s = notice_s()
        self._sign: object = None
        self._last = time.monotonic()

    def heard(self, sign: object) -> None:
        """Note a sign of life; it restarts the clock if it is another one than the last. ``None``
        is no sign.
        """
        if sign is not None and sign != self._sign:
            self._sign = sign
            self._silent_s = 0.0

    def pause(self, more: str = "") -> bool:
        """Sleep for a moment that grows with the wait. False once the limit is over. ``more``: to
        add to what is said.
        """
        time.sleep(self.pause_s)
        return self.passed(self.pause_s, more)

    @property
    def pause_s(self) -> float:
        """How long to sleep between two looks: what comes is noticed late by a tenth of the wait at
        most.
        """
        left = max(0.0, min(self.limit_s - self._silent_s, self._notice_s - self.waited_s))
        return max(_SHORTEST_PAUSE_S, min(self.waited_s / 10, _LONGEST_PAUSE_S, left))

    @property
    def until_notice_s(self) -> float:
        """How long until something is said, or the limit is over: for those that are woken when
        what they wait for has come.
        """
        return max(
            _SHORTEST_PAUSE_S, min(self.limit_s - self._silent_s, self._notice_s - self.waited_s)
        )

    def passed(self, meant_s: float, more: str = "") -> bool:
        """Take note of the time since the last call, of which ``meant_s`` were asked for. See
        :meth:`pause`.
        """
        now = time.monotonic()
        # A process that was stopped, or a laptop that slept, has not waited all that time for
        # others.
        spent = min(now - self._last, meant_s + _STALL_S)
        self._last = now
        self.waited_s += spent
        self._silent_s += spent
        if self._silent_s >= self.limit_s:
            return False
        if self.waited_s >= self._notice_s:
            # Twice as late each time, so that an hour of waiting is a few lines of log.
            self._notice_s = 2 * self.waited_s
            if self.what:
                logger.warning("%s, for %.0f s so far%s", self.what, self.waited_s, more)
        return True


class OutOfTimeError(Exception):
    """A call did not return within the limit of its wait."""


def in_time(call: Callable[[], Result], wait: Wait) -> Result:
    """The result of a call that may block for ever, and that the interpreter could not interrupt.

    It runs in a thread of its own, which is left behind if the time is over; then
    :class:`OutOfTimeError` is raised.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    # A daemon, as a blocked one would keep the process from ending.
    threading.Thread(target=run, name="a call with a time limit", daemon=True).start()
    while not done.wait(pause_s := max(wait.pause_s, 0.05)):
        if not wait.passed(pause_s):
            raise OutOfTimeError(f"nothing came for {wait.limit_s:g} s")
    if errors:
        raise errors[0]
    return results[0]


class Pulse:
    """Calls ``beat`` with 0, 1, 2, ... inside a ``with`` block, often enough that nobody's limit is
    over in between.

    It is a thread: it stops where the whole process does, and goes on while the process computes.
    """

    def __init__(self, beat: Callable[[int], object]) -> None:
        self._beat = beat
        self._stopped = threading.Event()

    def __enter__(self) -> Pulse:
        self._stopped.clear()
        self._beat(0)
        interval_s = min(10.0, timeout_s() / 8)
        threading.Thread(
            target=self._run, args=(interval_s,), name="sign of life", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _run(self, interval_s: float) -> None:
        number = 0
        while not self._stopped.wait(interval_s):
            number += 1
            try:
                self._beat(number)
            except Exception:
                # Whoever waits finds out: its own calls fail like this one, or its limit ends
                return
