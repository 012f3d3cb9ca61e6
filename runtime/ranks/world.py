"""The world: all ranks of one run, seen from one of them.

Three kinds: :class:`SoloWorld` (one process, nothing initialised), :class:`DistributedWorld`
(``torch.distributed``, one process per rank) and :class:`~.threads.ThreadWorld` (one thread per
rank). :func:`current_world` finds the one the calling code runs in; :func:`use_world` sets it for a
``with`` block of one thread.
"""

from __future__ import annotations

import atexit
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.counters import CommunicationCounters
from shardwright.runtime.ranks.exchange import Exchange, StoreExchange, WorldExchange
from shardwright.runtime.ranks.failing import FailingCalls
from shardwright.runtime.ranks.failures import collective_failed, concerning
from shardwright.runtime.ranks.hub import in_words
from shardwright.runtime.ranks.late import Failure, key_of
from shardwright.runtime.ranks.messages import Messages, MessageTransport
from shardwright.runtime.ranks.process_group import ProcessGroupTransport, ProcessMessages
from shardwright.runtime.ranks.processes import Process, Roll, answered
from shardwright.runtime.ranks.transport import Transport
from shardwright.runtime.waiting import OutOfTimeError, Wait, in_time, timeout, timeout_of


class World(ABC):
    """All ranks, seen from one.

    ``rank``, ``size``: the caller's number and how many there are. ``device``: where this rank's
    tensors live. ``counters``: what this rank has communicated.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.counters = CommunicationCounters()
        self._transports: dict[tuple[int, ...], Transport | None] = {}
        self._among_members: dict[tuple[int, ...], Transport | None] = {}

    @abstractmethod
    def _make_transport(
        self, ranks: tuple[int, ...], *, among_members: bool = False
    ) -> Transport | None:
        """The transport of a group of at least two; ``None`` if this rank is not a member.
        ``among_members``: the others do not take part in making it.
        """

    @abstractmethod
    def _make_message_transport(self, channels: Sequence[tuple[int, int]]) -> MessageTransport:
        """What moves the messages of these ``(sender, receiver)``; the same on all ranks, in the
        same order.
        """

    def connect(self, channels: Iterable[tuple[int, int]]) -> Messages:
        """Messages along ``channels``: the pairs ``(sender, receiver)`` of all ranks that will ever
        send to each other.

        Collective: all ranks of the world call it with the same pairs.
        """
        return Messages(self._make_message_transport(sorted(set(channels))), self.counters)

    def group(self, ranks: Sequence[int], name: str) -> Communicator | None:
        """The communicator of ``ranks``, counted under ``name``; ``None`` if this rank is not one
        of them.

        All ranks of the world must call it, members or not, in the same order: creating a process
        group is collective. Groups of the same ranks share one process group.
        """
        key = tuple(sorted(ranks))
        if len(set(key)) != len(key) or not key or key[0] < 0 or key[-1] >= self.size:
            raise DistributedError(
                f"a group of ranks {list(ranks)} cannot be made",
                why=f"the world has ranks 0 to {self.size - 1}, each once",
            )
        # Made by all ranks, members or not: torch makes a group collectively.
        if len(key) > 1 and key not in self._transports:
            self._transports[key] = self._make_transport(key)
        if self.rank not in key:
            return None
        return Communicator(
            self._transports.get(key), key, key.index(self.rank), name, self.counters
        )

    def group_among_members(self, ranks: Sequence[int], name: str) -> Communicator:
        """The communicator of a group of this rank. Only its members call it, each once it needs
        the group; where a rank is in several groups, all of them in one order.

        A group of these ranks that all ranks have made by :meth:`group` is used as it is. Others
        are remembered apart from those: whether one exists is not known to non-members, which
        would go on to make it in the next :meth:`group`.
        """
        key = tuple(sorted(ranks))
        assert self.rank in key, f"rank {self.rank} is not in {key}"
        made = self._transports.get(key) or self._among_members.get(key)
        if made is None and len(key) > 1:
            made = self._among_members[key] = self._make_transport(key, among_members=True)
        return Communicator(made, key, key.index(self.rank), name, self.counters)

    def partition(self, groups: Sequence[Sequence[int]], name: str) -> Communicator:
        """Make all ``groups``, of which every rank is in at most one, and return this rank's, or
        else one of it alone.

        Collective, see :meth:`group`.
        """
        mine = [
            communicator
            for ranks in groups
            if (communicator := self.group(ranks, name)) is not None
        ]
        assert len(mine) <= 1, f"rank {self.rank} is in {len(mine)} of the groups {groups}"
        return mine[0] if mine else Communicator(None, (self.rank,), 0, name, self.counters)

    @property
    def everyone(self) -> Communicator:
        """The group of all ranks. Collective at first use."""
        communicator = self.group(range(self.size), "world")
        assert communicator is not None
        return communicator

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.everyone.barrier()

    def working(self) -> AbstractContextManager[object]:
        """Around work that takes its time, for worlds whose ranks would be given up meanwhile."""
        return nullcontext()

    def process_of(self, rank: int) -> Process | None:
        """The process of another rank, where this one has learnt of it."""
        return None

    def telling_errors(self) -> AbstractContextManager[None]:
        """Around a call of a module: whoever misses this rank is told the error with which the call
        ends.
        """
        return nullcontext()

    def exchange(self) -> Exchange:
        """How the ranks agree on what they did, however long it took. Collective at first use."""
        return WorldExchange(self)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """What rank ``src`` passed, on every rank. It must be plain JSON (tuples arrive as
        lists).
        """
        if self.size == 1:
            return json.loads(json.dumps(value))
        text = json.dumps(value).encode() if self.rank == src else b""
        # First how long it is, as the others must have room for it.
        length = self.everyone.broadcast(torch.tensor([len(text)], device=self.device), src)
        data = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if text
            else torch.empty(int(length), dtype=torch.uint8)
        )
        return json.loads(bytes(self.everyone.broadcast(data.to(self.device), src).tolist()))

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank passed, by rank. It must be plain JSON (tuples arrive as lists)."""
        text = json.dumps(value).encode()
        lengths = torch.cat(
            self.everyone.all_gather(torch.tensor([len(text)], device=self.device), phase="setup")
        ).tolist()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        return [
            json.loads(bytes(item.tolist()))
            for item in self.everyone.all_gather(data, 0, lengths, phase="setup")
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, {self.device})"


