"""The ranks of a job act as one: the first rank does the work, the others wait, and an error
reaches all of them.

They talk through an exchange (``runtime/ranks/exchange.py``): a compile may take longer than a
collective's timeout, and which device a rank uses does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from shardwright.runtime.errors import CollectiveError, DistributedError
from shardwright.runtime.ranks.exchange import (
    Exchange,
    StoreExchange,
    WorldExchange,
    describe,
    rebuilt,
)
from shardwright.runtime.ranks.world import world_of_thread

Result = TypeVar("Result")


class Job:
    """All ranks that call together. ``title`` says what they are about, in errors."""

    def __init__(self, title: str, exchange: Exchange | None = None) -> None:
        self.title = title
        self._exchange = exchange
        self._working = exchange.working() if exchange else None

    def __enter__(self) -> Self:
        """Give signs of life inside the ``with`` block, and tell the others of an error that leaves
        it.
        """
        if self._working is not None:
            self._working.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        # Before the signs of life end: the others must hear why, not that this rank fell silent.
        if self._exchange is not None and error is not None:
            self._exchange.leave(error)
        if self._working is not None:
            self._working.__exit__(kind, error, at)

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
        """Run ``work`` on rank 0 and return its result, a JSON value, on all ranks. If it raises,
        all raise.
        """
        if self._exchange is None:
            return work()
        # The first rank tells what came of it, an error too; the others wait for its word.
        if self.rank == 0:
            try:
                result = work()
            except BaseException as error:
                # Interrupts count as well: the others would wait for a result that never comes.
                self._exchange.broadcast_object({"error": describe(error)})
                self._exchange.confirm()
                raise
            self._exchange.broadcast_object({"result": result})
            return result
        told = self._exchange.broadcast_object(None)
        if "error" in told:
            self._exchange.confirm()
            raise rebuilt(told["error"], self.title, 0, self.size)
        told_result: Result = told["result"]
        return told_result

    def every_rank_does(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on each rank and return this rank's result. If it raises on any rank, all
        raise.

        A rank that only missed another one raises the error of that other one.
        """
        failure: BaseException | None = None
        result: Any = None
        try:
            result = work()
        except BaseException as error:
            if self._exchange is None:
                raise
            failure = error
        told = self.gather(describe(failure) if failure else None)
        if any(told) and self._exchange is not None:
            self._exchange.confirm()
        # A rank that fails in a collective mostly fails because another one left it: what made that
        # one leave is what people must read.
        causes = [
            rank for rank, d in enumerate(told) if d and d["type"] != CollectiveError.__name__
        ]
        if failure is not None and not (isinstance(failure, CollectiveError) and causes):
            raise failure
        for rank, description in enumerate(told):
            if description and (rank in causes or not causes):
                raise rebuilt(description, self.title, rank, self.size) from failure
        done: Result = result
        return done


def exchange_about(what: str) -> Exchange | None:
    """How the ranks of the caller talk to each other about ``what``; ``None`` for a single
    process.
    """
    world = world_of_thread()
    if world is not None:
        return WorldExchange(world)
    return (
        StoreExchange.of_process_group(what)
        if dist.is_available() and dist.is_initialized()
        else None
    )
