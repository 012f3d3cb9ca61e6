"""Packing: several short samples in one row of a fixed length.

Rows are filled greedily in the order of the stream: a sample that does not fit any more begins the
next row. So a row is neighbours of the stream, and where it begins says where it ends, as lengths
are known. Lengths 3, 4, 2, 5 in rows of 8 make the rows ``3 4`` and ``2 5``.

A packed row of 8 with samples of 3 and 4 tokens is

    input_ids     a a a b b b b .
    labels        a a a b b b b .      with -100 in the place of the padding
    position_ids  0 1 2 0 1 2 3 0      documents begin at 0
    document_ids  1 1 1 2 2 2 2 0      tokens of different documents do not see each other
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.data.global_batches import GlobalBatch, Tail
from shardwright.data.sample_stream import SampleStream
from shardwright.runtime.arguments import checked, checked_fields
from shardwright.runtime.errors import ConfigError, DataError, InputError, brief

WINDOW = 512
"""Positions whose lengths are looked up at a time."""

PADDING: Mapping[str, int] = {"labels": -100}
"""What fills up rows, by key, where a :class:`Packing` does not say; 0 for all other keys."""


@checked_fields
@dataclass(frozen=True)
class Packing:
    """How samples are packed into rows.

    ``length``: of a row. ``lengths``: of all samples of the dataset by index (a list, an array or a
    tensor; one for each source of a blend); by default the dataset's ``lengths``. ``padding``: what
    fills up rows, by key. ``overlong``: what becomes of samples longer than a row: ``"stop"``, an
    error, or ``"cut"``, which keeps their beginning.
    """

    length: int
    lengths: Any = None
    padding: Mapping[str, Any] = field(default_factory=dict)
    overlong: Literal["stop", "cut"] = "stop"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"a row of {self.length} elements holds nothing")

    def identity(self, lengths: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
        """What a state notes of it, as rows follow from it. ``lengths``: by source."""
        digest = hashlib.sha256()
        for own in lengths:
            digest.update(own.tobytes())
        return {"length": self.length, "lengths": digest.hexdigest()[:16]}


def as_lengths(given: Any, num_samples: int, name: str) -> NDArray[np.int64]:
    """The lengths of all samples of a dataset. ``name``: of the dataset, for messages."""
    if given is None:
        raise DataError(
            f"the lengths of the samples of {name} are not known",
            why="rows are packed the same on all ranks, so every rank must know the lengths of "
            "samples that others read",
            hint="data.Packing(length, lengths=[...]), or a dataset with an attribute 'lengths'",
        )
    try:
        lengths = np.asarray(given, dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{brief(given)} are no lengths", why=str(error)) from error
    if lengths.shape != (num_samples,):
        raise DataError(
            f"there are {lengths.size} lengths for {num_samples} samples of {name}",
            hint="give one number for each sample",
        )
    if num_samples and int(lengths.min()) < 1:
        raise DataError(
            f"sample {int(lengths.argmin())} of {name} has the length {int(lengths.min())}",
            why="a packed sample has at least one element",
        )
    return lengths


class PackedBatching:
    """Global batches of packed rows. ``lengths``: by source."""

    def __init__(
        self,
        stream: SampleStream,
        lengths: Sequence[NDArray[np.int64]],
        packing: Packing,
        global_batch: int,
        tail: Tail,
    ) -> None:
        self._stream = stream
        self._lengths = lengths
        self._length = packing.length
        self._global_batch = global_batch
        self._tail = tail
        self._window: tuple[int, list[int]] = (0, [])
        longest = max((int(own.max(initial=0)) for own in lengths), default=0)
        if longest > packing.length and packing.overlong == "stop":
            source = next(i for i, own in enumerate(lengths) if int(own.max(initial=0)) == longest)
            raise DataError(
                f"sample {int(lengths[source].argmax())} has {longest} elements and does not fit "
                f"into a row of {packing.length}",
                hint="use longer rows, leave the sample out, or Packing(..., overlong='cut')",
            )
        if self._tail == "drop" and self._epoch_of(0).num_rows < global_batch:
            rows = self._epoch_of(0).num_rows
            raise DataError(
                f"an epoch is packed into {rows} rows, which make no global batch of "
                f"{global_batch}",
                hint="use a smaller global_batch, or wrap=True",
            )

    def at(self, position: int) -> GlobalBatch:
        """See :class:`~shardwright.data.global_batches.Batching`."""
        size = self._stream.epoch_size
        epoch = position // size
        found = self._epoch_of(position)
        # In another order an epoch may be packed into a row less, and so make no batch.
        while self._tail == "drop" and found.num_rows < self._global_batch:
            epoch += 1
            found = self._epoch_of(epoch * size)
        return found

    def num_steps(self) -> int:
        """See :class:`~shardwright.data.global_batches.Batching`: looks at the length of every
        sample.
        """
        steps, position = 0, 0
        while (batch := self.at(position)).epoch == 0:
            steps, position = steps + 1, batch.after
            if batch.after >= self._stream.epoch_size:
                break
        return steps

    def _epoch_of(self, position: int) -> GlobalBatch:
        """The rows from a position on; fewer than a batch if the epoch ends."""
        size = self._stream.epoch_size
        epoch = position // size
        end = None if self._tail == "wrap" else (epoch + 1) * size
        bounds, filled, at = [position], 0, position
        while len(bounds) <= self._global_batch and at != end:
            length = min(self._length_at(at), self._length)
            # First fit in order, without looking ahead: which samples share a row follows from the
            # position alone, so a resumed run packs the same rows.
            if filled and filled + length > self._length:
                bounds.append(at)
                filled = 0
                continue
            filled, at = filled + length, at + 1
        if len(bounds) <= self._global_batch and filled:
            bounds.append(at)
        return GlobalBatch(epoch, tuple(bounds), bounds[-1])

    def _length_at(self, position: int) -> int:
        start, lengths = self._window
        if not start <= position < start + len(lengths):
            runs = self._stream.runs(position, position + WINDOW)
            lengths = [n for run in runs for n in self._lengths[run.source][run.indices].tolist()]
            start = position
            self._window = (start, lengths)
        return lengths[position - start]


def packable(sample: Any, length: int) -> dict[str, Tensor]:
    """A sample as 1-d tensors by key: a mapping of such, or one of them (``input_ids``).
    ``length``: what was said of it; rows were packed by that.

    Raises :class:`DataError` for a sample that is neither, or is of another length.
    """
    found = _tensors(sample)
    lengths = {key: len(value) for key, value in found.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            "the tensors of a sample that is packed have different lengths",
            why=", ".join(f"{key}: {count}" for key, count in lengths.items()),
            hint="take other entries out with transform=",
        )
    (count,) = set(lengths.values())
    if count != length:
        raise DataError(
            f"a sample that is packed has {count} elements, and its length was given as {length}",
            why="every rank packs rows by the lengths, of samples that others read, too",
            hint="give Packing the lengths that samples have after transform=",
        )
    return found


def pack_row(parts: Sequence[Mapping[str, Tensor]], packing: Packing) -> dict[str, Tensor]:
    """One row of samples, each as :func:`packable` gave it.

    Raises :class:`DataError` where their keys differ.
    """
    keys = tuple(parts[0])
    position_ids, document_ids = [], []
    for number, part in enumerate(parts, start=1):
        if tuple(part) != keys:
            raise DataError(
                "samples of one row have different keys", why=f"{list(keys)} and {list(part)}"
            )
        count = min(len(part[keys[0]]), packing.length)
        position_ids.append(torch.arange(count))
        document_ids.append(torch.full((count,), number))
    row = {}
    for key in keys:
        pieces = [part[key][: packing.length] for part in parts]
        row[key] = _filled(pieces, packing, packing.padding.get(key, PADDING.get(key, 0)))
    # Documents are counted from 1, so that padding, 0, is of none of them.
    row["position_ids"] = _filled(position_ids, packing, 0)
    row["document_ids"] = _filled(document_ids, packing, 0)
    return row


def _tensors(sample: Any) -> dict[str, Tensor]:
    named = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    try:
        found = {key: torch.as_tensor(value) for key, value in named.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            "a sample that is packed holds something else than numbers",
            why=f"{type(error).__name__}: {error}",
            hint="take it out with transform=",
        ) from error
    wrong = [key for key, value in found.items() if value.ndim != 1]
    if wrong or not found:
        raise DataError(
            "a sample that is packed is a mapping of 1-d tensors",
            why=f"{wrong[0]!r} has shape {list(found[wrong[0]].shape)}" if wrong else "it is empty",
            hint="take other entries out with transform=",
        )
    return found


def _filled(pieces: Sequence[Tensor], packing: Packing, padding: Any) -> Tensor:
    used = sum(map(len, pieces))
    assert used <= packing.length, "rows are packed by the lengths, which samples were held to"
    rest = torch.full((packing.length - used,), padding, dtype=pieces[0].dtype)
    return torch.cat([*pieces, rest])


@checked
def document_mask(document_ids: Tensor, *, causal: bool = True) -> Tensor:
    """Which pairs of a packed row see each other: ``[rows, 1, length, length]``, true where they
    do. Padding sees itself alone. ``causal``: keys lie at or before their queries.
    """
    if document_ids.ndim != 2:
        raise InputError(
            f"document_ids has {document_ids.ndim} dims",
            why="it has a row for each packed row, and in it a number for each token",
            hint="pass document_ids of a batch that was packed, [rows, length]",
        )
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    length = document_ids.shape[1]
    diagonal = torch.eye(length, dtype=torch.bool, device=document_ids.device)
    same &= (document_ids != 0)[:, None, :, None] | diagonal
    return same.tril() if causal else same
