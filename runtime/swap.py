"""Replacing files and folders so that readers see the old one or the new one, never a mixture."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.runtime.errors import ConfigError, FileError


def write_file(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` atomically."""
    temporary = _beside(path, "new")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            # On the disk before it gets its name, or a crash could leave an empty file under it.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_target(path: Path, setting: str, example: str = "plan.json") -> None:
    """Refuse a path that :func:`write_file` could not write, before the work whose result goes
    there. ``setting``: what names it, such as ``--out``; ``example``: a file that it could name.

    Raises :class:`ConfigError` if it is a folder, or its folder is not there or takes no files.
    """
    if path.is_dir():
        raise ConfigError(
            f"{setting} {path} is a folder", hint=f"name a file, for example {path / example}"
        )
    temporary = _beside(path, "new")
    try:
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise ConfigError(
            f"{setting} {path} cannot be written",
            why=f"{path.parent}: {error.strerror}",
            hint="make the folder, or name a file in another one",
        ) from error


@contextmanager
def writing(what: str, path: Path, hint: str) -> Iterator[None]:
    """Say in words why ``path`` cannot be written: the errors of the operating system become
    :class:`FileError`.
    """
    try:
        yield
    except FileError:  # in words already
        raise
    except IsADirectoryError as error:
        raise FileError(
            f"{what} cannot be written to {path}",
            why=f"a file belongs where a folder is: {error.filename}",
            hint="move the folder away, or " + hint,
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        why = reason if error.filename is None else f"{reason}: {error.filename}"
        raise FileError(f"{what} cannot be written to {path}", why=why, hint=hint) from error


@contextmanager
def write_folder(target: Path, *, alone: bool = False) -> Iterator[Path]:
    """An empty folder beside ``target`` to write into; it becomes ``target`` when the ``with``
    block ends well.

    If the block raises, the new folder is deleted and ``target`` is what it was. If the process is
    killed between the two renames at the end, the next call on the same target, or
    :func:`recover_folder`, puts the old folder back. What a killed process has left unfinished is
    deleted first. ``alone``: nobody else writes this target now, as the caller holds a lock.
    """
    recover_folder(target)
    remove_unfinished(target, alone=alone)
    fresh, lock = _locked_folder(target)
    try:
        yield fresh
        replace_folder(target, fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def remove_unfinished(target: Path, *, alone: bool) -> None:
    """Delete new folders for ``target`` whose process was killed. One that another process still
    writes is locked by it, and stays; so does one of which nobody can tell, unless the caller is
    ``alone``.
    """
    for folder in target.parent.glob(f".{glob.escape(target.name)}.new.*"):
        if (
            folder.is_symlink()
            or not folder.is_dir()
            or not re.fullmatch(r"[0-9a-f]{8}", folder.name.rpartition(".")[2])
        ):
            continue
        with contextlib.suppress(OSError):  # somebody else has deleted it
            lock = os.open(folder, os.O_RDONLY)
            try:
                if _is_locked(lock) or alone:
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _locked_folder(target: Path) -> tuple[Path, int]:
    """A fresh folder beside ``target``, and a descriptor that keeps it locked until it is closed or
    the process ends.
    """
    while True:
        fresh = _beside(target, "new")
        fresh.mkdir(parents=True)
        try:
            lock = os.open(fresh, os.O_RDONLY)
        except FileNotFoundError:  # deleted as unfinished before it was locked
            continue
        _is_locked(lock)
        if fresh.is_dir():
            return fresh, lock
        os.close(lock)


def _is_locked(descriptor: int) -> bool:
    """Lock an open folder for this process; false if another one has, or if the file system has no
    such locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def replace_folder(target: Path, fresh: Path) -> None:
    """Put ``fresh`` in the place of ``target``, which may not exist. Both must lie in one file
    system.
    """
    previous = _previous(target)
    if not target.exists():
        os.rename(fresh, target)
        return
    os.rename(target, previous)
    try:
        os.rename(fresh, target)
    except BaseException:
        os.rename(previous, target)
        raise
    shutil.rmtree(previous)


def recover_folder(target: Path) -> None:
    """Undo a replacement of ``target`` that was killed half way."""
    previous = _previous(target)
    if previous.exists():
        if target.exists():
            shutil.rmtree(previous)
        else:
            os.rename(previous, target)


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _beside(path: Path, what: str) -> Path:
    """A hidden name in the same folder, so in the same file system, that nobody else uses."""
    return path.with_name(f".{path.name}.{what}.{secrets.token_hex(4)}")
