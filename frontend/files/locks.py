"""One process at a time changes a directory of generated files."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import filelock

from shardwright.runtime.errors import FileError
from shardwright.runtime.ranks.processes import Process
from shardwright.runtime.swap import write_file, writing
from shardwright.runtime.waiting import LIMIT_HINT, Pulse, Wait

WRITE_HINT = "another gen_savedir (--gen-savedir), or room and permission to write there"

logger = logging.getLogger(__name__)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of ``directory`` (a file beside it). While another process or thread holds it,
    wait as long as it lives.

    Beside the lock its holder says again and again who it is. The operating system frees the lock
    of a process that dies; one that is stopped, or on a node that is gone, is given up when the
    limit of all waits is over. The lock's file stays: removing it would let two processes lock two
    files of one name. A directory in a place that takes no files, such as a read-only mount, needs
    no lock: nobody changes it there.

    Raises :class:`FileError` if there is neither a directory nor a way to make one, and if the
    holder gives no sign of life.
    """
    lock = filelock.FileLock(directory.with_name(f"{directory.name}.lock"))
    holder = directory.with_name(f"{directory.name}.lock.holder")
    with writing("generated files", directory, WRITE_HINT):
        is_held = _acquired(lock, holder, directory)
    try:
        with _signs_of_life(holder) if is_held else nullcontext():
            yield
    finally:
        if is_held:
            with contextlib.suppress(OSError):
                # Before the release, or it would remove the sign of the next holder.
                holder.unlink(missing_ok=True)
            lock.release()


def _acquired(lock: filelock.BaseFileLock, holder: Path, directory: Path) -> bool:
    """Wait for the lock of a directory. False where none can be made, and the directory is
    there.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _acquire(lock, holder, directory)
    except FileError:
        raise
    except OSError as error:
        # A folder that nobody may write to does not change: it can be read without a lock.
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not directory.is_dir():
            raise
        logger.info("%s is not writable: it is read without a lock", directory)
        return False
    return True


def _acquire(lock: filelock.BaseFileLock, holder: Path, directory: Path) -> None:
    wait: Wait | None = None
    while True:
        try:
            # Never a blocking acquire: it could not tell a holder at work from one that is stopped.
            lock.acquire(timeout=0)
            return
        except filelock.Timeout:
            sign = _read(holder)
        if wait is None:
            wait = Wait(f"another process is compiling into {directory}: waiting for it")
            logger.info("%s", wait.what)
        # The limit runs from the last sign that differs from the one before.
        wait.heard(sign)
        process = None if sign is None else Process.from_json(sign["process"])
        if not wait.pause(f"; {_described(process)}"):
            break
    is_stopped = process is not None and process.state() == "is stopped"
    more = (
        f"`kill -CONT {process.pid}` lets it go on; " if process is not None and is_stopped else ""
    )
    raise FileError(
        f"{directory} is locked, and whoever compiles into it has given no sign of life for "
        f"{wait.limit_s:g} s",
        why=_described(process),
        hint=f"{more}end it, or compile into another gen_savedir (--gen-savedir); {LIMIT_HINT}",
    )


def _described(process: Process | None) -> str:
    if process is None:
        return "who it is cannot be read"
    state = process.state()
    return f"it is {process}" + (f", which {state}" if state else ", another machine")


def _signs_of_life(holder: Path) -> AbstractContextManager[object]:
    process = Process.own().to_json()

    def beat(number: int) -> None:
        with contextlib.suppress(OSError):  # a full disk stops the compile by itself, in words
            write_file(holder, json.dumps({"sign": number, "process": process}).encode())

    return Pulse(beat)


def _read(holder: Path) -> dict[str, Any] | None:
    """The last sign of life; ``None`` if there is none, as between the lock and the first one."""
    try:
        sign: dict[str, Any] = json.loads(holder.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return sign
