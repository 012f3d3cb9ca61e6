"""What a command is doing, as a line on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardwright.frontend.cli.progress_text import LONGEST, shortened

BAR = 20
"""The width of the bar."""

BESIDE = BAR + 11
"""What a line has besides words: the spinner, the bar, the clock, and spaces between them."""


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
        task.description = shortened(text, room)
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
