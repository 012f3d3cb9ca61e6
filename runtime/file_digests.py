"""Digests of a large file by chunks: who reads a part of it checks that part, and reads no more for
it.

A file of 28 GB has 4,096 digests of chunks of 8 MiB. A rank that holds a quarter of a weight, cut
by rows, hashes a quarter of its bytes and at most two chunks more.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.runtime.errors import COMPILE_AGAIN, LoadError

LEAST_CHUNK_BYTES = 1 << 20
MOST_CHUNKS = 4096
"""Few enough for a manifest: 64 characters each."""

_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ChunkDigests:
    """The hex sha256 of each ``chunk_bytes`` of a file, the last chunk being what is left. A file
    in one chunk of unknown length has ``chunk_bytes=None``.
    """

    chunk_bytes: int | None
    sha256: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.chunk_bytes, "sha256": list(self.sha256)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChunkDigests:
        chunk_bytes = int(data["bytes"])
        if chunk_bytes < 1:
            raise ValueError("a chunk has at least one byte")
        return cls(chunk_bytes, tuple(map(str, data["sha256"])))

    @classmethod
    def of_file(cls, path: Path) -> ChunkDigests:
        """The digests of a file as it is now."""
        writer = ChunkHasher(path.stat().st_size)
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                writer.update(memoryview(data))
        return writer.finish()


class ChunkHasher:
    """Hashes a file of ``num_bytes`` while it is written."""

    def __init__(self, num_bytes: int) -> None:
        self.chunk_bytes = LEAST_CHUNK_BYTES
        while self.chunk_bytes * MOST_CHUNKS < num_bytes:
            self.chunk_bytes *= 2
        self._digests: list[str] = []
        self._current = hashlib.sha256()
        self._room = self.chunk_bytes

    def update(self, data: memoryview) -> None:
        """Take in the next bytes."""
        while data:
            part, data = data[: self._room], data[self._room :]
            self._current.update(part)
            self._room -= len(part)
            if not self._room:
                self._close()

    def finish(self) -> ChunkDigests:
        """The digests of all chunks."""
        if self._room < self.chunk_bytes:
            self._close()
        return ChunkDigests(self.chunk_bytes, tuple(self._digests))

    def _close(self) -> None:
        self._digests.append(self._current.hexdigest())
        self._current, self._room = hashlib.sha256(), self.chunk_bytes


class CheckedFile:
    """A file, whose chunks are compared with their digests when somebody is about to read them;
    each once.
    """

    def __init__(self, path: Path, digests: ChunkDigests) -> None:
        self.path = path
        self._digests = digests
        self._checked: set[int] = set()
        self._file = path.open("rb")
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        self._chunk_bytes = digests.chunk_bytes or max(self._num_bytes, 1)
        if -(-self._num_bytes // self._chunk_bytes) != len(digests.sha256):
            self._file.close()
            raise self._altered(f"it has {self._num_bytes} bytes, which is not what was written")

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def check(self, start: int, stop: int) -> None:
        """Raise :class:`LoadError` unless the bytes ``start`` to ``stop`` are what was written."""
        if start >= stop:
            return
        for number in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)):
            if number not in self._checked:
                self._check_chunk(number)
                self._checked.add(number)

    def _check_chunk(self, number: int) -> None:
        first = number * self._chunk_bytes
        left, digest = min(self._chunk_bytes, self._num_bytes - first), hashlib.sha256()
        self._file.seek(first)
        while left > 0:
            data = self._file.read(min(left, _READ_BYTES))
            # A file that was cut off: the digest will not be right.
            if not data:
                break
            digest.update(data)
            left -= len(data)
        if digest.hexdigest() != self._digests.sha256[number]:
            last = min(first + self._chunk_bytes, self._num_bytes)
            raise self._altered(
                f"the sha256 of its bytes {first} to {last} is not that of what was written"
            )

    def _altered(self, why: str) -> LoadError:
        return LoadError(
            f"{self.path} is not the file that was written",
            why=why,
            hint=f"{COMPILE_AGAIN}; if it is meant, accept it with "
            f"`shardwright accept {self.path.parent}`",
        )
