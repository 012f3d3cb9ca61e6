"""JSON lines: a value in each line of a text file. Empty lines are passed over."""

from __future__ import annotations

import bisect
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.data.formats.source_files import (
    Arrays,
    Paths,
    SourceFiles,
    fingerprint_of,
    listed,
    read_index,
)
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import DataError

KIND = "lines"

_CHUNK_BYTES = 1 << 24


class JsonLines:
    """The values of JSON-lines files, by index. ``paths``: a file, a folder, or a list."""

    @checked
    def __init__(self, paths: Paths) -> None:
        found = listed(paths, (".jsonl", ".ndjson"), "file of JSON lines")
        self._files = SourceFiles(found, "lines")
        self._indexes = [read_index(path, KIND, build) for path in found]
        self.counts = [len(index["start"]) for index in self._indexes]
        self._ends = list(accumulate(self.counts))
        self.fingerprint = fingerprint_of(KIND, found, self.counts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number, line = self._place(index)
        arrays = self._indexes[number]
        start, stop = int(arrays["start"][line]), int(arrays["stop"][line])
        try:
            return json.loads(self._files.read(number, start, stop - start))
        except ValueError as error:
            raise DataError(
                "a line is no JSON",
                where=self.key(index),
                why=str(error),
                hint="mend the line, or pass on_error='skip' to the loader",
            ) from error

    def key(self, index: int) -> str:
        """The place of a value, for messages."""
        number, line = self._place(index)
        return f"{self._files.paths[number]}:{int(self._indexes[number]['number'][line])}"

    def _place(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no line {index} among {len(self)}")
        index %= len(self)
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)


def build(path: Path) -> Arrays:
    """The index of a file: where lines that are not empty start and stop, and their numbers."""
    stops: list[Any] = []
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            stops.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size)
            size += len(chunk)
    ends = np.concatenate(stops) if stops else np.zeros(0, np.int64)
    if size and (not len(ends) or ends[-1] != size - 1):
        ends = np.append(ends, size)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
    numbers = np.arange(1, len(ends) + 1)
    # A line of spaces alone is rare: only short lines are looked at.
    kept = ends > starts
    with open(path, "rb") as file:
        for line in np.flatnonzero(kept & (ends - starts <= 8)).tolist():
            file.seek(int(starts[line]))
            kept[line] = bool(file.read(int(ends[line] - starts[line])).strip())
    return {
        "start": starts[kept],
        "stop": ends[kept].astype(np.int64),
        "number": numbers[kept].astype(np.int64),
    }
