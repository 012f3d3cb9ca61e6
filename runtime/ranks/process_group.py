"""Communication between processes: a transport over a ``torch.distributed`` process group (gloo or
NCCL).
"""

from __future__ import annotations

import atexit
import inspect
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.dealing import EXCHANGES_UNDER_WAY
from shardwright.runtime.errors import DistributedError
from shardwright.runtime.ranks.failures import first_line
from shardwright.runtime.ranks.late import SLICE, Late, Left, Members, Waiting
from shardwright.runtime.ranks.messages import Sending, lost, undeliverable
from shardwright.runtime.ranks.transport import ReduceOp, Work

# torch 2.13 renamed these two: the old names warn there, the new ones are missing before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _all_reduce_options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


_ALL_REDUCE_OPTIONS = {name: _all_reduce_options(op) for name, op in _REDUCE_OPS.items()}
_ALL_TO_ALL_OPTIONS = dist.AllToAllOptions()
_ALL_TO_ALL_OPTIONS.asyncOp = True
# As newer versions of torch call it, and older ones.
_ALL_TO_ALL = next(
    name for name in ("all_to_all_single", "alltoall_base") if hasattr(dist.ProcessGroup, name)
)

_given_up: list[dist.ProcessGroup] = []
"""Groups with a collective that cannot end. They are kept: taking one down would wait for the
collective, up to its limit.
"""

_holders: weakref.WeakSet[ProcessGroupTransport | ProcessMessages] = weakref.WeakSet()

_WITH_DEFAULT_GROUPS = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
)
"""Modules of torch whose functions have ``group=group.WORLD`` as a default argument: the default
group of the moment at which they are imported, held from then on. Fake tensors and optimizers
import torch._dynamo, and that imports them.
"""

FREEING_S = 0.3
"""How long gloo's threads get to free what the last collectives used, where the user has not
destroyed the groups and there is no waiting for the threads to end. They are done within
microseconds once they run.
"""


@atexit.register
def _let_go() -> None:
    """Drop the process groups before the interpreter ends, so that those that the user has
    destroyed join their threads now.

    A thread of gloo frees the tensors of a collective after the collective is over. One that does
    so while Python is being taken down waits for the interpreter and is ended in the middle of C++
    code, which aborts the process ("terminate called without an active exception").
    """
    if _holders and dist.is_initialized():
        time.sleep(FREEING_S)
    for holder in tuple(_holders):
        holder.let_go()
    for module in filter(None, map(sys.modules.get, _WITH_DEFAULT_GROUPS)):
        for function in filter(inspect.isfunction, vars(module).values()):
            # torch binds the default group as a default argument in some places, which keeps it
            # alive.
            defaults = function.__defaults__ or ()
            if any(isinstance(default, dist.ProcessGroup) for default in defaults):
                function.__defaults__ = tuple(
                    None if isinstance(d, dist.ProcessGroup) else d for d in defaults
                )


Peers = Callable[[], str]


def _end(work: Any, note: str) -> None:
    """Raise what a collective has failed with, if it has. ``note``: to add to it, in words."""
    try:
        work.wait()
    except RuntimeError as error:
        if not note:
            raise
        raise RuntimeError(f"{first_line(error)}; {note}") from error


