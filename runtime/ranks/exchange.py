"""Exchanges: how ranks tell each other short texts while some of them work, however long that
takes.

Collectives have a time limit, which work that takes long would exceed. So ranks that are processes
go through the key-value store behind ``torch.distributed``, and give signs of life while they work.
A rank that lives is waited for; one that is gone, stopped or out of reach is given up, by name.
"""

from __future__ import annotations

import itertools
import json
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from shardwright.runtime import errors
from shardwright.runtime.errors import DistributedError, ShardwrightError
from shardwright.runtime.ranks.late import key_of
from shardwright.runtime.ranks.processes import Process, answered, described
from shardwright.runtime.waiting import LIMIT_HINT, Pulse, Wait, in_time, timeout_s

Answer = TypeVar("Answer")

_numbers = itertools.count()
_numbers_of_members: Counter[tuple[int, ...]] = Counter()
_LOOK_S = 0.5
"""How long a rank waits before it looks how the one that it waits for is, and between two such
looks, at most.
"""
CONFIRM_S = 30.0
"""How long rank 0 waits at most for ranks to read of an error."""


class Exchange(Protocol):
    """How ranks tell each other JSON values."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def broadcast_object(self, value: Any) -> Any:
        """What rank 0 passed, on every rank."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank passed, by rank."""

    def confirm(self) -> None:
        """Called on all ranks: rank 0 goes on when the others have called it, so have read what it
        sent.
        """

    def working(self) -> AbstractContextManager[object]:
        """Around work that takes its time: the others wait for this rank as long as it lives."""

    def leave(self, error: BaseException) -> None:
        """Take no further part: whoever waits for this rank is told why."""


class WorldExchange:
    """Through the collectives of a world whose ranks are threads of this process: none of them is
    gone unnoticed.
    """

    def __init__(self, world: Any) -> None:
        self.rank: int = world.rank
        self.size: int = world.size
        self.broadcast_object = world.broadcast_object
        self.all_gather_object = world.all_gather_object
        self.working = world.working

    def confirm(self) -> None:
        """Nothing to wait for: what rank 0 sent stays when it ends."""

    def leave(self, error: BaseException) -> None:
        """Nothing to tell: an error of one thread ends all."""


