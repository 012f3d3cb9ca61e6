"""The ranks of a job act as one: the first rank does the work, the others wait, and an error reaches all of them.

Ranks exchange short texts through the key-value store behind ``torch.distributed``, not by collectives: a compile may take
longer than a collective's timeout, and a store does not care which device a rank uses.
"""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from shardwright.runtime import errors
from shardwright.runtime.errors import DistributedError, ShardwrightError

Result = TypeVar("Result")

_job_numbers = itertools.count()
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
"""Between two questions to the store, doubling from the first to the longest."""
_CONFIRM_S = 30.0
"""How long rank 0 waits for ranks to read of an error; one that died never will."""


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
        """Called on all ranks: rank 0 goes on when the others have called it, so have read what it sent."""


class WorldExchange:
    """Through the collectives of a world whose ranks are threads of this process."""

    def __init__(self, world: Any) -> None:
        self.rank: int = world.rank
        self.size: int = world.size
        self.broadcast_object = world.broadcast_object
        self.all_gather_object = world.all_gather_object

    def confirm(self) -> None:
        """Nothing to wait for: what rank 0 sent stays when it ends."""


class StoreExchange:
    """Through a key-value store that all ranks see."""

    def __init__(self, store: torch.distributed.distributed_c10d.Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._num_calls = 0

    @classmethod
    def of_process_group(cls) -> StoreExchange:
        """Through the store of the default process group. Every rank makes one per job, in the same order."""
        # The store of the running process group has no public accessor.
        store = dist.distributed_c10d._get_default_store()
        prefix = f"shardwright/job{next(_job_numbers)}"
        return cls(dist.distributed_c10d.PrefixStore(prefix, store), dist.get_rank(), dist.get_world_size())

    def broadcast_object(self, value: Any) -> Any:
        key = self._next_key()
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
        return self._read(key)

    def all_gather_object(self, value: Any) -> list[Any]:
        key = self._next_key()
        if self.rank:
            self._store.set(f"{key}/{self.rank}", json.dumps(value))
            values = None
        else:  # one rank reads all, so that n ranks make n requests and not n * n
            values = [value, *(self._read(f"{key}/{rank}") for rank in range(1, self.size))]
        gathered: list[Any] = self.broadcast_object(values)
        return gathered

    def confirm(self) -> None:
        """The store may live in the process of rank 0, which is about to raise and perhaps to end."""
        key = self._next_key()
        if self.rank:
            self._store.set(f"{key}/{self.rank}", "")
            return
        deadline = time.monotonic() + _CONFIRM_S
        while time.monotonic() < deadline:
            if self._store.check([f"{key}/{rank}" for rank in range(1, self.size)]):
                return
            time.sleep(_FIRST_PAUSE_S)

    def _next_key(self) -> str:
        self._num_calls += 1
        return str(self._num_calls)

    def _read(self, key: str) -> Any:
        # Asking again and again: the store's own wait has a timeout, which torch logs, and does not see Ctrl-C.
        pause_s = _FIRST_PAUSE_S
        while not self._store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return json.loads(self._store.get(key))


class Job:
    """All ranks that call together. ``title`` says what they are about, in errors."""

    def __init__(self, title: str, exchange: Exchange | None = None) -> None:
        self.title = title
        self._exchange = exchange

    @property
    def rank(self) -> int:
        """The number of this rank in the job."""
        return self._exchange.rank if self._exchange else 0

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return self._exchange.size if self._exchange else 1

    def agree(self, **facts: Any) -> None:
        """Raise :class:`DistributedError` on every rank unless all pass equal values."""
        first, *others = self.gather(facts)
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    if self._exchange is not None:
                        self._exchange.confirm()
                    raise DistributedError(
                        f"{self.title}: the ranks ask for different things",
                        why=f"{name} is {value!r} on rank 0, {other[name]!r} on rank {rank}",
                        hint="all ranks make the same calls in the same order",
                    )

    def gather(self, value: Result) -> list[Result]:
        """What every rank passed, by rank."""
        return self._exchange.all_gather_object(value) if self._exchange else [value]

    def first_rank_does(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on rank 0 and return its result, a JSON value, on all ranks. If it raises, all raise."""
        if self._exchange is None:
            return work()
        if self.rank == 0:
            try:
                result = work()
            except BaseException as error:
                self._exchange.broadcast_object({"error": _describe(error)})
                self._exchange.confirm()
                raise
            self._exchange.broadcast_object({"result": result})
            return result
        told = self._exchange.broadcast_object(None)
        if "error" in told:
            self._exchange.confirm()
            raise self._rebuild(told["error"], 0)
        told_result: Result = told["result"]
        return told_result

    def every_rank_does(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on each rank and return this rank's result. If it raises on any rank, all raise."""
        failure: BaseException | None = None
        result: Any = None
        try:
            result = work()
        except BaseException as error:
            if self._exchange is None:
                raise
            failure = error
        told = self.gather(_describe(failure) if failure else None)
        if any(told) and self._exchange is not None:
            self._exchange.confirm()
        if failure is not None:
            raise failure
        for rank, description in enumerate(told):
            if description:
                raise self._rebuild(description, rank)
        done: Result = result
        return done

    def _rebuild(self, description: dict[str, Any], rank: int) -> ShardwrightError:
        """The error of another rank: the same class and text if it was one of ours, else its whole traceback."""
        kind = getattr(errors, description["type"], None)
        if isinstance(kind, type) and issubclass(kind, ShardwrightError) and description["parts"]:
            error = kind(**description["parts"])
        else:
            error = DistributedError(f"{self.title} failed on rank {rank}", why=description["text"])
        error.add_note(f"raised on rank {rank} of {self.size}")
        return error


def _describe(error: BaseException) -> dict[str, Any]:
    parts = None
    if isinstance(error, ShardwrightError):
        parts = {name: getattr(error, name) for name in ("what", "where", "why", "hint")}
    return {"type": type(error).__name__, "parts": parts, "text": "".join(traceback.format_exception(error)).rstrip("\n")}