class ProcessGroupTransport:
    """See ``Transport``. ``device``: where the tensors
    of this rank are.

    ``ranks``: the members, as ranks of the world; ``rank`` is the caller's. ``members``: how they
    are, as far as anything tells. ``num_calls``: how many collectives have begun. With gloo the
    host waits for results, in slices of a second (:mod:`shardwright.runtime.ranks.late`); with NCCL
    the device does.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        rank: int = 0,
        ranks: Sequence[int] = (),
        members: Members | None = None,
        peers: Peers = lambda: "",
    ) -> None:
        self.process_group = process_group
        self.num_calls = 0
        self._device = device
        self._rank, self._ranks, self._members = rank, tuple(ranks), members
        self._exchanges: deque[_AddingRows] = deque()
        self.peers = peers
        _holders.add(self)

    def let_go(self) -> None:
        """Drop the process group; nothing can be sent after that."""
        self.__dict__.pop("process_group", None)

    def finish(self, work: Work, what: Callable[[], Waiting]) -> None:
        """See ``Transport``."""
        is_one = isinstance(work, dist.Work)
        if self._members is not None and self._device.type == "cpu":
            for part in (work,) if is_one else getattr(work, "parts", (work,)):
                self._await(part, self.num_calls, what)
            if is_one:
                return
        work.wait()

    def _await(self, work: Any, number: int, what: Callable[[], Waiting]) -> None:
        """Wait for a collective of gloo, and look how the others are while nothing comes."""
        late: Late | None = None
        # Slice by slice: gloo itself would wait without a look at the others.
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    _end(work, "" if late is None else late.elsewhere)
                    return
            if late is None:
                assert self._members is not None
                late = Late(self._members, self._rank, self._ranks, number, what)
            try:
                late.look()
            except Left:
                _given_up.append(self.process_group)
                raise

    def _run(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Work | None:
        """Run a collective, or begin it where the host waits for its result."""
        if self._is_waited_for_by_host():
            return self._start(collective, *args, **kwargs)  # type: ignore[no-any-return]
        collective(*args, group=self.process_group, **kwargs)
        return None

    def _is_waited_for_by_host(self) -> bool:
        # torch.compile follows what is not asynchronous.
        return self._device.type == "cpu" and not torch.compiler.is_compiling()

    def _start(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return collective(*args, group=self.process_group, async_op=True, **kwargs)

    def all_reduce_(self, x: Tensor, op: ReduceOp) -> Work | None:
        if self._is_waited_for_by_host():
            return self.start_all_reduce_(x, op)
        return self._run(dist.all_reduce, x, _REDUCE_OPS[op])

    def start_all_reduce_(self, x: Tensor, op: ReduceOp) -> Work:
        # torch's function around the method looks at its arguments once more, which costs more
        # than what is left of a small message.
        if x.is_complex():
            x = torch.view_as_real(x)
        self.num_calls += 1
        return self.process_group.allreduce([x], _ALL_REDUCE_OPTIONS[op])

    def all_gather(self, x: Tensor, result: Tensor) -> Work | None:
        return self._run(_all_gather_single, result.view(-1), x)

    def start_all_gather(self, x: Tensor, result: Tensor) -> Work:
        return self._start(_all_gather_single, result.view(-1), x)  # type: ignore[no-any-return]

    def start_all_gathers(self, xs: list[Tensor], results: list[Tensor]) -> Work:
        outputs = [result.view(-1) for result in results]
        self.num_calls += 1
        group: Any = self.process_group
        # One kernel of NCCL, which writes every result in its place; one message of gloo.
        gather = getattr(group, "all_gather_single_coalesced", None)
        return (gather or group.allgather_into_tensor_coalesced)(outputs, xs)  # type: ignore[no-any-return]

    def reduce_scatters(self, xs: list[Tensor], results: list[Tensor]) -> Work | None:
        if xs[0].device.type != "cpu":
            self.num_calls += 1
            group: Any = self.process_group
            scatter = getattr(group, "reduce_scatter_single_coalesced", None)
            work = (scatter or group.reduce_scatter_tensor_coalesced)(
                list(map(_real, results)), [_real(x.view(-1)) for x in xs]
            )
            work.wait()
            return None
        # A flat buffer on the way there and back: see ``_exchange_rows``.
        sizes = [result.numel() for result in results]
        result = torch.empty(sum(sizes), dtype=xs[0].dtype)
        parting = _Parting(self.reduce_scatter(torch.cat(xs, 1), result), result, results)
        if parting.parts:
            return parting
        parting.part()
        return None

    def reduce_scatter(self, x: Tensor, result: Tensor) -> Work | None:
        if x.device.type != "cpu":
            return self._run(_reduce_scatter_single, _real(result), _real(x.view(-1)))
        rows = torch.empty_like(x)  # as in _exchange_rows
        work = self._run(dist.all_to_all_single, rows.view(-1), x.view(-1))
        adding = _AddingRows(work, rows, x, result)
        if work is not None:
            return adding
        adding.add()
        return None

    def start_reduce_scatter_(self, x: Tensor, sizes: list[int]) -> Work:
        mine = torch.split(x, sizes)[dist.get_rank(self.process_group)]
        if x.device.type == "cpu" or len(set(sizes)) > 1:
            return self._exchange_rows(x, sizes, mine)
        # NCCL works in place where the result is the rank's own chunk.
        return self._start(_reduce_scatter_single, _real(mine), _real(x))  # type: ignore[no-any-return]

    def _exchange_rows(self, x: Tensor, sizes: list[int], result: Tensor) -> Work:
        # Gloo's own reduce-scatter is an all-reduce of everything. Exchanging the rows and adding
        # here sends half as much, takes about half the time, and sums in rank order.
        while len(self._exchanges) >= EXCHANGES_UNDER_WAY:
            self._exchanges.popleft().wait()
        size = result.numel()
        rows = x.new_empty(len(sizes), size)
        work = self._start(dist.all_to_all_single, rows.view(-1), x, [size] * len(sizes), sizes)
        self._exchanges.append(_AddingRows(work, rows, x, result))
        return self._exchanges[-1]

    def start_all_gather_(self, x: Tensor, sizes: list[int]) -> Work:
        chunks = torch.split(x, sizes)
        # Gloo's own all-gather works in a buffer as large as the result, and takes longer than
        # everyone's broadcast.
        if x.device.type != "cpu" and len(set(sizes)) == 1:
            mine = chunks[dist.get_rank(self.process_group)]
            return self._start(_all_gather_single, x, mine)  # type: ignore[no-any-return]
        works = [
            self._start(dist.broadcast, chunk, group_src=index)
            for index, chunk in enumerate(chunks)
            if chunk.numel()
        ]
        return _All(works)

    def all_to_all(
        self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]
    ) -> Work | None:
        if self._is_waited_for_by_host():
            return self.start_all_to_all(x, send_sizes, result, receive_sizes)
        return self._run(dist.all_to_all_single, result, x, receive_sizes, send_sizes)

    def start_all_to_all(
        self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]
    ) -> Work:
        if x.is_complex():
            x, result = torch.view_as_real(x), torch.view_as_real(result)
        self.num_calls += 1
        exchange = getattr(self.process_group, _ALL_TO_ALL)
        return exchange(result, x, receive_sizes, send_sizes, _ALL_TO_ALL_OPTIONS)  # type: ignore[no-any-return]

    def broadcast_(self, x: Tensor, src_index: int) -> Work | None:
        return self._run(dist.broadcast, x, group_src=src_index)

    def send(self, x: Tensor, dst_index: int) -> None:
        dist.send(x, group=self.process_group, group_dst=dst_index)

    def receive_(self, x: Tensor, src_index: int) -> None:
        dist.recv(x, group=self.process_group, group_src=src_index)

    def barrier(self) -> Work | None:
        # NCCL's is a collective on a GPU, and guesses which one if it is not told.
        device_ids = [self._device.index] if self._device.type == "cuda" else None
        return self._run(dist.barrier, device_ids=device_ids)


def _real(x: Tensor) -> Tensor:
    """A tensor's memory as real numbers. NCCL knows no others, and torch sees to that in all
    collectives but reduce-scatter.
    """
    return torch.view_as_real(x).view(-1) if x.is_complex() else x


class _AddingRows:
    """Adds the rows that came from all members once they are there. Until then it keeps the tensor
    that is being sent alive.

    ``parts``: what has to be complete before.
    """

    def __init__(self, work: Any, rows: Tensor, sent: Tensor, result: Tensor) -> None:
        self.parts: tuple[Any, ...] = (work,)
        self._under_way: tuple[Tensor, Tensor, Tensor] | None = (rows, sent, result)

    def wait(self) -> None:
        if self._under_way is not None:
            self.parts[0].wait()
            self.add()

    def add(self) -> None:
        """Add what has come."""
        assert self._under_way is not None
        rows, _, result = self._under_way
        torch.sum(rows, 0, dtype=result.dtype, out=result)
        self.parts, self._under_way = (), None


class _Parting:
    """Parts the flat result of a collective into ``results`` once it is there. ``parts``: what has
    to be complete before.
    """

    def __init__(self, work: Any, flat: Tensor, results: list[Tensor]) -> None:
        self._work, self._flat, self._results = work, flat, results
        self.parts: tuple[Any, ...] = () if work is None else work.parts

    def wait(self) -> None:
        self._work.wait()
        self.part()

    def part(self) -> None:
        """Part what is there."""
        lengths = [result.numel() for result in self._results]
        for result, part in zip(self._results, torch.split(self._flat, lengths), strict=True):
            result.copy_(part)


class _All:
    """Several collectives under way: ``parts``."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def wait(self) -> None:
        for work in self.parts:
            work.wait()


