"""A checkpoint opened for reading: its index, and any region of any of its tensors, from whichever
files hold it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from shardwright.runtime.activity import tell
from shardwright.runtime.checkpoint.checkpoint_index import (
    INDEX_FILE,
    Index,
    TensorRecord,
)
from shardwright.runtime.checkpoint.dcp_index import DCP_FILE, read_dcp
from shardwright.runtime.checkpoint.optimizer_state import listed
from shardwright.runtime.checkpoint.tensor_files import MappedFiles
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.regions import Region, copy_shared


def read_index(folder: Path, *, warns: bool = True) -> Index:
    """What a folder holds: one of ours, or one of ``torch.distributed.checkpoint``.

    ``warns``: say what such a folder holds that has no place in a checkpoint of ours.

    Raises :class:`CheckpointError` if the index is missing or damaged.
    """
    if (folder / INDEX_FILE).exists() or not (folder / DCP_FILE).exists():
        return Index.read(folder / INDEX_FILE)
    found = read_dcp(folder)
    if warns and found.left_out:
        warnings.warn(
            f"of {folder}, a checkpoint of torch.distributed.checkpoint, "
            f"{len(found.left_out)} entries are left out: {listed(found.left_out)}",
            stacklevel=5,
        )
    return found.index


class Contents:
    """The tensors of a complete folder, while the ``with`` block lasts. ``index``: what the folder
    says about itself.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self._files = MappedFiles(folder)

    def __enter__(self) -> Contents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def check(self, records: Iterable[TensorRecord]) -> None:
        """Compare the headers of files with the index, so that :meth:`fill` finds every piece. No
        values are read.

        Raises :class:`CheckpointError` if a file cannot be read, lacks a piece, or holds another
        tensor in its place.
        """
        for record in records:
            for piece in record.pieces:
                shape, dtype = self._files.kind(piece.file, piece.key)
                if (shape, dtype) != (piece.region.shape, record.dtype):
                    raise CheckpointError(
                        f"{self.folder / piece.file} holds another tensor as {piece.key!r}",
                        why=f"it is {dtype}{list(shape)}, the index has "
                        f"{record.dtype}{list(piece.region.shape)}",
                    )

    def fill(self, target: Tensor, region: Region, record: TensorRecord) -> None:
        """Copy the elements of ``region`` into ``target``. Only they are read."""
        copied = sum(
            copy_shared(target, region, self._files.view(piece.file, piece.key), piece.region)
            for piece in record.pieces
        )
        assert copied == region.num_elements, (
            f"{copied} of {region.num_elements} elements were found"
        )

    def read(
        self, record: TensorRecord, region: Region | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The elements of ``region`` (default: all) as a new tensor."""
        self.check([record])
        region = Region.whole(record.shape) if region is None else region
        target = torch.empty(region.shape, dtype=record.dtype, device=device)
        self.fill(target, region, record)
        return target


def check_files(folder: Path, index: Index, names: Iterable[str] | None = None) -> None:
    """Compare files (default: all) with their digests; of files of other software, which have
    none, the tensors with their checksums.

    Raises :class:`CheckpointError` naming those that are missing, truncated or altered.
    """
    names = list(index.files if names is None else names)
    problems = []
    for number, name in enumerate(names):
        tell(f"checking {name}", number / len(names))
        problem = index.files[name].problem(folder / name)
        problems += [] if problem is None else [problem]
    # Reading a tensor compares it with its checksum; what is read here is thrown away.
    without = {name for name in names if index.files[name].sha256 is None}
    if without and not problems:
        with MappedFiles(folder) as files:
            for _, record in index.records():
                for piece in record.pieces:
                    if piece.file in without:
                        files.view(piece.file, piece.key)
    if problems:
        raise CheckpointError(
            f"{folder} is damaged",
            why=listed(problems),
            hint="load an earlier checkpoint of the same run by its own folder",
        )


def check_complete(folder: Path, index: Index) -> None:
    """Raise :class:`CheckpointError` if the pieces of a tensor do not make it: some are in no file,
    or they overlap.
    """
    problems = [
        f"of {name!r} {problem}"
        for name, record in index.records()
        if (problem := record.problem) is not None
    ]
    if problems:
        raise CheckpointError(f"{folder} is incomplete", why=listed(problems))
