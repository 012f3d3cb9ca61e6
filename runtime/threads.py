"""Many ranks in one process: each rank is a thread, collectives are meetings.

``run_ranks(4, fn)`` runs ``fn(rank)`` on four threads, each with a :class:`ThreadWorld` as its current world. Sums are taken
in the order of the ranks, so they are exact, repeatable and identical on all ranks. What would hang a cluster is an error
here: a rank that raises, a rank that ends while others wait for it, ranks that wait for each other in different collectives,
and members of a group that call different collectives or the same one with different shapes.

What a rank holds does not depend on how fast the others are: a collective lets go of what members gave as soon as all have
joined it, and what is on its way belongs to no rank, so dispatch modes of theirs do not see it (:func:`_on_its_way`).

CPU only: autograd runs a CPU backward in the thread that called it, so collectives in a backward meet like those in a
forward; a CUDA device has one backward thread for all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.runtime.communicator import ReduceOp, Transport, Work
from shardwright.runtime.errors import DistributedError
from shardwright.runtime.messages import MessageTransport, Sending
from shardwright.runtime.world import World, use_world

Result = TypeVar("Result")

Combine = Callable[[list[Any]], Any]
"""Makes what a collective yields from what the members gave, by index; it keeps none of that."""


class _RankAbortedError(Exception):
    """Ends a rank because another one failed; :func:`run_ranks` raises the other's exception."""


@dataclass(eq=False)
class _Meeting:
    """One collective call of one group."""

    what: str  # the collective, its group and its shapes: must be the same on all members
    ranks: tuple[int, ...]
    combine: Combine
    given: dict[int, Any] = field(default_factory=dict)  # by index; no tensors any more once it is done
    outcome: Any = None
    done: bool = False
    num_left: int = 0

    def missing(self) -> set[int]:
        return {rank for index, rank in enumerate(self.ranks) if index not in self.given}


@dataclass(eq=False)
class _Waiting:
    """What a blocked rank waits for."""

    what: str  # the call it waits in, up to the ranks it waits for
    ready: Callable[[], bool]
    missing: Callable[[], set[int]]
    is_message: bool = False


