"""Replacing files and folders so that readers see the old one or the new one, never a mixture."""

from __future__ import annotations

import os
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
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_target(path: Path, setting: str, example: str = "plan.json") -> None:
    """Refuse a path that :func:`write_file` could not write, before the work whose result goes there. ``setting``: what names
    it, such as ``--out``; ``example``: a file that it could name.

    Raises :class:`ConfigError` if it is a folder, or its folder is not there or takes no files.
    """
    if path.is_dir():
        raise ConfigError(f"{setting} {path} is a folder", hint=f"name a file, for example {path / example}")
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
    """Say in words why ``path`` cannot be written: the errors of the operating system become :class:`FileError`."""
    try:
        yield
    except FileError:  # in words already
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        why = reason if error.filename is None else f"{reason}: {error.filename}"
        raise FileError(f"{what} cannot be written to {path}", why=why, hint=hint) from error


@contextmanager
def write_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target`` to write into; it becomes ``target`` when the ``with`` block ends well.

    If the block raises, the new folder is deleted and ``target`` is what it was. If the process is killed between the two
    renames at the end, the next call on the same target, or :func:`recover_folder`, puts the old folder back.
    """
    recover_folder(target)
    fresh = _beside(target, "new")
    fresh.mkdir(parents=True)
    try:
        yield fresh
        replace_folder(target, fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def replace_folder(target: Path, fresh: Path) -> None:
    """Put ``fresh`` in the place of ``target``, which may not exist. Both must lie in one file system."""
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
