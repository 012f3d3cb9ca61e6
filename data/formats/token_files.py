"""Megatron's token files: ``corpus.bin`` has the token ids of all documents end to end,
``corpus.idx`` says where they begin.

The layout of ``.idx``, little-endian: ``MMIDIDX`` and two zero bytes, version 1 (uint64), a code of
the dtype (uint8), the numbers of sequences and of document bounds (uint64 each), the lengths of the
sequences (int32), their places in bytes (int64), and the document bounds, as numbers of sequences
(int64).

A pretraining sample is a **window**: ``length + 1`` neighbours of the tokens, of which inputs are
all but the last and labels all but the first. Windows go over the bounds of documents, which are
told by ``position_ids`` and ``document_ids``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.data.formats.source_files import identity
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, DataError, brief, brief_text

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
"""Megatron's codes."""


class TokenFile:
    """The documents of a pair of files, by index: ``{"input_ids": [length]}`` of int64.

    ``prefix``: the path without ``.bin``. ``lengths``: of all documents, so that they can be
    packed. ``tokens``: all of them, memory-mapped.
    """

    @checked
    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        base = os.fspath(prefix).removesuffix(".bin").removesuffix(".idx")
        self.path = Path(base + ".bin")
        index = Path(base + ".idx")
        for path in (self.path, index):
            if not path.is_file():
                raise DataError(
                    f"{path} is not there", hint="a token file is a pair: name.bin and name.idx"
                )
        dtype, lengths, places, bounds = _read_index(index)
        self._dtype = np.dtype(dtype)
        size = self.path.stat().st_size
        _check_places(self.path, size, self._dtype.itemsize, lengths, places, bounds)
        # Where each document begins and ends, in tokens.
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.bounds: NDArray[np.int64] = ends[bounds]
        self.lengths: NDArray[np.int64] = np.diff(self.bounds)
        self.num_tokens = int(ends[-1])
        self.fingerprint = hashlib.sha256(
            repr((identity(index), identity(self.path))).encode()
        ).hexdigest()[:16]
        self._tokens: NDArray[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: it maps the file itself."""
        return {**self.__dict__, "_tokens": None}

    @property
    def tokens(self) -> NDArray[Any]:
        """All tokens, memory-mapped; nothing is read before it is used."""
        if self._tokens is None:
            empty = self.num_tokens == 0
            self._tokens = (
                np.zeros(0, self._dtype)
                if empty
                else np.memmap(self.path, self._dtype, mode="r", shape=(self.num_tokens,))
            )
        return self._tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no document {index} among {len(self)}")
        index %= len(self)
        return {"input_ids": self.read(int(self.bounds[index]), int(self.bounds[index + 1]))}

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens ``start`` to ``stop``, as int64."""
        return torch.from_numpy(self.tokens[start:stop].astype(np.int64))

    def key(self, index: int) -> str:
        """The name of a document, for messages."""
        return f"{self.path}, document {index}"


class TokenWindows:
    """Samples for pretraining: windows of ``length`` tokens of a :class:`TokenFile`, each token
    predicted once.

    A sample has ``input_ids``, ``labels`` (the next tokens), ``position_ids`` (which begin at 0
    with each document) and ``document_ids`` (which begin at 1 with each window). ``mask_bounds``:
    a label that is the first token of the next document is -100, as nothing predicts it.
    """

    @checked
    def __init__(
        self, file: TokenFile | str | os.PathLike[str], length: int, *, mask_bounds: bool = True
    ) -> None:
        if length < 1:
            raise ConfigError(f"a window of {length} tokens holds nothing")
        self.file = file if isinstance(file, TokenFile) else TokenFile(file)
        self.length = length
        self._mask_bounds = mask_bounds
        if len(self) < 1:
            raise DataError(
                f"{self.file.path} is too short for a window",
                why=f"it has {self.file.num_tokens} tokens, and a window takes {length + 1}",
                hint="use shorter windows",
            )
        self.fingerprint = f"{self.file.fingerprint}/{length}"

    def __len__(self) -> int:
        return (self.file.num_tokens - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no window {index} among {len(self)}")
        start = index % len(self) * self.length
        # One token more: the label of the last one.
        tokens = self.file.read(start, start + self.length + 1)
        positions = np.arange(start, start + self.length + 1)
        document = np.searchsorted(self.file.bounds, positions, side="right") - 1
        labels = tokens[1:].clone()
        if self._mask_bounds:
            labels[torch.from_numpy(document[1:] != document[:-1])] = -100
        first = np.maximum(self.file.bounds[document[:-1]], start)
        # Counted from 1 in each window, as 0 is padding elsewhere.
        ids = np.unique(document[:-1], return_inverse=True)[1] + 1
        return {
            "input_ids": tokens[:-1],
            "labels": labels,
            "position_ids": torch.from_numpy((positions[:-1] - first).astype(np.int64)),
            "document_ids": torch.from_numpy(ids.astype(np.int64)),
        }

    def key(self, index: int) -> str:
        """The place of a window, for messages."""
        return f"{self.file.path}, tokens from {index * self.length}"


@checked
def write_token_file(
    prefix: str | os.PathLike[str], documents: Iterable[Any], *, dtype: Any = "int32"
) -> TokenFile:
    """Write documents, each a list or a tensor of token ids, as a pair of files that Megatron reads
    too.

    Both are written aside and put in place together at the end. Raises :class:`DataError` for an
    id that ``dtype`` cannot hold.
    """
    base = os.fspath(prefix).removesuffix(".bin")
    try:
        kind = np.dtype(dtype)
    except Exception as error:  # numpy asks whatever it is given
        raise ConfigError(
            f"token files have no dtype {brief(dtype)}", hint="int32, uint16 or int64"
        ) from error
    code = next((number for number, known in DTYPES.items() if np.dtype(known) == kind), None)
    if code is None:
        raise ConfigError(f"token files have no dtype {kind}", hint="int32, uint16 or int64")
    try:
        given = iter(documents)
    except TypeError as error:  # a tensor without dims
        raise DataError("documents is no list of documents", why=str(error)) from error
    lengths: list[int] = []
    with _both_written(base) as (tokens_file, index_file):
        for number, document in enumerate(given):
            try:
                tokens = np.asarray(document)
                stored = tokens.astype(kind)
            except Exception as error:  # numpy asks whatever it is given
                raise DataError(
                    f"document {number} is no list of token ids",
                    why=f"{type(error).__name__}: {brief_text(error)}",
                ) from error
            if tokens.ndim != 1 or not np.array_equal(stored, tokens):
                raise DataError(
                    f"document {number} is no list of token ids that fit into {kind}",
                    why=f"it has shape {list(tokens.shape)}"
                    if tokens.ndim != 1
                    else f"its ids go from {tokens.min()} to {tokens.max()}",
                    hint="dtype='int64' holds any id",
                )
            tokens_file.write(stored.tobytes())
            lengths.append(len(tokens))
        sizes = np.array(lengths, np.int32)
        places = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[:-1] * kind.itemsize
        bounds = np.arange(len(lengths) + 1, dtype=np.int64)
        index_file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(bounds)))
        for array in (sizes, places.astype(np.int64), bounds):
            index_file.write(array.tobytes())
    return TokenFile(base)