class Hub:
    """Where the ranks of one :func:`run_ranks` meet. All its state is guarded by one lock."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._mail: dict[Hashable, deque[Tensor]] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._ended: set[int] = set()
        self.failure: tuple[int | None, BaseException] | None = None
        self.interrupted: list[str] = []  # who waited for a message when some rank failed

    def join(self, what: str, ranks: tuple[int, ...], index: int, number: int, given: Any, combine: Combine) -> _Meeting:
        """Give the part of member ``index`` to the group's call ``number``; the last one to join computes the outcome."""
        with self._changed:
            self._raise_if_aborted()
            meeting = self._meetings.setdefault((ranks, number), _Meeting(what, ranks, combine))
            if meeting.what != what:
                others = sorted(meeting.ranks[i] for i in meeting.given)
                raise DistributedError(
                    f"the ranks {list(ranks)} disagree about their collective call {number}",
                    why=f"rank {ranks[index]} calls {what}, but {_ranks(others)} called {meeting.what}",
                )
            meeting.given[index] = given
            if len(meeting.given) == len(ranks):
                with _on_its_way():
                    meeting.outcome = combine([meeting.given[i] for i in range(len(ranks))])
                meeting.given = dict.fromkeys(meeting.given)
                meeting.done, meeting.num_left = True, len(ranks)
                self._changed.notify_all()
            return meeting

    def outcome(self, meeting: _Meeting, index: int, number: int) -> Any:
        """Wait for the outcome of a meeting. It is shared by all members: copy it."""
        with self._changed:
            self._wait(meeting.ranks[index], _Waiting(f"{meeting.what} for", lambda: meeting.done, meeting.missing))
            meeting.num_left -= 1
            if meeting.num_left == 0:
                del self._meetings[meeting.ranks, number]
            return meeting.outcome

    def post(self, address: Hashable, x: Tensor) -> None:
        """Put a copy of a tensor into a mailbox, behind those that are there."""
        with _on_its_way():
            x = x.clone()
        with self._changed:
            self._mail.setdefault(address, deque()).append(x)
            self._changed.notify_all()

    def fetch(self, address: Hashable, rank: int, src: int, what: str, *, is_message: bool = False) -> Tensor:
        """Wait, as ``rank``, for the next tensor that rank ``src`` posts to a mailbox. ``what``: the call, up to "rank 3"."""
        with self._changed:
            box = self._mail.setdefault(address, deque())
            self._wait(rank, _Waiting(what, lambda: bool(box), lambda: {src}, is_message))
            x = box.popleft()
            if not box:
                del self._mail[address]
            return x

    def end(self, rank: int) -> None:
        """``rank`` has returned and joins no further call."""
        with self._changed:
            self._ended.add(rank)
            self._find_stuck()

    def abort(self, rank: int | None, error: BaseException) -> None:
        """Wake all ranks and end them. Only the first call counts; ``rank`` is ``None`` where no single one is to blame."""
        with self._changed:
            if self.failure is None:
                self.failure = (rank, error)
            self._changed.notify_all()

    def _raise_if_aborted(self) -> None:
        if self.failure is not None:
            raise _RankAbortedError

    def _wait(self, rank: int, waiting: _Waiting) -> None:
        self._waiting[rank] = waiting
        try:
            while not waiting.ready():
                self._raise_if_aborted()
                self._find_stuck()
                if self.failure is None and not self._changed.wait(self._timeout_s):
                    late = f"ranks have waited {self._timeout_s:g} s in a collective"
                    self.abort(None, DistributedError(late, why=self._who_waits()))
        except _RankAbortedError:
            if waiting.is_message:
                self.interrupted.append(_waits(rank, waiting))
            raise
        finally:
            del self._waiting[rank]

    def _find_stuck(self) -> None:
        """Abort if some rank waits for one that has ended, or all wait for each other."""
        blocked = {rank: waiting for rank, waiting in self._waiting.items() if not waiting.ready()}
        gone = sorted(set().union(*(waiting.missing() for waiting in blocked.values())) & self._ended)
        if gone:
            self.abort(None, DistributedError(f"{_ranks(gone)} ended while others wait for it", why=self._who_waits()))
        elif len(blocked) + len(self._ended) == self.num_ranks and blocked:
            self.abort(None, DistributedError("the ranks wait for each other", why=self._who_waits()))

    def _who_waits(self) -> str:
        return "; ".join(_waits(rank, waiting) for rank, waiting in sorted(self._waiting.items()) if not waiting.ready())


def _on_its_way() -> AbstractContextManager[object]:
    """Where a copy is made that lies between the ranks, in the thread of whichever comes last: a dispatch mode of that rank
    (one that counts the bytes alive, say) must not take it for its own.
    """
    return _disable_current_modes()