_NUM_TAGS = 2**30
"""Tags are 32-bit; that many messages of one channel are never under way at once."""


class ProcessMessages:
    """See ``MessageTransport``.

    ``groups``: a process group for each channel ``(sender, receiver)`` of this rank. Gloo tells
    messages by their tag, so one group may serve all channels. NCCL ignores tags and runs the calls
    of one group in order, so there each channel needs a group of its own: then neither end waits
    for what the other one has not started yet. ``peers``: says how ranks are, when something has
    failed.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[tuple[int, int], dist.ProcessGroup],
        peers: Callable[[Sequence[int]], str] = lambda ranks: "",
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._groups = groups
        _holders.add(self)

    def let_go(self) -> None:
        """Drop the process groups; nothing can be sent after that."""
        self._groups = {}

    def start_send(self, x: Tensor, dst: int, number: int, what: str) -> Sending:
        try:
            work = dist.isend(x, dst, self._groups[self._rank, dst], tag=number % _NUM_TAGS)
        except RuntimeError as error:
            raise undeliverable(self._rank, what, dst, self._why(error, dst)) from error
        return _ProcessWork(
            work, x, lambda error: undeliverable(self._rank, what, dst, self._why(error, dst))
        )

    def start_receive_(self, x: Tensor, src: int, number: int, what: str) -> Work:
        try:
            work = dist.irecv(x, src, self._groups[src, self._rank], tag=number % _NUM_TAGS)
        except RuntimeError as error:
            raise lost(self._rank, what, src, self._why(error, src)) from error
        return _ProcessWork(
            work, x, lambda error: lost(self._rank, what, src, self._why(error, src))
        )

    def _why(self, error: RuntimeError, peer: int) -> str:
        return "; ".join(filter(None, (first_line(error), self._peers([peer]))))


class _ProcessWork:
    """A message under way. It keeps the tensor alive, and names who waits when it fails."""

    def __init__(
        self, work: Any, x: Tensor, failure: Callable[[RuntimeError], DistributedError]
    ) -> None:
        self._work, self._x, self._failure = work, x, failure

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
