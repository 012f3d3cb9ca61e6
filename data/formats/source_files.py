"""Files that are read in pieces, and the indexes beside them.

The index of ``corpus.jsonl`` is ``corpus.jsonl.index``, a file of arrays (safetensors). It is made
once and says which file it is of: the size, and a digest of both ends. A file that is another one
by then is refused, as positions in it would mean other samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from shardwright.runtime.argument_kinds import is_path
from shardwright.runtime.errors import DataError, brief
from shardwright.runtime.swap import write_file

Arrays = Mapping[str, NDArray[Any]]

INDEX_SUFFIX = ".index"
FORMAT = "1"

MOST_OPEN_FILES = 64
"""How many files a source keeps open at a time in a process."""

_END_BYTES = 65536


class SourceFiles:
    """Files that are read in pieces. ``paths``: all of them; ``name``: what they are called in
    messages.

    Reads leave no trace in what processes share, so that workers may have been forked.
    """

    def __init__(self, paths: Sequence[Path], name: str) -> None:
        self.paths = tuple(paths)
        self._name = name
        self._open: OrderedDict[int, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: it opens the files itself."""
        return {"paths": self.paths, "_name": self._name, "_open": OrderedDict()}

    def read(self, number: int, start: int, size: int) -> bytes:
        """Bytes ``start`` to ``start + size`` of a file.

        Raises :class:`DataError` if it is not there, or ends before.
        """
        try:
            found = os.pread(self._opened(number), size, start)
        except OSError as error:
            raise DataError(
                f"{self.paths[number]} cannot be read", why=error.strerror or str(error)
            ) from error
        if len(found) < size:
            raise DataError(
                f"{self.paths[number]} ends early",
                why=f"{size} bytes at {start} were there when its index was made, and now "
                f"{len(found)} are",
                hint="restore the file; if it is meant to be another one now, make its index anew: "
                f"shardwright data index {self.paths[number]}",
            )
        return found

    def _opened(self, number: int) -> int:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= MOST_OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[number] = os.open(self.paths[number], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[number]

    def close(self) -> None:
        """Close what is open; reads open it again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self.close()


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A file, a folder, or several of either."""


def listed(paths: Paths, suffixes: tuple[str, ...], name: str) -> tuple[Path, ...]:
    """The files that ``paths`` stands for: a file, a folder, or several of either, in order.

    Raises :class:`DataError` if one is missing, or there is none.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    for path in given:
        if not is_path(path):
            raise DataError(f"{brief(path)} is no path of a {name}")
    found: list[Path] = []
    for item in map(Path, given):
        if item.is_dir():
            # Sorted, as the order of a folder is that of its file system.
            inside = sorted(p for p in item.iterdir() if p.name.endswith(suffixes) and p.is_file())
            if not inside:
                raise DataError(f"there is no {name} in {item}", why=f"no {' or '.join(suffixes)}")
            found += inside
        elif item.is_file():
            found.append(item)
        else:
            raise DataError(f"{item} is not there", hint="see whether this node has the files")
    if not found:
        raise DataError(f"no {name} was named")
    return tuple(found)


def index_path(path: Path) -> Path:
    """Where the index of a file lies."""
    return path.with_name(path.name + INDEX_SUFFIX)


def read_index(path: Path, kind: str, build: Callable[[Path], Arrays]) -> Arrays:
    """The index of a file: read, or built and written beside it where that is possible.

    Raises :class:`DataError` if the file is another one than when its index was made.
    """
    try:
        return _load(path, kind)
    except FileNotFoundError:
        return build_index(path, kind, build)


def build_index(path: Path, kind: str, build: Callable[[Path], Arrays]) -> Arrays:
    """Make the index anew, and write it beside the file; where that cannot be written, each process
    makes its own.
    """
    before = identity(path)
    arrays = {name: np.ascontiguousarray(array) for name, array in build(path).items()}
    if identity(path) != before:
        raise DataError(f"{path} changes while it is read", hint="wait until it is written")
    content = save(arrays, {"kind": kind, "format": FORMAT, **before})
    with contextlib.suppress(OSError):
        write_file(index_path(path), content)
    return arrays


def _load(path: Path, kind: str) -> Arrays:
    index = index_path(path)
    if not index.exists():
        raise FileNotFoundError(index)
    try:
        with safe_open(index, "numpy") as content:
            metadata = content.metadata() or {}
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"{index} is damaged",
            why=str(error),
            hint=f"make it anew: shardwright data index {path}",
        ) from error
    if metadata.get("kind") != kind or metadata.get("format") != FORMAT:
        raise DataError(
            f"{index} is the index of something else",
            why=f"it is of kind {metadata.get('kind')!r}, format {metadata.get('format')!r}; "
            f"needed are {kind!r} and {FORMAT!r}",
            hint=f"make it anew: shardwright data index {path}",
        )
    now = identity(path)
    if any(metadata.get(name) != value for name, value in now.items()):
        raise DataError(
            f"{path} has changed",
            why=f"its index was made when it had {metadata.get('size')} bytes; it has "
            f"{now['size']} now"
            + ("" if metadata.get("size") != now["size"] else ", with other contents"),
            hint="restore the file; if it is meant to be another one now, make its index anew: "
            f"shardwright data index {path}. States of loaders then do not fit any more",
        )
    return arrays


def identity(path: Path) -> dict[str, str]:
    """What tells a file from another one: its size, and a digest of both ends."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(max(0, size - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return {"size": str(size), "ends": digest.hexdigest()}


def fingerprint_of(kind: str, paths: Iterable[Path], counts: Sequence[int]) -> str:
    """A text that is another one if other files, or files of other contents, make a source."""
    parts = [[path.name, identity(path), int(n)] for path, n in zip(paths, counts, strict=True)]
    return hashlib.sha256(json.dumps([kind, parts]).encode()).hexdigest()[:16]
