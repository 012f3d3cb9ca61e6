"""Who saves into a directory of checkpoints: one job, which deletes what it does not keep.

    checkpoints/
        OWNER    {"host": "node3", "pid": 812, "user": "ada", "since": "2026-11-23T08:00:00+00:00"}

The first rank of a job locks the file at its first save and holds the lock until its process ends.
The operating system frees the locks of a process that dies, so a crashed job locks nobody out, and
a restarted one goes on. The content is for people.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import getpass
import json
import os
import socket
from pathlib import Path
from typing import Any

from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.waiting import Wait

OWNER_FILE = "OWNER"

PATIENCE_S = 10.0
"""How long a job waits for its predecessor's process, which may be about to end."""

# [Note: A lock ends with its process] The lock belongs to the open file, which a forked child, such
# as a worker of a data loader, has too. A worker that outlives a killed parent would keep the lock,
# so children close the file at once: the parent's lock stays.
_held: dict[Path, int] = {}
"""The files that this process has locked, and their descriptors; the last one used is the last one
here.
"""

_MOST_HELD = 64
"""A process that saves into more directories lets go of those that it used longest ago."""


def release_all() -> None:
    """Let other processes save where this one did."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=release_all)  # see [Note: A lock ends with its process]


def claim(directory: Path) -> None:
    """Make this process the only one that saves into ``directory``, until it ends. It may be so
    already.

    Raises :class:`CheckpointError` if another process is. Where the file system has no locks,
    nobody is refused.
    """
    path = directory.resolve() / OWNER_FILE
    wait = Wait(
        f"another job saves its checkpoints in {directory}: waiting for it to end", PATIENCE_S
    )
    while not _is_claimed(path):
        if not wait.pause():
            raise CheckpointError(
                f"another job saves its checkpoints in {directory}",
                why=f"{_described(path)} holds {path}; each would delete what the other one saves",
                hint="save to another directory, or end that job. If it ended with its machine, "
                f"delete {path}",
            )


def _is_claimed(path: Path) -> bool:
    """Try to lock the file; false if another process has."""
    descriptor = _held.get(path)
    # Somebody has deleted it, perhaps for another job.
    if descriptor is not None and not _is_at(path, descriptor):
        os.close(_held.pop(path))
        descriptor = None
    if descriptor is None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            _held.pop(path, None)
            return False
        # No locks here: what is written is all that others can know.
    if not _is_at(path, descriptor):
        os.close(descriptor)
        return False
    _held.pop(path, None)
    _held[path] = descriptor
    _write(descriptor)
    while len(_held) > _MOST_HELD:
        os.close(_held.pop(next(iter(_held))))
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether a file that is open is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write(descriptor: int) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = {"host": socket.gethostname(), "pid": os.getpid(), "user": _user()}
    known = _read(descriptor)
    if {key: known.get(key) for key in content} != content:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps({**content, "since": now}) + "\n").encode(), 0)


def _read(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _described(path: Path) -> str:
    """Who has locked the file, in words."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = _read(descriptor)
    finally:
        os.close(descriptor)
    if not content:
        return "a process"
    return (
        f"process {content.get('pid')} of {content.get('user')} on {content.get('host')}, since "
        f"{content.get('since')},"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have a user without a name
        return str(os.getuid())