def _waits(rank: int, waiting: _Waiting) -> str:
    return f"rank {rank} waits in {waiting.what} {_ranks(sorted(waiting.missing()))}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class ThreadTransport:
    """See :class:`~shardwright.runtime.communicator.Transport`. One per group and rank, as it numbers the group's calls."""

    def __init__(self, hub: Hub, ranks: tuple[int, ...], rank: int) -> None:
        self._hub = hub
        self._ranks = ranks
        self._index = ranks.index(rank)
        self._num_calls = 0

    def all_reduce_(self, x: Tensor, op: ReduceOp) -> None:
        self.start_all_reduce_(x, op).wait()

    def start_all_reduce_(self, x: Tensor, op: ReduceOp) -> Work:
        number, meeting = self._join(f"all_reduce({op}, {_describe(x)})", x, lambda given: _reduce(given, op))
        return _ThreadWork(self._hub, meeting, self._index, number, x)

    def all_gather(self, x: Tensor, result: Tensor) -> None:
        self.start_all_gather(x, result).wait()

    def start_all_gather(self, x: Tensor, result: Tensor) -> Work:
        number, meeting = self._join(f"all_gather({_describe(x)})", x, torch.stack)
        return _ThreadWork(self._hub, meeting, self._index, number, result)

    def reduce_scatter(self, x: Tensor, result: Tensor) -> None:
        rows = self._meet(f"reduce_scatter({_describe(x)})", x, lambda given: _reduce(given, "sum").unbind())
        result.copy_(rows[self._index])

    def start_reduce_scatter_(self, x: Tensor, sizes: list[int]) -> Work:
        what = f"reduce_scatter({_describe(x)} as {sizes})"
        number, meeting = self._join(what, x, lambda given: torch.split(_reduce(given, "sum"), sizes))
        mine = torch.split(x, sizes)[self._index]
        return _ThreadWork(self._hub, meeting, self._index, number, mine, lambda chunks: chunks[self._index])

    def start_all_gather_(self, x: Tensor, sizes: list[int]) -> Work:
        mine = torch.split(x, sizes)[self._index]
        number, meeting = self._join(f"all_gather({_describe(x)} as {sizes})", mine, torch.cat)
        return _ThreadWork(self._hub, meeting, self._index, number, x)

    def all_to_all(self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]) -> None:
        assert x.is_contiguous() and result.is_contiguous(), "NCCL sends contiguous tensors only"
        table = self._meet(f"all_to_all({x.dtype})", torch.split(x, send_sizes), _copied)
        for size, target, row in zip(receive_sizes, torch.split(result, receive_sizes), table, strict=True):
            chunk = row[self._index]
            assert chunk.numel() == size, f"{chunk.numel()} elements came in where {size} were expected"
            target.copy_(chunk)

    def broadcast_(self, x: Tensor, src_index: int) -> None:
        x.copy_(self._meet(f"broadcast({_describe(x)}, from index {src_index})", x, lambda given: given[src_index].clone()))

    def send(self, x: Tensor, dst_index: int) -> None:
        self._hub.post((self._ranks, self._index, dst_index), x)

    def receive_(self, x: Tensor, src_index: int) -> None:
        rank, src = self._ranks[self._index], self._ranks[src_index]
        address = (self._ranks, src_index, self._index)
        _take_over(x, rank, self._hub.fetch(address, rank, src, f"receive({_describe(x)}) for"), src)

    def barrier(self) -> None:
        self._meet("barrier()", None, lambda given: None)

    def _join(self, what: str, given: Any, combine: Combine) -> tuple[int, _Meeting]:
        number = self._num_calls
        self._num_calls += 1
        what = f"{what} of {_ranks(self._ranks)}"
        return number, self._hub.join(what, self._ranks, self._index, number, given, combine)

    def _meet(self, what: str, given: Any, combine: Combine) -> Any:
        number, meeting = self._join(what, given, combine)
        return self._hub.outcome(meeting, self._index, number)


@dataclass(frozen=True, eq=False)
class _ThreadWork:
    """A collective under way: joined, not yet waited for. ``mine`` takes from its outcome what fills ``x``."""

    hub: Hub
    meeting: _Meeting
    index: int
    number: int
    x: Tensor
    mine: Callable[[Any], Tensor] = lambda outcome: outcome

    def wait(self) -> None:
        self.x.copy_(self.mine(self.hub.outcome(self.meeting, self.index, self.number)))