@contextlib.contextmanager
def _both_written(base: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    targets = [Path(base + ".bin"), Path(base + ".idx")]
    aside = [target.with_name(f".{target.name}.{os.getpid()}.new") for target in targets]
    try:
        with open(aside[0], "wb") as tokens, open(aside[1], "wb") as index:
            yield tokens, index
            for file in (tokens, index):
                file.flush()
                os.fsync(file.fileno())
        # A pair of different generations would be read as other documents: no index is there
        # while the tokens are exchanged.
        targets[1].unlink(missing_ok=True)
        for path, target in zip(aside, targets, strict=True):
            os.replace(path, target)
    finally:
        for path in aside:
            path.unlink(missing_ok=True)


def _read_index(path: Path) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any]]:
    content = path.read_bytes()
    try:
        magic, version, code, num_sequences, num_bounds = HEADER.unpack_from(content)
    except struct.error as error:
        raise _damaged(path, f"it has {len(content)} bytes") from error
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise _damaged(path, f"it begins with {magic!r}, version {version}, dtype {code}")
    # By sequence a length (4 bytes) and a place (8); by document where it begins (8).
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(content) != expected:
        raise _damaged(path, f"it has {len(content)} bytes, and its header says {expected}")
    lengths = np.frombuffer(content, np.int32, num_sequences, HEADER.size)
    places = np.frombuffer(content, np.int64, num_sequences, HEADER.size + 4 * num_sequences)
    bounds = np.frombuffer(content, np.int64, num_bounds, HEADER.size + 12 * num_sequences)
    return DTYPES[code], lengths, places, bounds


def _check_places(path: Path, size: int, item: int, lengths: Any, places: Any, bounds: Any) -> None:
    total = int(lengths.sum(dtype=np.int64))
    if size != total * item:
        raise DataError(
            f"{path} is truncated, or belongs to another index",
            why=f"it has {size} bytes, and its index tells of {total} tokens of {item} bytes",
            hint="copy both files again",
        )
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (
        (lengths < 0).any()
        or not np.array_equal(ends[:-1] * item, places)
        or not len(bounds)
        or bounds[0] != 0
        or bounds[-1] != len(lengths)
        or (np.diff(bounds) < 0).any()
    ):
        raise _damaged(path.with_suffix(".idx"), "its sequences do not lie end to end")


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is no index of a token file", why=why, hint="copy both files again")