class StoreExchange:
    """Through a key-value store that all ranks see.

    ``rank``, ``size``: the caller's position among those that take part, and how many they are.
    ``what``: what they do together, for messages. ``numbers``: how messages call them, if they are
    not all ranks of the world.
    """

    def __init__(
        self,
        store: dist.distributed_c10d.Store,
        rank: int,
        size: int,
        what: str,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.what = what
        self._numbers = numbers or range(size)
        self._store = store
        self._process = Process.own()
        self._num_calls = 0
        self._outdated: list[str] = []

    @classmethod
    def of_process_group(cls, what: str) -> StoreExchange:
        """Through the store of the default process group. All ranks make theirs in the same
        order.
        """
        # The store of the running process group has no public accessor.
        store = dist.distributed_c10d._get_default_store()
        prefix = f"shardwright/exchange{next(_numbers)}"
        return cls(
            dist.distributed_c10d.PrefixStore(prefix, store),
            dist.get_rank(),
            dist.get_world_size(),
            what,
        )

    @classmethod
    def of_members(cls, ranks: tuple[int, ...], what: str) -> StoreExchange:
        """Through the same store, of some ranks only, which make theirs in the same order."""
        number = _numbers_of_members[ranks]
        _numbers_of_members[ranks] += 1
        return cls(
            dist.distributed_c10d.PrefixStore(
                f"shardwright/exchange{number}/{key_of(ranks)}",
                dist.distributed_c10d._get_default_store(),
            ),
            ranks.index(dist.get_rank()),
            len(ranks),
            what,
            ranks,
        )

    def broadcast_object(self, value: Any) -> Any:
        key = self._next_key()
        if self.rank:
            return self._read(key, 0)
        self._set(key, value)
        self._outdated.append(key)
        return json.loads(json.dumps(value))

    def all_gather_object(self, value: Any) -> list[Any]:
        key = self._next_key()
        values: list[Any] | None = None
        if self.rank:
            self._set(f"{key}/{self.rank}", value)
        else:  # one rank reads all, so that n ranks make n requests and not n * n
            values = [value, *(self._read(f"{key}/{rank}", rank) for rank in range(1, self.size))]
            # Everybody has come here, so has read what was told before.
            outdated, self._outdated = self._outdated, []
            self._forget([*outdated, *(f"{key}/{rank}" for rank in range(1, self.size))])
        gathered: list[Any] = self.broadcast_object(values)
        return gathered

    def confirm(self) -> None:
        """The store may live in the process of rank 0, which is about to raise and perhaps to
        end.
        """
        key = self._next_key()
        if self.rank:
            self._set(f"{key}/{self.rank}", None)
            return
        wait = Wait(
            "rank 0 waits for the other ranks to read of an error", min(CONFIRM_S, timeout_s())
        )
        # Not for ever: a rank that is gone never reads anything.
        missing = set(range(1, self.size))
        while missing:
            missing -= self._ask(partial(self._done_with, key, tuple(missing)), wait)
            if missing and not wait.pause():
                return

    def working(self) -> AbstractContextManager[object]:
        """See :meth:`Exchange.working`."""
        return Pulse(self._beat)

    def leave(self, error: BaseException) -> None:
        """See :meth:`Exchange.leave`. An error on the way is not told: the caller has one
        already.
        """
        try:
            in_time(
                lambda: self._store.set(f"left/{self.rank}", json.dumps(describe(error))),
                Wait("", min(5.0, timeout_s())),
            )
        except Exception:
            # The store may be gone. This rank ends with an error of its own already, which stands.
            return

    def _beat(self, number: int) -> None:
        # Called in a thread, and for the first time where that may block.
        text = json.dumps([number, self._process.to_json()])
        if number:
            self._store.set(f"alive/{self.rank}", text)
        else:
            self._ask(
                lambda: self._store.set(f"alive/{self.rank}", text),
                Wait(f"rank {self._number} waits for the job's store"),
            )

    @property
    def _number(self) -> int:
        return self._numbers[self.rank]

    def _next_key(self) -> str:
        self._num_calls += 1
        return str(self._num_calls)

    def _set(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        self._ask(
            lambda: self._store.set(key, text),
            Wait(f"rank {self._number} waits for the job's store: {self.what}"),
        )

    def _forget(self, keys: Sequence[str]) -> None:
        def delete() -> None:
            for key in keys:
                self._store.delete_key(key)

        self._ask(delete, Wait(f"rank {self._number} waits for the job's store: {self.what}"))

    def _read(self, key: str, src: int) -> Any:
        """What rank ``src`` puts under a key, once it is there."""
        # Asking again and again: the store's own wait has a timeout, which torch logs, and does not
        # see Ctrl-C.
        wait, looked_s, process = (
            Wait(f"rank {self._number} waits for rank {self._numbers[src]}: {self.what}"),
            0.0,
            None,
        )
        while not self._ask(lambda: self._store.check([key]), wait):
            if wait.waited_s >= looked_s + min(_LOOK_S, wait.limit_s / 8):
                looked_s = wait.waited_s
                sign, process = self._ask(lambda: self._look(src), wait)
                wait.heard(sign)
                if process is not None and process.state() == "is gone":
                    if self._ask(lambda: self._store.check([key]), wait):
                        break  # told before it ended
                    raise self._given_up(wait, src, process)
            if not wait.pause(f"; {described(self._numbers[src], process)}"):
                raise self._given_up(wait, src, process)
        return json.loads(self._ask(lambda: self._store.get(key), wait))

    def _look(self, rank: int) -> tuple[str | None, Process | None]:
        """The last sign of life of a rank, and its process. Raises the error with which the rank
        has left.
        """
        if self._store.check([f"left/{rank}"]):
            left = json.loads(self._store.get(f"left/{rank}"))
            raise rebuilt(left, self.what, self._numbers[rank], self.size)
        if not self._store.check([f"alive/{rank}"]):
            return None, None
        sign = self._store.get(f"alive/{rank}").decode()
        return sign, Process.from_json(json.loads(sign)[1])

    def _done_with(self, key: str, ranks: Sequence[int]) -> set[int]:
        """The ranks that have confirmed, or never will."""
        done = set()
        for rank in ranks:
            if self._store.check([f"{key}/{rank}"]) or self._store.check([f"left/{rank}"]):
                done.add(rank)
            elif self._store.check([f"alive/{rank}"]):
                process = Process.from_json(json.loads(self._store.get(f"alive/{rank}"))[1])
                done |= {rank} if process.state() == "is gone" else set()
        return done

    def _ask(self, question: Callable[[], Answer], wait: Wait) -> Answer:
        return answered(question, wait, self._number, self.what)

    def _given_up(self, wait: Wait, src: int, process: Process | None) -> DistributedError:
        more = (
            f"; `kill -CONT {process.pid}` lets it go on"
            if process and process.state() == "is stopped"
            else ""
        )
        missed = self._numbers[src]
        return DistributedError(
            f"{self.what}: rank {self._number} has waited {wait.waited_s:.0f} s for rank {missed}, "
            "and nothing has come",
            why=described(missed, process),
            hint=f"look for the first error of rank {missed}{more}; {LIMIT_HINT}",
        )


def describe(error: BaseException) -> dict[str, Any]:
    """An error as a JSON value, for :func:`rebuilt`."""
    # Our own errors are made again in parts, so that they print as they do here; others as text.
    parts = None
    if isinstance(error, ShardwrightError):
        parts = {name: getattr(error, name) for name in ("what", "where", "why", "hint")}
    text = "".join(traceback.format_exception(error)).rstrip("\n")
    notes = list(getattr(error, "__notes__", ()))
    return {
        "type": type(error).__name__,
        "parts": parts,
        "text": text,
        "notes": notes,
        "is_caused": error.__cause__ is not None,
    }


def rebuilt(description: dict[str, Any], what: str, rank: int, size: int) -> ShardwrightError:
    """The error of another rank: the same class and text if it was one of ours, else its whole
    traceback.
    """
    kind = getattr(errors, description["type"], None)
    if isinstance(kind, type) and issubclass(kind, ShardwrightError) and description["parts"]:
        error = kind(**description["parts"])
        for note in description["notes"]:
            error.add_note(note)
        if description["is_caused"]:  # the error may refer to what it was raised from
            error.add_note(description["text"])
    else:
        error = DistributedError(f"{what} failed on rank {rank}", why=description["text"])
    error.add_note(f"raised on rank {rank} of {size}")
    return error
