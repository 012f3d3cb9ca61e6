"""Messages: tensors that go from one rank to another while both compute.

All messages from one rank to another form a channel. Both ends count them, so the n-th receive that
is posted gets the n-th message that was sent, whatever their shapes, and whichever end is earlier.
Sends and receives only start here; ``wait()`` of what they return waits. A wait that cannot end
raises ``DistributedError`` and says who waits for what.
"""

from __future__ import annotations

import time
from typing import Protocol

from torch import Tensor

from shardwright.runtime.errors import CollectiveError
from shardwright.runtime.ranks.counters import CommunicationCounters, Phase
from shardwright.runtime.ranks.transport import Work

STAGES = "stages"
"""The name under which messages between pipeline stages are counted."""


class Sending(Work, Protocol):
    """A message on its way."""

    def is_completed(self) -> bool:
        """Whether the tensor may be freed or changed."""


class MessageTransport(Protocol):
    """What moves messages. Ranks are those of the world, tensors are contiguous and detached, and
    ``number`` counts the messages of a channel. ``what`` is for the text of errors.
    """

    def start_send(self, x: Tensor, dst: int, number: int, what: str) -> Sending:
        """``x`` must stay as it is until the message is completed. ``what``: like ``'hidden' of
        0F3``.
        """

    def start_receive_(self, x: Tensor, src: int, number: int, what: str) -> Work:
        """``x`` is filled when ``wait()`` returns. ``what``: the action that waits and for what,
        like ``1F3 for 'hidden'``.
        """


class Messages:
    """All channels of one rank. See the top of the file."""

    def __init__(self, transport: MessageTransport, counters: CommunicationCounters) -> None:
        self._transport = transport
        self._counters = counters
        self._num_sent: dict[int, int] = {}
        self._num_received: dict[int, int] = {}

    def __deepcopy__(self, memo: object) -> Messages:
        """Itself: a copy of a module talks over the same channels."""
        return self

    def send(self, x: Tensor, dst: int, what: str, *, phase: Phase) -> Sending:
        """Start to send ``x`` to rank ``dst`` of the world; it must not be changed until the
        message is completed.
        """
        number = self._num_sent[dst] = self._num_sent.get(dst, 0) + 1
        self._counters.add(phase, "send", STAGES, x.numel(), x.element_size(), 0)
        return self._transport.start_send(x.detach().contiguous(), dst, number, what)

    def receive_(self, x: Tensor, src: int, what: str, *, phase: Phase) -> Work:
        """Post contiguous ``x`` for the next message of rank ``src``; it is filled when ``wait()``
        returns.
        """
        number = self._num_received[src] = self._num_received.get(src, 0) + 1
        self._counters.add(phase, "receive", STAGES, x.numel(), x.element_size(), x.numel())
        return _TimedWork(self._transport.start_receive_(x, src, number, what), self._counters)


class _TimedWork:
    """A message that is under way, whose wait counts."""

    __slots__ = ("_counters", "_work")

    def __init__(self, work: Work, counters: CommunicationCounters) -> None:
        self._work, self._counters = work, counters

    def wait(self) -> None:
        started = time.perf_counter()
        self._work.wait()
        self._counters.waited_s += time.perf_counter() - started


def lost(rank: int, what: str, src: int, why: str) -> CollectiveError:
    """The error of a rank whose message does not come."""
    return CollectiveError(
        f"rank {rank} waits in {what} from rank {src}, and it does not come",
        why=why,
        hint=f"look for the first error on rank {src}, or on the ranks that it waits for",
    )


def undeliverable(rank: int, what: str, dst: int, why: str) -> CollectiveError:
    """The error of a rank that cannot send."""
    return CollectiveError(
        f"rank {rank} cannot send {what} to rank {dst}",
        why=why,
        hint=f"look for the first error on rank {dst}",
    )
