"""Where records of a run go: a file of JSON lines, the terminal, and libraries that draw them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.frontend.training.records import line_of
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.runtime.errors import ConfigError


class Logger(Protocol):
    """Takes records. A record has an ``event`` (``start``, ``step``, ``evaluation``, ``save``,
    ``end``, ...) and plain values by name.
    """

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record."""

    def close(self) -> None:
        """Finish what was begun."""


class JsonLinesLogger:
    """Appends each record to a file, as JSON on a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line by line, and behind what is there: a run that was killed has its last step in the
        # file, and a resumed one goes on in it.
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        self._file.write(json.dumps(dict(record)) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TerminalLogger:
    """Prints each record; on a terminal a bar of the steps stays below them."""

    def __init__(self, num_steps: int, *, bar: bool) -> None:
        self._num_steps = num_steps
        self._console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if bar and self._console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn())
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._task = self._progress.add_task("training", total=num_steps)
            self._progress.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Print a record."""
        self._console.print(line_of(record, self._num_steps))
        sys.stdout.flush()
        if self._progress is not None and "step" in record:
            self._progress.update(self._task, completed=record["step"])

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()


class TensorBoardLogger:
    """Numbers of steps as scalars of TensorBoard."""

    def __init__(self, folder: Path) -> None:
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder))

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the numbers of a record."""
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class WandbLogger:
    """Numbers of steps in Weights & Biases."""

    def __init__(self, settings: RunSettings, config: Mapping[str, Any]) -> None:
        self._wandb: Any = import_module("wandb")
        self._run = self._wandb.init(
            project=settings.log.project, dir=settings.output, config=dict(config)
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record."""
        numbers = _numbers(record)
        if numbers:
            self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def check_loggers(settings: RunSettings) -> None:
    """Raise :class:`ConfigError` for a logger whose library is not installed."""
    for library in settings.log.to:
        if find_spec(library) is None:
            raise ConfigError(
                f"log.to names {library}, which is not installed",
                hint=f"pip install {library}, or leave it out: log.jsonl has all records",
            )


class Loggers:
    """All loggers of a run. Ranks other than the first have none."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    @classmethod
    def of(
        cls, settings: RunSettings, config: Mapping[str, Any], num_steps: int, *, is_first: bool
    ) -> Loggers:
        """The loggers that the settings name."""
        if not is_first:
            return cls(())
        output = Path(settings.output)
        loggers: list[Logger] = []
        if "tensorboard" in settings.log.to:
            loggers.append(TensorBoardLogger(output / "tensorboard"))
        if "wandb" in settings.log.to:
            loggers.append(WandbLogger(settings, config))
        loggers.append(JsonLinesLogger(output / "log.jsonl"))
        # Last, as it may take over the terminal: one that cannot be made must not leave a bar
        # behind.
        loggers.append(TerminalLogger(num_steps, bar=settings.log.bar))
        return cls(loggers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for logger in self._loggers:
            logger.close()

    def write(self, event: str, **values: Any) -> dict[str, Any]:
        """Give all loggers a record, and return it."""
        record = {"event": event, "time": time.time(), **values}
        for logger in self._loggers:
            logger.write(record)
        return record


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of a step, named by its event."""
    if "step" not in record:
        return {}
    return {
        f"{record['event']}/{name}": value
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }
