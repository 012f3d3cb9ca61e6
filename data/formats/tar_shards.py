"""Webdataset shards: tar files whose neighbours of one name make a sample.

A shard with the members ``a/7.jpg``, ``a/7.txt``, ``a/8.jpg``, ``a/8.txt`` has two samples. The
first is ``{"__key__": "a/7", "jpg": bytes, "txt": "..."}``. The name ends at the first dot of the
last part of the path, as webdataset has it.
"""

from __future__ import annotations

import bisect
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.data.formats.source_files import (
    Arrays,
    Paths,
    SourceFiles,
    fingerprint_of,
    listed,
    read_index,
)
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import DataError, brief_text

KIND = "tar"
HEADER_BYTES = 512


def _number(data: bytes) -> int:
    return int(data.decode().strip())


def _array(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))


DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "txt": bytes.decode,
    "text": bytes.decode,
    "json": json.loads,
    "cls": _number,
    "id": _number,
    "npy": _array,
}
"""What becomes of a member, by the last part of its extension; others stay bytes."""


class TarShards:
    """The samples of tar shards, by index.

    ``paths``: a shard, a folder, or a list. ``decode``: by extension, what makes a value of the
    bytes of a member; beside :data:`DECODERS`. ``keys``: the extensions that are read; all by
    default.
    """

    @checked
    def __init__(
        self,
        paths: Paths,
        *,
        decode: Mapping[str, Callable[[bytes], Any]] | None = None,
        keys: tuple[str, ...] | list[str] | None = None,
    ) -> None:
        found = listed(paths, (".tar",), "tar shard")
        self._files = SourceFiles(found, "shards")
        self._indexes = [read_index(path, KIND, build) for path in found]
        self._decoders = {**DECODERS, **(decode or {})}
        self._keys = None if keys is None else set(keys)
        self.counts = [len(index["first"]) - 1 for index in self._indexes]
        self._ends = list(accumulate(self.counts))
        self._extensions = [_texts(index, "extensions") for index in self._indexes]
        self.fingerprint = fingerprint_of(KIND, found, self.counts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, sample = self._place(index)
        arrays, extensions = self._indexes[shard], self._extensions[shard]
        first, last = int(arrays["first"][sample]), int(arrays["first"][sample + 1])
        found: dict[str, Any] = {"__key__": self.key(index)}
        for member in range(first, last):
            extension = extensions[int(arrays["extension"][member])]
            if self._keys is None or extension in self._keys:
                found[extension] = self._member(shard, member, extension, index)
        return found

    def key(self, index: int) -> str:
        """The name of a sample, for messages."""
        shard, sample = self._place(index)
        arrays = self._indexes[shard]
        start = int(arrays["key_ends"][sample - 1]) if sample else 0
        return arrays["keys"][start : int(arrays["key_ends"][sample])].tobytes().decode()

    def _place(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no sample {index} among {len(self)}")
        index %= len(self)
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)

    def _member(self, shard: int, member: int, extension: str, index: int) -> Any:
        arrays = self._indexes[shard]
        start, size = int(arrays["start"][member]), int(arrays["size"][member])
        data = self._files.read(shard, start - HEADER_BYTES, HEADER_BYTES + size)
        where = f"{self._files.paths[shard]}, member {self.key(index)}.{extension}"
        # The header says what lies there: a shard that was written anew has another one.
        if data[257:262] != b"ustar" or _size_in_header(data) != size:
            raise DataError(
                f"{self._files.paths[shard]} has changed",
                where=where,
                why="its index has this member elsewhere",
                hint="restore the shard, or make its index anew: shardwright data index "
                f"{self._files.paths[shard]}",
            )
        decode = self._decoders.get(extension) or self._decoders.get(extension.rpartition(".")[2])
        if decode is None:
            return data[HEADER_BYTES:]
        try:
            return decode(data[HEADER_BYTES:])
        except Exception as error:
            raise DataError(
                "a member of a shard cannot be decoded",
                where=where,
                why=f"{type(error).__name__}: {brief_text(error)}",
                hint="pass decode={...} for this extension, or mend the sample",
            ) from error


def _size_in_header(data: bytes) -> int:
    """The size that a member's header says; base 256 where it begins with a set bit."""
    field = data[124:136]
    try:
        if field[0] & 0x80:
            return int.from_bytes(field[1:], "big")
        return int(field.rstrip(b"\0 ") or b"0", 8)
    except ValueError:
        return -1


def _texts(index: Arrays, name: str) -> list[str]:
    found: list[str] = json.loads(index[name].tobytes().decode())
    return found


def build(path: Path) -> Arrays:
    """The index of a shard. Raises :class:`DataError` if it is truncated or no tar file."""
    starts: list[int] = []
    sizes: list[int] = []
    kinds: list[int] = []
    firsts: list[int] = []
    keys: list[bytes] = []
    extensions: dict[str, int] = {}
    last = None
    end = 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                # Contents are padded to whole blocks.
                end = member.offset_data + -(-member.size // HEADER_BYTES) * HEADER_BYTES
                if not member.isreg():
                    continue
                key, extension = split_name(member.name)
                if key != last:
                    firsts.append(len(starts))
                    keys.append(key.encode())
                    last = key
                starts.append(member.offset_data)
                sizes.append(member.size)
                kinds.append(extensions.setdefault(extension, len(extensions)))
    except (tarfile.TarError, EOFError) as error:
        raise _truncated(path, str(error)) from error
    with open(path, "rb") as file:
        file.seek(end)
        # A tar file ends with blocks of zeros. tarfile itself takes a file that was cut between two
        # members for a whole one.
        if file.read(HEADER_BYTES) != bytes(HEADER_BYTES):
            raise _truncated(path, f"the archive has no end behind its last member, at {end}")
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(
            f"two samples of {path} are called {twice.decode()!r}",
            why="members of one sample lie side by side",
            hint="write the shard anew, sample after sample",
        )
    return {
        "start": np.array(starts, np.int64),
        "size": np.array(sizes, np.int64),
        "extension": np.array(kinds, np.int32),
        "first": np.array([*firsts, len(starts)], np.int64),
        "keys": np.frombuffer(b"".join(keys), np.uint8),
        "key_ends": np.cumsum([len(key) for key in keys], dtype=np.int64),
        "extensions": np.frombuffer(json.dumps(list(extensions)).encode(), np.uint8),
    }


def split_name(name: str) -> tuple[str, str]:
    """The name of a sample and the extension of a member: ``a/7.seg.png`` -> ``a/7``,
    ``seg.png``.
    """
    folder, slash, file = name.rpartition("/")
    base, _, extension = file.partition(".")
    return f"{folder}{slash}{base}", extension


def _truncated(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is truncated, or no tar file",
        why=why,
        hint="copy the shard again, or leave it out",
    )