class SoloWorld(World):
    """One rank, alone."""

    def __init__(self) -> None:
        super().__init__(0, 1, torch.device("cpu"))

    def _make_transport(
        self, ranks: tuple[int, ...], *, among_members: bool = False
    ) -> Transport | None:
        raise AssertionError("a world of one has no group of several")

    def _make_message_transport(self, channels: Sequence[tuple[int, int]]) -> MessageTransport:
        assert not channels, "nobody sends to itself"
        return ProcessMessages(self.rank, {})


# [Note: Communicators are made at once] NCCL makes the communicator of a group in the group's first
# call (unless init_process_group was given a device_id), and that call waits in the host for all
# members, even if it is asynchronous. A rank that posts a receive ahead would wait for a sender
# that waits for this rank; so would one that begins to sum the gradients of a shared parameter
# before others do. So every group makes one call where it is created, which all ranks do in one
# order.


class DistributedWorld(World):
    """The ranks of ``torch.distributed``, which must be initialised.

    Where NCCL serves CUDA tensors and there are any GPUs the device is the current CUDA device,
    else the CPU. Raises :class:`DistributedError` if another rank has the same GPU.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise DistributedError(
                "torch.distributed is not initialised",
                hint="run under torchrun and call torch.distributed.init_process_group",
            )
        # init_process_group() without a backend takes NCCL for CUDA tensors and gloo for others,
        # GPUs or not.
        on_cuda = "nccl" in dist.get_backend_config() and torch.cuda.is_available()
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        )
        super().__init__(dist.get_rank(), dist.get_world_size(), device)
        self._roll = Roll(dist.distributed_c10d._get_default_store(), self.rank)
        self._exchange: StoreExchange | None = None
        self._of_this_rank: dist.ProcessGroup | None = None
        self._failing = FailingCalls(self._roll, self.rank, self._calls)
        if on_cuda:
            self._claim_gpu()

    def _claim_gpu(self) -> None:
        """Refuse a GPU that another rank has claimed: NCCL would fail at its first call, or wait
        for ever.
        """
        gpu = torch.cuda.get_device_properties(self.device).uuid
        store = dist.distributed_c10d._get_default_store()
        wait = Wait(f"rank {self.rank} waits for the job's key-value store")
        claim = partial(store.compare_set, f"shardwright/gpu/{gpu}", "", str(self.rank))
        holder = int(answered(claim, wait, self.rank))
        if holder != self.rank:
            raise DistributedError(
                f"ranks {holder} and {self.rank} have the same GPU",
                why=f"both made it their current device ({self.device} on rank {self.rank}), and "
                "NCCL wants one GPU per rank",
                hint="call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
                "init_process_group; with more ranks "
                "than GPUs initialise 'gloo', and they run on the CPU",
            )

    def _make_transport(
        self, ranks: tuple[int, ...], *, among_members: bool = False
    ) -> Transport | None:
        process_group = self._new_group(ranks, among_members=among_members)
        if self.rank not in ranks:
            return None
        assert isinstance(process_group, dist.ProcessGroup)
        self._roll.learn(ranks)
        transport = ProcessGroupTransport(
            process_group, self.device, self.rank, ranks, self._roll, lambda: self._states(ranks)
        )
        if self.device.type == "cuda":  # see [Note: Communicators are made at once]
            transport.all_reduce_(torch.zeros(1, device=self.device), "sum")
        return transport

    def _make_message_transport(self, channels: Sequence[tuple[int, int]]) -> MessageTransport:
        # gloo sends within the group of all ranks; NCCL needs a group for each direction.
        if self.device.type == "cpu":
            everyone = self.everyone.transport
            groups = (
                dict.fromkeys(channels, everyone.process_group)
                if isinstance(everyone, ProcessGroupTransport)
                else {}
            )
            return ProcessMessages(self.rank, groups, self._states)
        groups = {channel: self._new_group(channel) for channel in channels}
        for sender, receiver in channels:  # see [Note: Communicators are made at once]
            if self.rank == sender:
                dist.send(torch.zeros(1, device=self.device), receiver, groups[sender, receiver])
            elif self.rank == receiver:
                dist.recv(torch.zeros(1, device=self.device), sender, groups[sender, receiver])
        mine = {
            channel: group
            for channel, group in groups.items()
            if self.rank in channel and group is not None
        }
        return ProcessMessages(self.rank, mine, self._states)

    def _new_group(self, ranks: Sequence[int], *, among_members: bool = False) -> Any:
        """A process group with our time limit. The default one serves all ranks where its limit is
        ours. ``among_members``: other ranks need not call this, see [Note: Names of groups].
        """
        limit = timeout()
        if (
            len(ranks) == self.size
            and timeout_of(dist.distributed_c10d._get_default_store()) == limit
        ):
            return dist.group.WORLD
        with concerning(f"making the process group of {in_words(ranks)}"):
            desc = f"shardwright {in_words(ranks[:8])}"
            make = partial(
                dist.new_group,
                list(ranks),
                timeout=limit,
                group_desc=desc,
                use_local_synchronization=among_members,
            )
            try:
                if among_members and len(ranks) > 1:
                    _be_in_as_many_groups(tuple(ranks))
                if self.device.type != "cpu":  # the current device belongs to this thread
                    return make()
                # Torch keeps to the limit itself, unless the store stands still.
                return in_time(
                    make, Wait(f"rank {self.rank}: {desc} is being made", 2 * limit.total_seconds())
                )
            except (RuntimeError, OutOfTimeError, DistributedError) as error:
                expected = ranks if among_members else range(self.size)
                others = [rank for rank in expected if rank != self.rank]
                raise collective_failed(
                    "new_group", "world", self.rank, others, None, error, self._states(others)
                ) from error

    def group_of_this_rank(self) -> dist.ProcessGroup:
        """A process group of this rank alone, for libraries that want one."""
        if self._of_this_rank is None:
            self._of_this_rank = self._new_group((self.rank,), among_members=True)
        return self._of_this_rank

    def _states(self, ranks: Sequence[int]) -> str:
        """How other ranks are, now that something has failed here; they are told of it."""
        found = self._roll.states(ranks)
        missed = in_words([rank for rank in ranks if rank != self.rank])
        self._roll.say_failed(Failure(f"it missed {missed}", self._calls()))
        return found

    def _calls(self) -> dict[str, int]:
        """How many collectives of each group this rank has begun; nothing with NCCL, where no host
        waits for them.
        """
        if self.device.type != "cpu":
            return {}
        transports = self._transports.items()
        return {
            key_of(ranks): found.num_calls
            for ranks, found in transports
            if isinstance(found, ProcessGroupTransport)
        }

    def process_of(self, rank: int) -> Process | None:
        """See :meth:`World.process_of`."""
        return self._roll.known(rank)

    def telling_errors(self) -> AbstractContextManager[None]:
        """See :meth:`World.telling_errors`."""
        return self._failing

    def exchange(self) -> Exchange:
        """See :meth:`World.exchange`: through the store, as ranks may write for longer than a
        collective may take.
        """
        if self._exchange is None:
            self._exchange = StoreExchange.of_process_group("a checkpoint")
        return self._exchange


# [Note: Names of groups] Members of a process group find each other under its name. Torch names a
# group that its members alone make by their ranks and by how many groups the calling rank is in.
# That number may differ: of the stages of a pipeline only two are in the group of a shared
# embedding. Members with two numbers would wait for each other under two names, so those that are
# in fewer groups first enter some of one rank, which cost next to nothing.


def _be_in_as_many_groups(ranks: tuple[int, ...]) -> None:
    """Let all of ``ranks`` be in as many process groups. Collective among them."""

    def num_groups() -> int:
        return len(dist.distributed_c10d._world.pg_names)

    exchange = StoreExchange.of_members(ranks, f"making the process group of {in_words(ranks)}")
    most = max(exchange.all_gather_object(num_groups()))
    while num_groups() < most:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


class _Current(threading.local):
    """The world of each thread; a thread without one sees its process's."""

    world: World | None = None


