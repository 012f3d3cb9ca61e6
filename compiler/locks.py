"""One process at a time changes a directory of generated files."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from shardwright.runtime.swap import writing

WRITE_HINT = "another gen_savedir (--gen-savedir), or room and permission to write there"

logger = logging.getLogger(__name__)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of ``directory`` (a file beside it), waiting as long as another process or thread holds it.

    The operating system frees the lock of a process that dies. The file stays: removing it would let two processes lock
    two files of one name. A directory in a place that takes no files, such as a read-only mount, needs no lock: nobody changes
    it there.

    Raises :class:`FileError` if there is neither a directory nor a way to make one.
    """
    lock = filelock.FileLock(directory.with_name(f"{directory.name}.lock"))
    with writing("generated files", directory, WRITE_HINT):
        is_held = _acquired(lock, directory)
    try:
        yield
    finally:
        if is_held:
            lock.release()


def _acquired(lock: filelock.BaseFileLock, directory: Path) -> bool:
    """Wait for the lock of a directory. False where none can be made, and the directory is there."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            logger.info("another process is compiling into %s: waiting for it", directory)
            lock.acquire()
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not directory.is_dir():
            raise
        logger.info("%s is not writable: it is read without a lock", directory)
        return False
    return True
