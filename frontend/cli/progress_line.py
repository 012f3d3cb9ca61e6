"""What a command is doing: a line on a terminal, or lines of text where there is none."""

from __future__ import annotations

import contextlib
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LONGEST = 100
"""Characters of a line; names of tensors may be longer."""

BAR = 20
"""The width of the bar."""

BESIDE = BAR + 11
"""What a line has besides words: the spinner, the bar, the clock, and spaces between them."""


def _shortened(text: str, longest: int) -> str:
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


class ProgressLine:
    """Draws what it hears on stderr, and wipes it away when the outermost activity is over. Without
    a terminal it draws nothing.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._titles: list[str] = []
        self._progress: Progress | None = None

    def begin(self, words: str) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""
        self._titles.append(words)
        if self._progress is None and self._console.is_terminal:
            # What commands print goes where it always goes; warnings above the line.
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=BAR),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                redirect_stdout=False,
            )
            self._progress.add_task(words, total=None)
            self._progress.start()
        self.tell("", None)

    def tell(self, words: str, share: float | None) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""
        if self._progress is None:
            return
        text = ": ".join(part for part in (*self._titles[-1:], words) if part)
        room = max(min(LONGEST, self._console.width - BESIDE), 1)
        # Set directly: ``update`` would keep the share of what went on before.
        (task,) = self._progress.tasks
        task.description = _shortened(text, room)
        task.completed = min(share or 0.0, 1.0)
        task.total = None if share is None else 1.0

    def end(self) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""
        self._titles.pop()
        if self._titles:
            self.tell("", None)
        elif self._progress is not None:
            self._progress.stop()
            self._progress = None


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
                print(_shortened(text, LONGEST), file=sys.stderr, flush=True)
