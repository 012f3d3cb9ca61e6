"""Refusals that the code of a model may not swallow.

``try: y = fast(x)`` with ``except Exception: y = slow(x)`` takes the second way where the tracer
refuses something of the first. Eager takes the first, so the graph would be that of another model.
"""

from __future__ import annotations

from types import TracebackType

from shardwright.runtime.errors import ShardwrightError


class Refusals:
    """Remembers the first of our errors that leaves one of its ``with`` blocks. ``first`` is raised
    when forward has ended, whatever forward has made of it.
    """

    def __init__(self) -> None:
        self.first: ShardwrightError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.first is None and isinstance(error, ShardwrightError):
            self.first = error
