"""What a command is doing, as lines of text where there is no terminal. It needs no rich."""

from __future__ import annotations

import contextlib
import sys
import time

LONGEST = 100
"""Characters of a line; names of tensors may be longer."""


def shortened(text: str, longest: int) -> str:
    """A text that is too long without its end, and without that of what stands before its
    semicolon: where a search is, and the best it has found.
    """
    if len(text) <= longest:
        return text
    where, semicolon, found = text.partition("; ")
    room = longest - len(semicolon)
    found = _cut(found, max(room // 2, room - len(where)))
    return f"{_cut(where, room - len(found))}{semicolon}{found}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: max(longest - 1, 0)]}…"


class ProgressText:
    """Prints what it hears on stderr, a line for each new thing that is told: for commands that
    take long wherever they run, such as one that measures a machine from a batch job. ``every_s``:
    nothing for so many seconds, and then a line in so many seconds at most. While nothing new is
    told there is none.
    """

    def __init__(self, every_s: float = 0.0) -> None:
        self._titles: list[str] = []
        self._said = ""
        self._every_s, self._last_s = every_s, time.monotonic()

    def begin(self, words: str) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""
        self._titles.append(words)
        self._say(words)

    def tell(self, words: str, share: float | None) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""
        if self._titles:  # else what is told is a part of nothing: another rank says it
            self._say(f"{self._titles[-1]}: {words}")

    def end(self) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""
        self._titles.pop()

    def _say(self, text: str) -> None:
        now_s = time.monotonic()
        if text != self._said and now_s - self._last_s >= self._every_s:
            self._said, self._last_s = text, now_s
            with contextlib.suppress(OSError):  # nobody reads it: the work goes on
                print(shortened(text, LONGEST), file=sys.stderr, flush=True)
