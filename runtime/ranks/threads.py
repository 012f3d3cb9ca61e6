"""Many ranks in one process: each rank is a thread, collectives are meetings.

``run_ranks(4, fn)`` runs ``fn(rank)`` on four threads, each with a :class:`ThreadWorld` as its
current world. Sums are taken in the order of the ranks, so they are exact, repeatable and identical
on all ranks. What would hang a cluster is an error here: a rank that raises, a rank that ends while
others wait for it, ranks that wait for each other in different collectives, and members of a group
that call different collectives or the same one with different shapes.

Threads take turns (:mod:`~.turns`), so that runs have one order and many small operators do not
fight for the interpreter. What a rank holds does not depend on how fast the others are: a
collective lets go of what members gave as soon as all have joined it, and what is on its way
belongs to no rank, so dispatch modes of theirs do not see it.

The ranks share one device, the CPU or a GPU: ``run_ranks(4, fn, device="cuda")`` runs a plan for
four GPUs on one. Collectives in a backward must meet like those in a forward, so each rank's
backward runs in its own thread. That is autograd's way on the CPU. For a GPU autograd has one
thread that all ranks would share, and it is told not to use it. All ranks compute on the device's
default stream, which orders what one rank writes before another reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, brief
from shardwright.runtime.ranks.hub import Combine, Hub, Meeting, RankAbortedError, in_words
from shardwright.runtime.ranks.late import Waiting
from shardwright.runtime.ranks.messages import MessageTransport, Sending
from shardwright.runtime.ranks.transport import ReduceOp, Transport, Work
from shardwright.runtime.ranks.turns import PATIENCE_S
from shardwright.runtime.ranks.world import World, use_world

Result = TypeVar("Result")


class ThreadTransport:
    """See :class:`~.communicator.Transport`. One per group and rank, as it numbers the group's
    calls.
    """

    def __init__(self, hub: Hub, ranks: tuple[int, ...], rank: int) -> None:
        self._hub = hub
        self._ranks = ranks
        self._index = ranks.index(rank)
        self._of_whom = f"of {in_words(ranks)}"
        self._num_calls = 0

    def all_reduce_(self, x: Tensor, op: ReduceOp) -> None:
        self.start_all_reduce_(x, op).wait()

    def start_all_reduce_(self, x: Tensor, op: ReduceOp) -> Work:
        number, meeting = self._join(
            f"all_reduce({op}, {_describe(x)})", x, lambda given: _reduce(given, op)
        )
        return _ThreadWork(self._hub, meeting, self._index, number, x)

    def all_gather(self, x: Tensor, result: Tensor) -> None:
        self.start_all_gather(x, result).wait()

    def start_all_gather(self, x: Tensor, result: Tensor) -> Work:
        number, meeting = self._join(f"all_gather({_describe(x)})", x, torch.stack)
        return _ThreadWork(self._hub, meeting, self._index, number, result)

    def start_all_gathers(self, xs: list[Tensor], results: list[Tensor]) -> Work:
        number, meeting = self._join(
            f"all_gather({', '.join(map(_describe, xs))})",
            xs,
            lambda given: [torch.stack(rows) for rows in zip(*given, strict=True)],
        )
        return _ThreadWorks(self._hub, meeting, self._index, number, results)

    def reduce_scatters(self, xs: list[Tensor], results: list[Tensor]) -> None:
        sums = self._meet(
            f"reduce_scatter({', '.join(map(_describe, xs))})",
            xs,
            lambda given: [_reduce(list(x), "sum").unbind() for x in zip(*given, strict=True)],
        )
        for result, rows in zip(results, sums, strict=True):
            result.copy_(rows[self._index])

    def reduce_scatter(self, x: Tensor, result: Tensor) -> None:
        rows = self._meet(
            f"reduce_scatter({_describe(x)})", x, lambda given: _reduce(given, "sum").unbind()
        )
        result.copy_(rows[self._index])

    def start_reduce_scatter_(self, x: Tensor, sizes: list[int]) -> Work:
        what = f"reduce_scatter({_describe(x)} as {sizes})"
        number, meeting = self._join(
            what, x, lambda given: torch.split(_reduce(given, "sum"), sizes)
        )
        mine = torch.split(x, sizes)[self._index]
        return _ThreadWork(
            self._hub, meeting, self._index, number, mine, lambda chunks: chunks[self._index]
        )

    def start_all_gather_(self, x: Tensor, sizes: list[int]) -> Work:
        mine = torch.split(x, sizes)[self._index]
        number, meeting = self._join(f"all_gather({_describe(x)} as {sizes})", mine, torch.cat)
        return _ThreadWork(self._hub, meeting, self._index, number, x)

    def all_to_all(
        self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]
    ) -> None:
        self.start_all_to_all(x, send_sizes, result, receive_sizes).wait()

    def start_all_to_all(
        self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]
    ) -> Work:
        assert x.is_contiguous() and result.is_contiguous(), "NCCL sends contiguous tensors only"
        number, meeting = self._join(f"all_to_all({x.dtype})", (x, send_sizes), _exchanged)

        def mine(given: list[tuple[list[int], Tensor]]) -> Tensor:
            sizes, received = given[self._index]
            assert sizes == receive_sizes, (
                f"chunks of {sizes} came in where {receive_sizes} were expected"
            )
            return received

        return _ThreadWork(self._hub, meeting, self._index, number, result, mine)

    def broadcast_(self, x: Tensor, src_index: int) -> None:
        x.copy_(
            self._meet(
                f"broadcast({_describe(x)}, from index {src_index})",
                x,
                lambda given: given[src_index].clone(),
            )
        )

    def send(self, x: Tensor, dst_index: int) -> None:
        self._hub.post((self._ranks, self._index, dst_index), x)

    def receive_(self, x: Tensor, src_index: int) -> None:
        rank, src = self._ranks[self._index], self._ranks[src_index]
        address = (self._ranks, src_index, self._index)
        _take_over(
            x, rank, self._hub.fetch(address, rank, src, f"receive({_describe(x)}) for"), src
        )

    def barrier(self) -> None:
        self._meet("barrier()", None, lambda given: None)

    def finish(self, work: Work, what: Callable[[], Waiting]) -> None:
        work.wait()  # the hub says who waits for whom

    def peers(self) -> str:
        return ""  # the hub says who waits for whom

    def _join(self, what: str, given: Any, combine: Combine) -> tuple[int, Meeting]:
        number = self._num_calls
        self._num_calls += 1
        return number, self._hub.join(
            f"{what} {self._of_whom}", self._ranks, self._index, number, given, combine
        )

    def _meet(self, what: str, given: Any, combine: Combine) -> Any:
        number, meeting = self._join(what, given, combine)
        return self._hub.outcome(meeting, self._index, number)


@dataclass(frozen=True, eq=False)
class _ThreadWork:
    """A collective under way: joined, not yet waited for. ``mine`` takes from its outcome what
    fills ``x``.
    """

    hub: Hub
    meeting: Meeting
    index: int
    number: int
    x: Tensor
    mine: Callable[[Any], Tensor] = lambda outcome: outcome

    def wait(self) -> None:
        self.x.copy_(self.mine(self.hub.outcome(self.meeting, self.index, self.number)))


@dataclass(frozen=True, eq=False)
class _ThreadWorks:
    """A gather of several tensors under way."""

    hub: Hub
    meeting: Meeting
    index: int
    number: int
    results: list[Tensor]

    def wait(self) -> None:
        outcome = self.hub.outcome(self.meeting, self.index, self.number)
        for result, rows in zip(self.results, outcome, strict=True):
            result.copy_(rows)


class ThreadMessages:
    """See ``MessageTransport``."""

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
        received = self.hub.fetch(
            address, self.rank, self.src, f"{self.what} from", is_message=True
        )
        _take_over(self.x, self.rank, received, self.src)


def _take_over(x: Tensor, rank: int, received: Tensor, src: int) -> None:
    """Fill the buffer ``x`` of ``rank`` with what ``src`` sent."""
    assert received.shape == x.shape and received.dtype == x.dtype, (
        f"rank {src} sent {_describe(received)}, rank {rank} expects {_describe(x)}"
    )
    x.copy_(received)


def _reduce(given: list[Tensor], op: ReduceOp) -> Tensor:
    """Combine in the order of the members, so that every rank, and every run, gets the same
    bits.
    """
    result = given[0].clone()
    for x in given[1:]:
        if op == "sum":
            result += x
        else:
            result = torch.maximum(result, x) if op == "max" else torch.minimum(result, x)
    return result


def _exchanged(given: list[tuple[Tensor, list[int]]]) -> list[tuple[list[int], Tensor]]:
    """What each member gets: how long the chunks from all members are, and these end to end."""
    rows = [x.split_with_sizes(sizes) for x, sizes in given]
    return [
        ([len(chunk) for chunk in column], torch.cat(column)) for column in zip(*rows, strict=True)
    ]


_NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _describe(x: Tensor) -> str:
    """What a call sends, as text. What NCCL would refuse to send is refused here too."""
    assert x.is_contiguous(), (
        f"NCCL sends contiguous tensors only, this one of {list(x.shape)} has strides {x.stride()}"
    )
    assert x.dtype not in _NOT_SENT, f"NCCL sends no {x.dtype}"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class ThreadWorld(World):
    """The threads of one :func:`run_ranks`, seen from one."""

    def __init__(self, hub: Hub, rank: int, device: torch.device) -> None:
        super().__init__(rank, hub.num_ranks, device)
        self._hub = hub
        self._made: dict[tuple[int, ...], ThreadTransport] = {}

    @contextmanager
    def working(self) -> Iterator[None]:
        """See :meth:`World.working`. A thread that ends is noticed, so whoever lives is waited
        for.
        """
        with self._hub.turns.lock:
            self._hub.working.add(self.rank)
        try:
            yield
        finally:
            with self._hub.turns.lock:
                self._hub.working.discard(self.rank)

    def _make_transport(
        self, ranks: tuple[int, ...], *, among_members: bool = False
    ) -> Transport | None:
        # One transport for the same ranks, however it was asked for: its calls are numbered.
        if self.rank in ranks and ranks not in self._made:
            self._made[ranks] = ThreadTransport(self._hub, ranks, self.rank)
        return self._made.get(ranks)

    def _make_message_transport(self, channels: Sequence[tuple[int, int]]) -> MessageTransport:
        return ThreadMessages(self._hub, self.rank)


MOST_THREADS = 2**14
"""The most ranks of one process."""


@checked
def run_ranks(
    num_ranks: int,
    fn: Callable[..., Result],
    *args: Any,
    timeout_s: float | None = None,
    device: str | torch.device = "cpu",
) -> list[Result]:
    """Run ``fn(rank, *args)`` on one thread per rank and return the results by rank.

    The first exception of a rank ends all others at their next collective and is raised here, with
    a note that names the rank, and one for each rank that waited for a message then. ``timeout_s``
    bounds how long a rank waits in one collective (default: the limit of all waits, see
    :mod:`~shardwright.runtime.waiting`); compiling may take longer. ``device``: what all ranks hold
    their tensors and compute on, ``"cpu"``, or a GPU as ``"cuda"`` or ``"cuda:1"``.

    Raises :class:`DistributedError` where the ranks' collectives do not fit together, and
    :class:`ConfigError` for a device that this machine does not have.
    """
    shared = shared_device(device)
    if num_ranks > MOST_THREADS:
        raise ConfigError(
            f"num_ranks is at most {MOST_THREADS:,}",
            why=f"it is {brief(num_ranks)}, and each rank is a thread of this process",
        )
    # A mode of fake tensors replaces the guard of CUDA devices where there are none. With torch
    # 2.11 the guard dies with the thread that did so first, and the next one crashes: so that is
    # the thread that outlives the ranks.
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()
    hub = Hub(num_ranks, timeout_s)
    results: list[Any] = [None] * num_ranks

    # Modes of each thread.
    with_grad = torch.is_grad_enabled()
    cast_to = {
        kind: torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    }

    def run(rank: int) -> None:
        hub.turns.begin(rank)
        try:
            with ExitStack() as stack:
                if shared.type == "cuda":
                    torch.cuda.set_device(shared)  # of this thread
                    stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(use_world(ThreadWorld(hub, rank, shared)))
                stack.enter_context(torch.set_grad_enabled(with_grad))
                for kind, dtype in cast_to.items():
                    stack.enter_context(torch.autocast(kind, dtype))
                results[rank] = fn(rank, *args)
        except RankAbortedError:
            pass
        except BaseException as error:
            hub.abort(rank, error)
        finally:
            hub.end(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and hub.failure is None:
                thread.join(PATIENCE_S)
                hub.turns.hurry()
    except BaseException as error:  # Ctrl-C in the calling thread
        hub.abort(None, error)
    if hub.failure is not None:
        for thread in threads:
            # A rank that never reaches a collective is left behind: daemon threads do not keep a
            # process up.
            thread.join(5.0)
        failed_rank, failure = hub.failure
        if failed_rank is not None:
            failure.add_note(f"raised on rank {failed_rank} of {num_ranks}")
            for text in sorted(hub.interrupted):
                failure.add_note(text)
        raise failure
    return results


def shared_device(device: str | torch.device) -> torch.device:
    """The device that ranks share, a GPU with its number.

    Raises :class:`ConfigError` for one that this machine does not have.
    """
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise ConfigError(
            "ranks that are threads run on the CPU or on a GPU of CUDA",
            why=f"device is {brief(str(found))}",
            hint='"cpu", "cuda" or "cuda:1"',
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = found.index
    if index is None:
        index = torch.cuda.current_device() if count else 0
    if index >= count:
        raise ConfigError(
            f"there is no device cuda:{index}",
            why=f"torch {torch.__version__} finds {count} GPU{'' if count == 1 else 's'} here",
            hint='device="cpu" runs the same plans without one',
        )
    return torch.device("cuda", index)
