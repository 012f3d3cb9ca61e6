"""What a long call is doing, for whoever shows it.

    with activity("merging"):
        tell("transformer.wte.weight", 3 / 150)

Nobody listens in a program of one's own, and nothing happens. The command line does: it draws a
line on a terminal (``frontend/cli/progress_line.py``), and prints lines where there is none
(``frontend/cli/progress_text.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol


class Listener(Protocol):
    """Whoever shows it. Activities may lie in one another; the outermost says when it is over."""

    def begin(self, words: str) -> None:
        """An activity begins."""

    def tell(self, words: str, share: float | None) -> None:
        """What it is doing now, and the share of that which is done, where it is known."""

    def end(self) -> None:
        """It is over, or has failed."""


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)
_BEFORE: ContextVar[str] = ContextVar("before", default="")


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener what the calls inside are doing. Other threads are not heard."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextlib.contextmanager
def activity(words: str) -> Iterator[None]:
    """An activity, for as long as the block takes."""
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    listener.begin(words)
    try:
        yield
    finally:
        listener.end()


def tell(words: str, share: float | None = None) -> None:
    """Say what goes on now. ``share``: of that which is done, 0 to 1."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.tell(f"{_BEFORE.get()}{words}", share)


@contextlib.contextmanager
def preceded(words: str) -> Iterator[None]:
    """Put ``words`` in front of all that is told inside."""
    token = _BEFORE.set(words)
    try:
        yield
    finally:
        _BEFORE.reset(token)
