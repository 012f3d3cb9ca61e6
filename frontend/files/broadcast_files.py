"""Send generated files from the node that compiled to nodes that do not have them.

One rank per node and directory receives and writes; the others of its node see the files. Bytes
travel as uint8 tensors through a process group of the first rank and the receivers. Nodes that
already hold these very files get nothing.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.frontend.files.cache import Stored, keep_file, replacing
from shardwright.frontend.files.job import Job
from shardwright.frontend.files.locks import directory_lock
from shardwright.runtime.config import BroadcastGenFilesStrategy
from shardwright.runtime.errors import DistributedError, ShardwrightError
from shardwright.runtime.manifest import MANIFEST_FILE, Manifest
from shardwright.runtime.module.weights import WEIGHTS_FILE
from shardwright.runtime.ranks.failures import collective_failed, concerning
from shardwright.runtime.waiting import timeout

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Parcel:
    """The files to send, with their sizes in bytes. ``manifest`` is the text of the manifest."""

    manifest: str
    sizes: dict[str, int]

    @classmethod
    def pack(cls, directory: Path, strategy: BroadcastGenFilesStrategy) -> Parcel:
        """What of a directory goes to other nodes."""
        manifest = Manifest.read(directory)
        names = [name for name in sorted(manifest.files) if is_sent(name, strategy)]
        text = (directory / MANIFEST_FILE).read_text(encoding="utf-8")
        return cls(text, {name: (directory / name).stat().st_size for name in names})

    def is_held_by(self, directory: Path) -> bool:
        """Whether the directory has this manifest and a file of the right size for each name."""
        try:
            return (directory / MANIFEST_FILE).read_text(encoding="utf-8") == self.manifest and all(
                (directory / name).stat().st_size == size for name, size in self.sizes.items()
            )
        except OSError:
            return False


def is_sent(name: str, strategy: BroadcastGenFilesStrategy) -> bool:
    """Whether a file goes to other nodes under ``strategy``. The manifest always does, beside any
    other file.
    """
    return {
        BroadcastGenFilesStrategy.NONE: False,
        BroadcastGenFilesStrategy.ALL: True,
        BroadcastGenFilesStrategy.NO_WEIGHTS: name != WEIGHTS_FILE,
        BroadcastGenFilesStrategy.CODE: name.startswith("gencode"),
    }[strategy]


def share_files(job: Job, directory: Path, strategy: BroadcastGenFilesStrategy) -> None:
    """Bring the files of rank 0's ``directory`` to the ``directory`` of every node. Collective; an
    error reaches all ranks.
    """
    if strategy is BroadcastGenFilesStrategy.NONE or job.size == 1:
        return
    packed: dict[str, Any] = job.first_rank_does(lambda: vars(Parcel.pack(directory, strategy)))
    parcel = Parcel(**packed)
    places = job.gather([_node(), str(directory)])
    # The first rank of its node, but not of rank 0's.
    is_receiver = places.index(places[job.rank]) == job.rank != 0
    needs = job.gather(is_receiver and not parcel.is_held_by(directory))
    receivers = [rank for rank, needed in enumerate(needs) if needed]
    if not receivers:
        return
    with _in_words(job, receivers):
        # All ranks of the job make the group, members or not: torch asks for that.
        group = dist.new_group([0, *receivers], timeout=timeout(), group_desc="shardwright files")
    if job.rank == 0:
        job.every_rank_does(lambda: _send(parcel, directory, _Link(group, job, receivers)))
    elif job.rank in receivers:
        job.every_rank_does(lambda: _receive(parcel, directory, _Link(group, job, receivers)))
    else:
        job.every_rank_does(lambda: None)
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)


def _node() -> str:
    """What ranks of one node have in common: the host, and torchrun's number of the node where
    several share a host.
    """
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"


@contextmanager
def _in_words(job: Job, receivers: Sequence[int]) -> Iterator[None]:
    """Say who misses whom where a collective of rank 0 and the receivers fails."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ShardwrightError):
            raise
        others = {0, *receivers} - {job.rank}
        with concerning("sending the generated files to the other nodes"):
            raise collective_failed(
                "broadcast", "nodes", job.rank, others, None, error, ""
            ) from error


@dataclass(frozen=True)
class _Link:
    """How rank 0 and the receivers are connected."""

    group: Any
    job: Job
    receivers: Sequence[int]

    def broadcast(self, data: torch.Tensor) -> torch.Tensor:
        """Send ``data`` of rank 0 to every member of the group, and return it in CPU memory."""
        backends = dist.get_backend_config(self.group)
        # NCCL moves memory of GPUs only; a job with both backends can send from the CPU.
        on_cuda = "nccl" in backends and "gloo" not in backends
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        )
        moved = data.to(device)
        with _in_words(self.job, self.receivers):
            dist.broadcast(moved, src=0, group=self.group)
        return moved.cpu()


def _send(parcel: Parcel, directory: Path, link: _Link) -> None:
    for name, size in parcel.sizes.items():
        with (directory / name).open("rb") as file:
            for num_bytes in _chunk_sizes(size):
                # Of a bytearray, as torch warns of buffers that cannot be written.
                link.broadcast(torch.frombuffer(bytearray(file.read(num_bytes)), dtype=torch.uint8))


def _receive(parcel: Parcel, directory: Path, link: _Link) -> None:
    """Write what comes in beside the directory, check it and swap it in.

    An error while writing is raised when all has come in, so that the sender and the other
    receivers are not left waiting.
    """
    failure: BaseException | None = None
    with directory_lock(directory):
        stored = Stored.read(directory)
        with replacing(stored) as fresh:
            # Every message is received, even if it cannot be written: the sender waits for all
            # receivers.
            for name, size in parcel.sizes.items():
                sink = _Sink(fresh / name)
                for num_bytes in _chunk_sizes(size):
                    sink.write(link.broadcast(torch.empty(num_bytes, dtype=torch.uint8)))
                failure = failure or sink.close()
            if failure is not None:
                raise failure
            (fresh / MANIFEST_FILE).write_text(parcel.manifest, encoding="utf-8")
            _check(fresh, parcel, directory)
            for name, digest in Manifest.read(fresh).files.items():
                # What was not sent, weights say, may be here from an earlier compile.
                if name not in parcel.sizes and stored.holds(name, digest):
                    keep_file(directory / name, fresh / name)


class _Sink:
    """A file being received. Errors are kept for the end."""

    def __init__(self, path: Path) -> None:
        self._failure: OSError | None = None
        try:
            self._file = path.open("wb")
        except OSError as error:
            self._failure = error

    def write(self, data: torch.Tensor) -> None:
        if self._failure is None:
            try:
                self._file.write(data.numpy().data)
            except OSError as error:
                self._failure = error

    def close(self) -> OSError | None:
        if self._failure is None:
            try:
                self._file.close()
            except OSError as error:
                self._failure = error
        return self._failure


def _check(folder: Path, parcel: Parcel, directory: Path) -> None:
    listed = Manifest.read(folder).files
    for name in parcel.sizes:
        digest = _file_digest(folder / name)
        if digest != listed[name]:
            raise DistributedError(
                f"{directory / name} did not arrive as it was sent",
                why=f"its sha256 is {digest[:12]}..., the manifest has {listed[name][:12]}...",
                hint="compile again; if it happens again, check the file on the node of rank 0",
            )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _chunk_sizes(size: int) -> Iterator[int]:
    yield from (min(CHUNK_BYTES, size - start) for start in range(0, size, CHUNK_BYTES))
