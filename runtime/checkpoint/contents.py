"""A checkpoint opened for reading: any region of any of its tensors, from whichever files hold it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from shardwright.runtime.checkpoint.index import Index, TensorRecord
from shardwright.runtime.checkpoint.optimizer_state import listed
from shardwright.runtime.checkpoint.tensor_files import MappedFiles
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.regions import Region, copy_shared


class Contents:
    """The tensors of a complete folder, while the ``with`` block lasts. ``index``: what the folder says about itself."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self._files = MappedFiles(folder)

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.__exit__(kind, error, trace)

    def fill(self, target: Tensor, region: Region, record: TensorRecord) -> None:
        """Copy the elements of ``region`` into ``target``. Only they are read."""
        copied = 0
        for piece in record.pieces:
            view = self._files.view(piece.file, piece.key)
            if tuple(view.shape) != piece.region.shape:
                raise CheckpointError(
                    f"{self.folder / piece.file} holds another tensor as {piece.key!r}",
                    why=f"its shape is {list(view.shape)}, the index has {list(piece.region.shape)}",
                )
            copied += copy_shared(target, region, view, piece.region)
        assert copied == region.num_elements, f"{copied} of {region.num_elements} elements were found"

    def read(self, record: TensorRecord, region: Region | None = None, device: torch.device | str = "cpu") -> Tensor:
        """The elements of ``region`` (default: all) as a new tensor."""
        region = Region.whole(record.shape) if region is None else region
        target = torch.empty(region.shape, dtype=record.dtype, device=device)
        self.fill(target, region, record)
        return target


def check_files(folder: Path, index: Index, names: Iterable[str] | None = None) -> None:
    """Compare files (default: all) with their digests.

    Raises :class:`CheckpointError` naming those that are missing, truncated or altered.
    """
    names = index.files if names is None else names
    problems = [problem for name in names if (problem := index.files[name].problem(folder / name)) is not None]
    if problems:
        raise CheckpointError(
            f"{folder} is damaged", why=listed(problems), hint="load an earlier checkpoint of the same run by its own folder"
        )


def check_complete(folder: Path, index: Index) -> None:
    """Raise :class:`CheckpointError` if pieces of a tensor are in no file."""
    missing = [f"not all of {name!r} was saved" for name, record in index.records() if not record.is_complete]
    if missing:
        raise CheckpointError(f"{folder} is incomplete", why=listed(missing))
