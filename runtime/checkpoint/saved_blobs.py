"""What ``torch.save`` has written somewhere inside a file, as ``torch.distributed.checkpoint`` puts
one such blob after the other. Nothing of it is run, see ``inert_pickle.py``.

A blob is a zip archive: ``data.pkl`` says what was saved, and ``data/0``, ``data/1``, ... are the
memory of its tensors, which is compared with the archive's CRC-32 of it.
"""

from __future__ import annotations

import functools
import io
import math
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from shardwright.runtime.checkpoint.inert_pickle import Made, is_named, read_pickle
from shardwright.runtime.errors import CheckpointError

BLOBS = ".distcp"
"""How names of files of blobs end."""

DTYPE_OF_STORAGE = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""Names of torch's classes of memory, which say what a tensor holds."""

CHUNK_BYTES = 1 << 24
"""How much is read at a time."""


class Place(NamedTuple):
    """Where a blob lies in its file."""

    offset: int
    length: int

    @property
    def key(self) -> str:
        """The place as text, by which an index names it."""
        return f"{self.offset}+{self.length}"

    @classmethod
    def of(cls, key: str) -> Place:
        """The reverse of :attr:`key`; ``ValueError`` where it is none."""
        offset, _, length = key.partition("+")
        return cls(int(offset), int(length))


class _Form(NamedTuple):
    """A tensor in a blob: the name of its memory in the archive, and how it lies there, in
    elements.
    """

    entry: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class BlobFile:
    """A file of blobs. What is read of it is named by a ``key``, see :attr:`Place.key`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")

    def __enter__(self) -> BlobFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self._file.close()

    def value(self, key: str) -> Any:
        """What was saved, made of tensors and of Python's plain values.

        Raises :class:`CheckpointError` for anything else, and where the file is damaged.
        """
        archive, saved = self._opened(key)
        try:
            return _plain(saved, lambda made: self._tensor(key, archive, _form(made)))
        except (TypeError, ValueError, LookupError, RecursionError) as error:
            raise self._refused(key, str(error)) from error

    def view(self, key: str) -> Tensor:
        """The tensor that was saved. Raises :class:`CheckpointError` if it was something else."""
        archive, saved = self._opened(key)
        return self._tensor(key, archive, self._checked(key, saved))

    def kind(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and the dtype of a tensor; its values are not read."""
        form = self._checked(key, self._opened(key)[1])
        return form.shape, form.dtype

    def _opened(self, key: str) -> tuple[zipfile.ZipFile, Any]:
        """The archive, and what its pickle would have made."""
        try:
            archive = zipfile.ZipFile(_Part(self._file, Place.of(key)))
            root = _root(archive)
            if f"{root}byteorder" in archive.namelist():
                order = archive.read(f"{root}byteorder")
                if order != b"little":
                    raise ValueError(f"it was written in the byte order {order!r}")
            return archive, read_pickle(archive.read(f"{root}data.pkl"))
        except Exception as error:  # whatever comes of bytes that torch.save has not written
            raise self._refused(key, f"{type(error).__name__}: {error}") from error

    def _checked(self, key: str, saved: Any) -> _Form:
        try:
            return _form(saved)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise self._refused(key, f"it is no tensor that can be read: {error}") from error

    def _tensor(self, key: str, archive: zipfile.ZipFile, form: _Form) -> Tensor:
        if not math.prod(form.shape):
            return torch.empty(form.shape, dtype=form.dtype)
        # The largest index that the strides reach. ``as_strided`` would read beyond the memory in
        # silence.
        last = form.offset + sum(
            (size - 1) * stride for size, stride in zip(form.shape, form.strides, strict=True)
        )
        try:
            memory = _memory(archive, f"{_root(archive)}data/{form.entry}")
            if len(memory) < (last + 1) * form.dtype.itemsize:
                raise ValueError(f"the memory of a tensor has {len(memory)} bytes")
        except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise self._refused(key, f"{type(error).__name__}: {error}") from error
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        whole = flat[: flat.numel() // form.dtype.itemsize * form.dtype.itemsize].view(form.dtype)
        return whole.as_strided(form.shape, form.strides, form.offset)

    def _refused(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be read at {key}",
            why=why,
            hint="the file was truncated, altered or compressed, or torch.save has not written it",
        )


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
        self._file, self._place, self._at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.length}
        self._at = starts[whence] + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._place.length - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        found = os.pread(self._file.fileno(), wanted, self._place.offset + self._at)
        self._at += len(found)
        return found


def _root(archive: zipfile.ZipFile) -> str:
    """The folder inside of an archive that all of it lies in."""
    (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    return name.removesuffix("data.pkl")


def _memory(archive: zipfile.ZipFile, name: str) -> bytearray:
    """The bytes of an entry. A wrong CRC-32 raises ``BadZipFile``."""
    memory = bytearray(archive.getinfo(name).file_size)
    at = 0
    with archive.open(name) as entry:
        while part := entry.read(CHUNK_BYTES):
            memory[at : at + len(part)] = part
            at += len(part)
    return memory


def _plain(saved: Any, tensor: Callable[[Made], Tensor]) -> Any:
    """``saved`` as tensors and Python's own values.

    Raises ``TypeError`` for an object of another class.
    """
    if isinstance(saved, dict | list | tuple | set):
        inside: Callable[[Any], Any] = functools.partial(_plain, tensor=tensor)
        if isinstance(saved, dict):
            return {inside(key): inside(value) for key, value in saved.items()}
        return type(saved)(map(inside, saved))
    if is_named(saved, "collections.OrderedDict"):
        return OrderedDict((_plain(k, tensor), _plain(v, tensor)) for k, v in saved.entries.items())
    if is_named(saved, "torch.Size"):
        return tuple(saved.given[0])
    if any(is_named(saved, f"torch._utils.{name}") for name in REBUILDS):
        return tensor(saved)
    # Any other class stays a description: making it would run code that the file names.
    if getattr(saved, "name", None) is not None:
        raise TypeError(f"it is a {saved.name}, which is not made here")
    return saved


REBUILDS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
"""Torch's functions that pickles of tensors name."""


def _form(saved: Any) -> _Form:
    """What the arguments of torch's functions that rebuild a tensor say.

    Raises ``TypeError``, ``ValueError`` or ``LookupError`` for anything else.
    """
    if is_named(saved, "torch._utils._rebuild_tensor_v2"):
        memory, offset, shape, strides = saved.given[:4]
        # ``torch.FloatStorage``: older forms say the dtype by the class of the memory.
        dtype = DTYPE_OF_STORAGE[memory[1].name.rpartition(".")[2]]
    elif is_named(saved, "torch._utils._rebuild_tensor_v3"):
        memory, offset, shape, strides = saved.given[:4]
        dtype = getattr(torch, saved.given[6].name.rpartition(".")[2])
    else:
        raise TypeError(f"it is {getattr(saved, 'name', type(saved).__name__)}")
    if memory[0] != "storage" or not isinstance(dtype, torch.dtype):
        raise ValueError("its memory has another form")
    return _Form(str(memory[2]), dtype, _count(offset), _counts(shape), _counts(strides))


def _counts(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
