"""Safetensors files: written one tensor at a time with their digest taken on the way, read as views
of the mapped file. Files of ``torch.distributed.checkpoint`` are read beside them.

The ``safetensors`` package writes a file from tensors that are all in memory; merging a checkpoint
must not need that.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardwright.runtime.activity import tell
from shardwright.runtime.checkpoint.saved_blobs import BLOBS, BlobFile
from shardwright.runtime.checkpoint.tensor_bytes import bytes_of
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.file_digests import ChunkDigests, ChunkHasher

CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes safetensors can hold, by its names for them."""

CHUNK_BYTES = 1 << 24
"""How much is hashed, written or read at a time."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to be written: its shape and dtype, and where its values come from when it is its
    turn.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def data(self) -> memoryview:
        """The values in row-major order."""
        value = self.read()
        assert tuple(value.shape) == self.shape and value.dtype == self.dtype
        return bytes_of(value)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be: its length in bytes and its hex sha256, ``None`` for a file of other
    software, which took none. ``chunks``: also of its chunks, where it was written just now;
    checkpoints are checked as whole files.
    """

    num_bytes: int
    sha256: str | None
    chunks: ChunkDigests | None = None

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileRecord:
        return cls(int(data["bytes"]), str(data["sha256"]))

    def problem(self, path: Path) -> str | None:
        """What tells the file at ``path`` from this one, in words; ``None`` if it is this one.
        Reads all of it.
        """
        try:
            size = path.stat().st_size
            # Cheap first: a truncated file is told without reading it.
            if size != self.num_bytes:
                return f"{path.name} has {size} bytes, {self.num_bytes} were written"
            if self.sha256 is not None and digest_file(path) != self.sha256:
                return f"{path.name} was altered: its sha256 is not that of what was written"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror}"
        return None


def digest_file(path: Path) -> str:
    """The hex sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_tensors(
    path: Path,
    tensors: Mapping[str, TensorSource],
    metadata: Mapping[str, str] | None = None,
    *,
    flushes: bool = True,
    chunked: bool = False,
) -> FileRecord:
    """Write a safetensors file. One tensor at a time is in memory. ``flushes``: it is on the disk
    when this returns.
    ``chunked``: take the digests of its chunks too.

    Raises :class:`CheckpointError` for a dtype that safetensors does not have.
    """
    digest, num_bytes = hashlib.sha256(), 0
    header = _header(tensors, metadata or {})
    chunks = (
        ChunkHasher(sum(map(len, header)) + sum(source.num_bytes for source in tensors.values()))
        if chunked
        else None
    )
    whole = max(1, sum(source.num_bytes for source in tensors.values()))
    with path.open("wb") as file:
        for data in _contents(tensors, header):
            tell(f"writing {path.name}", num_bytes / whole)
            for start in range(0, len(data), CHUNK_BYTES):
                part = data[start : start + CHUNK_BYTES]
                digest.update(part)
                if chunks is not None:
                    chunks.update(part)
                file.write(part)
            num_bytes += len(data)
            data = part = memoryview(b"")  # before the next tensor is read
        if flushes:
            file.flush()
            os.fsync(file.fileno())
    return FileRecord(
        num_bytes, digest.hexdigest(), chunks.finish() if chunks is not None else None
    )


def digest_tensors(tensors: Mapping[str, TensorSource]) -> str:
    """The hex sha256 of the file that :func:`write_tensors` would write."""
    digest = hashlib.sha256()
    for data in _contents(tensors, _header(tensors, {})):
        digest.update(data)
    return digest.hexdigest()


def _header(
    tensors: Mapping[str, TensorSource], metadata: Mapping[str, str]
) -> tuple[bytes, bytes]:
    """The length of the header, and the header."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in _in_file_order(tensors):
        source = tensors[name]
        check_dtype(name, source.dtype)
        offsets = [offset, offset + source.num_bytes]
        header[name] = {
            "dtype": CODES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": offsets,
        }
        offset += source.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Data begins at a multiple of eight bytes, so that a mapped file can be read as any dtype.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little"), text


def _contents(
    tensors: Mapping[str, TensorSource], header: tuple[bytes, bytes]
) -> Iterator[memoryview]:
    """The header, then the data of each tensor."""
    yield from (memoryview(part) for part in header)
    for name in _in_file_order(tensors):
        yield tensors[name].data()


def _in_file_order(tensors: Mapping[str, TensorSource]) -> list[str]:
    """Larger elements first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def header_bytes(path: Path) -> int:
    """Where the header of a safetensors file ends, and the data begins."""
    with path.open("rb") as file:
        return min(8 + int.from_bytes(file.read(8), "little"), path.stat().st_size)


def byte_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """The bytes of each tensor of a safetensors file, from the start of the file.

    Raises ``ValueError``, ``KeyError`` or ``TypeError`` where the file is none.
    """
    start = header_bytes(path)
    with path.open("rb") as file:
        header = json.loads(file.read(start)[8:])
    places = {
        name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
    }
    return {name: (start + first, start + last) for name, (first, last) in places.items()}


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise :class:`CheckpointError` if a safetensors file cannot hold ``dtype``."""
    if dtype not in CODES:
        raise CheckpointError(
            f"{name} has dtype {dtype}, which cannot be saved",
            why="safetensors has no such dtype",
            hint=f"one of {', '.join(str(known).removeprefix('torch.') for known in CODES)}",
        )


class MappedFiles:
    """The safetensors files of a folder, mapped when they are first used and while the ``with``
    block lasts; and those of ``torch.distributed.checkpoint``, of which whole pieces are read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def view(self, file: str, key: str) -> Tensor:
        """A tensor of a file as a view of the mapping: what is not used is not read. Copy what is
        to be kept.

        Raises :class:`CheckpointError` if the file is no safetensors file or lacks the tensor.
        """
        handle = self._checked(file, key)
        if isinstance(handle, BlobFile):
            return handle.view(key)
        tensor: Tensor = handle.get_tensor(key)
        return tensor

    def kind(self, file: str, key: str) -> tuple[tuple[int, ...], torch.dtype | None]:
        """The shape and the dtype of a tensor of a file, as the header has it; no values are read.

        Raises :class:`CheckpointError` if the file is no safetensors file or lacks the tensor.
        """
        handle = self._checked(file, key)
        if isinstance(handle, BlobFile):
            return handle.kind(key)
        tensor = handle.get_slice(key)
        code = str(tensor.get_dtype())
        return tuple(tensor.get_shape()), next(
            (dtype for dtype, name in CODES.items() if name == code), None
        )

    def shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        """The tensors of a file and their shapes."""
        handle = self._handle(file)
        return {key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()}  # noqa: SIM118

    def _checked(self, file: str, key: str) -> Any:
        handle = self._handle(file)
        if isinstance(handle, BlobFile):
            return handle
        if key not in handle.keys():  # noqa: SIM118  (a handle is no mapping)
            raise CheckpointError(
                f"{self.folder / file} does not hold {key!r}", why="its index says that it does"
            )
        return handle

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            path = self.folder / file
            try:
                opened: Any = (
                    BlobFile(path) if path.suffix == BLOBS else safe_open(path, framework="pt")
                )
                self._handles[file] = self._stack.enter_context(opened)
            except Exception as error:
                raise CheckpointError(
                    f"{path} cannot be read",
                    why=str(error),
                    hint="the file is truncated or missing",
                ) from error
        return self._handles[file]