class ThreadMessages:
    """See :class:`~shardwright.runtime.messages.MessageTransport`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    def start_send(self, x: Tensor, dst: int, number: int, what: str) -> Sending:
        self._hub.post((self._rank, dst, number), x)
        return _Posted()

    def start_receive_(self, x: Tensor, src: int, number: int, what: str) -> Work:
        return _Expected(self._hub, x, self._rank, src, number, what)


class _Posted:
    """A message in its mailbox: the sender is done with it."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class _Expected:
    """A message that rank ``src`` will send, or has sent."""

    hub: Hub
    x: Tensor
    rank: int
    src: int
    number: int
    what: str

    def wait(self) -> None:
        address = (self.src, self.rank, self.number)
        received = self.hub.fetch(address, self.rank, self.src, f"{self.what} from", is_message=True)
        _take_over(self.x, self.rank, received, self.src)


def _take_over(x: Tensor, rank: int, received: Tensor, src: int) -> None:
    """Fill the buffer ``x`` of ``rank`` with what ``src`` sent."""
    assert received.shape == x.shape and received.dtype == x.dtype, (
        f"rank {src} sent {_describe(received)}, rank {rank} expects {_describe(x)}"
    )
    x.copy_(received)


def _reduce(given: list[Tensor], op: ReduceOp) -> Tensor:
    """Combine in the order of the members, so that every rank, and every run, gets the same bits."""
    result = given[0].clone()
    for x in given[1:]:
        if op == "sum":
            result += x
        else:
            result = torch.maximum(result, x) if op == "max" else torch.minimum(result, x)
    return result


def _copied(given: list[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[chunk.clone() for chunk in row] for row in given]


_NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _describe(x: Tensor) -> str:
    """What a call sends, as text. What NCCL would refuse to send is refused here too."""
    assert x.is_contiguous(), f"NCCL sends contiguous tensors only, this one of {list(x.shape)} has strides {x.stride()}"
    assert x.dtype not in _NOT_SENT, f"NCCL sends no {x.dtype}"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class ThreadWorld(World):
    """The threads of one :func:`run_ranks`, seen from one."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(rank, hub.num_ranks, torch.device("cpu"))
        self._hub = hub

    def _make_transport(self, ranks: tuple[int, ...]) -> Transport | None:
        return ThreadTransport(self._hub, ranks, self.rank) if self.rank in ranks else None

    def _make_message_transport(self, channels: Sequence[tuple[int, int]]) -> MessageTransport:
        return ThreadMessages(self._hub, self.rank)


def run_ranks(num_ranks: int, fn: Callable[..., Result], *args: Any, timeout_s: float = 300.0) -> list[Result]:
    """Run ``fn(rank, *args)`` on one thread per rank and return the results by rank.

    The first exception of a rank ends all others at their next collective and is raised here, with a note that names the
    rank, and one for each rank that waited for a message then. ``timeout_s`` bounds how long a rank waits in one collective.

    Raises :class:`DistributedError` where the ranks' collectives do not fit together.
    """
    hub = Hub(num_ranks, timeout_s)
    results: list[Any] = [None] * num_ranks

    # Modes of each thread.
    with_grad = torch.is_grad_enabled()
    cast_to = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}

    def run(rank: int) -> None:
        try:
            with ExitStack() as stack:
                stack.enter_context(use_world(ThreadWorld(hub, rank)))
                stack.enter_context(torch.set_grad_enabled(with_grad))
                for kind, dtype in cast_to.items():
                    stack.enter_context(torch.autocast(kind, dtype))
                results[rank] = fn(rank, *args)
        except _RankAbortedError:
            pass
        except BaseException as error:
            hub.abort(rank, error)
        finally:
            hub.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and hub.failure is None:
                thread.join(0.05)
    except BaseException as error:  # Ctrl-C in the calling thread
        hub.abort(None, error)
    if hub.failure is not None:
        for thread in threads:
            thread.join(5.0)  # a rank that never reaches a collective is left behind: daemon threads do not keep a process up
        failed_rank, failure = hub.failure
        if failed_rank is not None:
            failure.add_note(f"raised on rank {failed_rank} of {num_ranks}")
            for text in sorted(hub.interrupted):
                failure.add_note(text)
        raise failure
    return results
