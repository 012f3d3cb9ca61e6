"""The folders of a run: which one is current, which are complete, which can go.

    checkpoints/
        LATEST                          the name of the current folder, replaced atomically
        OWNER                           the job that saves here (``owner.py``)
        000007-step-3500/
            index.json                  written when everything else is there and flushed
            rank-00000.safetensors
            rank-00001.safetensors
        000008-step-4000/
            save-2f6c81d09b7ae354       while it is written: the save that it belongs to

A folder is complete when it has an index; it is current when ``LATEST`` names it. A save that is
killed leaves a folder without an index, which the next save deletes before it writes anything: the
disk may be full of it.

Links are followed for reading only. A folder that is a link, such as one into an archive, is never
deleted.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from shardwright.runtime.checkpoint.checkpoint_index import INDEX_FILE
from shardwright.runtime.checkpoint.dcp_index import DCP_FILE
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.swap import write_file

LATEST_FILE = "LATEST"

TRAINER_FOLDER = "shardwright"
"""The folder in a checkpoint of ``ShardwrightTrainer`` (``checkpoint-500``) that has the pieces."""

_TRAINER_CHECKPOINT = re.compile(r"checkpoint-(\d+)")

_NAME = re.compile(r"(\d{6,})(?:-step-\d+)?")

_WRITTEN = re.compile(
    r"index\.json|rank-\d{5,}\.(json|safetensors|failed|alive)|save-[0-9a-f]{16}|"
    r"(model|optimizer).*\.safetensors|\..*\.new\.[0-9a-f]+"
)
"""What saving and merging write into a folder."""


def next_number(directory: Path) -> int:
    """The number of the next folder: after all that are there."""
    return max((number for number, _ in _numbered(directory)), default=0) + 1


def make_folder(directory: Path, number: int, step: int | None) -> tuple[Path, str]:
    """A fresh folder in ``directory``, and its mark: the name of an empty file in it, which lies
    there as long as the folder is written.

    A folder that a failed save has deleted leaves its name to the next one. A process of the
    earlier save that was stopped may wake up then. It has another mark, so it can tell that the
    folder of that name is not its own.
    """
    folder = directory / (f"{number:06d}" if step is None else f"{number:06d}-step-{step}")
    mark = f"save-{secrets.token_hex(8)}"
    folder.mkdir()
    (folder / mark).touch()
    sync_folder(directory)
    return folder, mark


def make_current(folder: Path) -> None:
    """Let ``LATEST`` name a complete folder, whose files have been flushed."""
    sync_folder(folder)
    write_file(folder.parent / LATEST_FILE, f"{folder.name}\n".encode())
    sync_folder(folder.parent)


def is_current(folder: Path) -> bool:
    """Whether ``LATEST`` names a folder."""
    try:
        return (folder.parent / LATEST_FILE).read_text(errors="replace").strip() == folder.name
    except OSError:
        return False


def prune(folder: Path, keep: int) -> None:
    """Delete what is not among the newest ``keep`` complete folders up to the current one,
    ``folder``.

    A folder that holds anything else than a checkpoint stays, whatever its name, and so does one
    that is a link.
    """
    directory = folder.parent
    older = [
        path for path in complete_folders(directory) if path != folder and not path.is_symlink()
    ]
    # Slicing from ``-0`` would keep all, so a ``keep`` of 1 is apart.
    kept = {folder, *(older[len(older) - (keep - 1) :] if keep > 1 else [])}
    for _, path in _numbered(directory):
        if path not in kept:
            remove_folder(path)
    _remove_temporaries(directory)


def remove_unfinished(directory: Path, active: Collection[Path]) -> None:
    """Delete what killed saves have left. The caller is the only one who saves into ``directory``;
    ``active`` are folders that it still writes.
    """
    for _, path in _numbered(directory):
        if path not in active and not (path / INDEX_FILE).exists():
            remove_folder(path)
    _remove_temporaries(directory)


def remove_folder(folder: Path) -> None:
    """Delete a folder that saving has made, unless it is a link or holds anything else."""
    if folder.is_symlink() or not folder.is_dir():
        return
    if all(
        _WRITTEN.fullmatch(entry.name) and (entry.is_symlink() or not entry.is_dir())
        for entry in folder.iterdir()
    ):
        # The index goes first: a folder that is half deleted must not look complete.
        (folder / INDEX_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _remove_temporaries(directory: Path) -> None:
    for temporary in directory.glob(f".{LATEST_FILE}.new.*"):
        temporary.unlink(missing_ok=True)


def complete_folders(directory: Path) -> list[Path]:
    """The complete checkpoints in ``directory``, oldest first."""
    return [path for _, path in _numbered(directory) if (path / INDEX_FILE).exists()]


def find_folder(directory: Path) -> Path:
    """The folder of one checkpoint: ``directory`` itself if it is one, of ours or of
    ``torch.distributed.checkpoint``, else the one that its ``LATEST`` names. Of
    ``ShardwrightTrainer`` it may be a checkpoint, or the output folder, whose newest counts.

    Raises :class:`CheckpointError` if there is none.
    """
    directory = pieces_folder(directory)
    if (directory / INDEX_FILE).exists() or (directory / DCP_FILE).exists():
        return directory
    try:
        name = (directory / LATEST_FILE).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no checkpoint in {directory}",
            why=f"it has neither {LATEST_FILE} nor {INDEX_FILE}",
            hint="pass the directory that save_checkpoint was called with, or one of the folders "
            "in it",
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{directory / LATEST_FILE} cannot be read",
            why=error.strerror,
            hint=f"load a checkpoint by its own path, {directory / '...'}",
        ) from error
    folder = directory / name
    if not _NAME.fullmatch(name) or not (folder / INDEX_FILE).exists():
        others = ", ".join(path.name for path in complete_folders(directory)) or "none"
        raise CheckpointError(
            f"{directory / LATEST_FILE} names {name!r}, which is no complete checkpoint",
            why=f"complete ones here: {others}",
            hint=f"load one of them by its own path, {directory / '...'}",
        )
    return folder


def pieces_folder(directory: Path) -> Path:
    """Where ``ShardwrightTrainer`` has put the pieces of its checkpoint ``directory``, or those of
    the newest checkpoint in its output folder ``directory``. Any other folder is returned as it is.
    """
    if (directory / INDEX_FILE).exists() or (directory / LATEST_FILE).exists():
        return directory
    checkpoints = [
        (int(match[1]), path)
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (match := _TRAINER_CHECKPOINT.fullmatch(path.name))
    ]
    newest_first = [path for _, path in sorted(checkpoints, reverse=True)]
    candidates = (path / TRAINER_FOLDER for path in (directory, *newest_first))
    return next((path for path in candidates if (path / LATEST_FILE).exists()), directory)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder, so that the files in it survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """The folders that a save made, by number."""
    found = [
        (match, path)
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted((int(match[1]), path) for match, path in found)
