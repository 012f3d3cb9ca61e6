"""Processes: how ranks say which process they are, and what another one on this machine can see of
it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from shardwright.runtime.errors import DistributedError, ShardwrightError
from shardwright.runtime.ranks.late import Failure, Waiting
from shardwright.runtime.waiting import OutOfTimeError, Wait, in_time, timeout_s

Answer = TypeVar("Answer")

_ASKING = "this rank waits for the job's key-value store"
_SETTLE_S = 1.0
"""How long a process that has closed its connections may take to be gone."""
_MANY_RANKS, _MANY_WORDS = 64, 4
"""The most ranks that the store is asked about, and the most about which something is said."""

_ANY_FAILED = "failed"
"""The key that is there once any rank has failed."""

State = Literal["runs", "is stopped", "is gone"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process. ``machine``: equal where two processes can see each other under their numbers.
    ``started``: when, in clock ticks of the machine, as numbers are used again; ``None`` where
    nothing tells.
    """

    pid: int
    host: str
    machine: str
    started: int | None

    @classmethod
    def own(cls) -> Process:
        """The calling one."""
        pid = os.getpid()
        status = _status(pid)
        return cls(pid, socket.gethostname(), _machine(), status[1] if status else None)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Process:
        """The reverse of :meth:`to_json`."""
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return asdict(self)

    def state(self) -> State | None:
        """What it does; ``None`` if it is on another machine, or nothing tells."""
        if self.machine != _machine() or self.started is None:
            return None
        status = _status(self.pid)
        if status is None or status[1] != self.started or status[0] in "ZX":
            return "is gone"
        return "is stopped" if status[0] in "Tt" else "runs"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Roll:
    """Which process each rank is, and with what a rank has failed, through the store of the job.

    ``store``: of ``torch.distributed``. ``rank``: the caller's.
    """

    def __init__(self, store: dist.distributed_c10d.Store, rank: int) -> None:
        self._store = dist.distributed_c10d.PrefixStore("shardwright/processes", store)
        self._rank = rank
        self._known: dict[int, Process] = {}
        text = json.dumps(Process.own().to_json())

        def sign() -> None:
            self._store.delete_key(f"failed{rank}")  # of an earlier process group on the same store
            self._store.set(str(rank), text)

        answered(sign, Wait(f"rank {rank} waits for the job's key-value store"), rank)

    def learn(self, ranks: Sequence[int]) -> None:
        """Remember the processes of ranks that are in a group with the caller, while the store can
        tell.
        """
        unknown = [rank for rank in ranks if rank not in self._known and rank != self._rank]
        if 0 < len(unknown) <= _MANY_RANKS:
            self._known |= answered(lambda: self._read(unknown), Wait(_ASKING), self._rank)

    def known(self, rank: int) -> Process | None:
        """The process of a rank, if it has been learnt. Nothing is asked for it."""
        return self._known.get(rank)

    def say_failed(self, failure: Failure) -> None:
        """Tell other ranks, which will miss this one, why it fails."""
        text = json.dumps(asdict(failure))

        def say() -> None:
            self._store.set(f"failed{self._rank}", text)
            self._store.set(_ANY_FAILED, "")

        self._quickly(say)

    def failures(self, ranks: Sequence[int]) -> dict[int, Failure]:
        """The ranks that have failed, as far as the store tells."""
        return self._quickly(lambda: self._failed(ranks)) or {}

    def say_waiting(self, group: str, number: int, waiting: Waiting) -> None:
        """Tell others that this rank is in a collective: the ``number``-th of a group."""
        text = json.dumps([group, number, waiting.call, waiting.text])
        self._quickly(lambda: self._store.set(f"waits{self._rank}", text))

    def waiting(self, ranks: Sequence[int], group: str, number: int) -> dict[int, Waiting]:
        """What the ranks have said that are in the ``number``-th collective of a group."""
        return self._quickly(lambda: self._waiting(ranks, [group, number])) or {}

    def states(self, ranks: Sequence[int]) -> str:
        """How other ranks are, in words: those first that are gone, stopped, or have failed
        themselves.
        """
        others = [rank for rank in ranks if rank != self._rank]
        deadline = time.monotonic() + _SETTLE_S
        # For a moment, as what has happened to a process shows a little later.
        while True:
            notes = {
                rank: failure.text
                for rank, failure in self.failures(others).items()
                if not failure.is_over
            }
            words = {rank: described(rank, self._process(rank)) for rank in others}
            blamed = [
                rank
                for rank in others
                if rank in notes or words[rank].endswith(("is gone", "is stopped"))
            ]
            if blamed or time.monotonic() > deadline:
                break
            time.sleep(_SETTLE_S / 20)  # a process that ends closes its connections first
        shown = (blamed or others)[:_MANY_WORDS]
        return "; ".join(
            f"rank {rank} has failed: {notes[rank]}" if rank in notes else words[rank]
            for rank in shown
        )

    def _process(self, rank: int) -> Process | None:
        if rank not in self._known:
            self._known |= self._quickly(lambda: self._read([rank])) or {}
        return self._known.get(rank)

    def _read(self, ranks: Sequence[int]) -> dict[int, Process]:
        there = [rank for rank in ranks if self._store.check([str(rank)])]
        return {rank: Process.from_json(json.loads(self._store.get(str(rank)))) for rank in there}

    def _failed(self, ranks: Sequence[int]) -> dict[int, Failure]:
        if not self._store.check([_ANY_FAILED]):  # one question where all is well
            return {}
        there = [rank for rank in ranks[:_MANY_RANKS] if self._store.check([f"failed{rank}"])]
        return {rank: Failure(**json.loads(self._store.get(f"failed{rank}"))) for rank in there}

    def _waiting(self, ranks: Sequence[int], where: list[str | int]) -> dict[int, Waiting]:
        there = [rank for rank in ranks[:_MANY_RANKS] if self._store.check([f"waits{rank}"])]
        told = {rank: json.loads(self._store.get(f"waits{rank}")) for rank in there}
        return {rank: Waiting(*words[2:]) for rank, words in told.items() if words[:2] == where}

    def _quickly(self, question: Callable[[], Answer]) -> Answer | None:
        """The store's answer, ``None`` if it has none: it may be as gone as the rank that is
        missed.
        """
        try:
            return in_time(question, Wait(_ASKING, min(2.0, timeout_s())))
        except (OutOfTimeError, RuntimeError):
            return None


def answered(question: Callable[[], Answer], wait: Wait, rank: int, what: str = "") -> Answer:
    """The answer of the job's key-value store, which may lie in the process of another rank.

    Raises :class:`DistributedError` where none comes. ``what``: what the ranks do together, for
    messages.
    """
    try:
        return in_time(question, wait)
    except OutOfTimeError:
        why = f"nothing came for {wait.limit_s:g} s"
    except ShardwrightError:
        raise
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    raise DistributedError(
        f"{what}{': ' if what else ''}the job's key-value store does not answer rank {rank}",
        why=why,
        hint="it lies in the process of torchrun, or else of rank 0: look for the first error "
        "there",
    )


def described(rank: int, process: Process | None) -> str:
    """What can be said of a rank, for messages: ``rank 2 (process 4711 on node3) is stopped``."""
    if process is None:
        return f"rank {rank} has not come so far"
    state = process.state()
    return f"rank {rank} ({process})" + (
        f" {state}" if state else " is on another machine, which nothing is known of"
    )


def _machine() -> str:
    """The boot of the kernel and the space of process numbers, where there is /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()}, without /proc"


def _status(pid: int) -> tuple[str, int] | None:
    """The letter of a process's state and when it began, from /proc; ``None`` if it is not
    there.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[19])
