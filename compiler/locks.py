"""One process at a time changes a directory of generated files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

logger = logging.getLogger(__name__)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of ``directory`` (a file beside it), waiting as long as another process or thread holds it.

    The operating system frees the lock of a process that dies. The file stays: removing it would let two processes lock
    two files of one name.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory.with_name(f"{directory.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another process is compiling into %s: waiting for it", directory)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