_current = _Current()
_of_process: dict[
    int, tuple[object, World]
] = {}  # at most one entry: the default process group and its world
_solo = SoloWorld()

# Before the interpreter ends, with what transports hold (runtime/ranks/process_group.py says why).
atexit.register(_of_process.clear)


def world_of_thread() -> World | None:
    """The world that :func:`use_world` has set for the calling thread."""
    return _current.world


def current_world() -> World:
    """The calling thread's world: that of :func:`use_world`, else torch.distributed's if it is
    initialised, else a solo one.
    """
    if _current.world is not None:
        return _current.world
    if not (dist.is_available() and dist.is_initialized()):
        return _solo
    process_group = dist.group.WORLD
    known = _of_process.get(0)
    if known is None or known[0] is not process_group:  # a first or a new init_process_group
        known = _of_process[0] = (process_group, DistributedWorld())
    return known[1]


@contextmanager
def use_world(world: World) -> Iterator[World]:
    """Make ``world`` the current one of this thread inside the ``with`` block."""
    previous, _current.world = _current.world, world
    try:
        yield world
    finally:
        _current.world = previous


def counters() -> CommunicationCounters:
    """What the calling rank has communicated so far."""
    return current_world().counters


@contextmanager
def count_communication() -> Iterator[CommunicationCounters]:
    """What the calling rank communicates inside the ``with`` block, as counters to print or to ask.

    ::

        with shardwright.count_communication() as volume:
            model(x).backward()
        print(volume)                             # by phase, collective and mesh axis
        volume.elements("all_reduce", axis="tp")  # also calls(), total(), items()
    """
    with counters().listen() as volume:
        yield volume
