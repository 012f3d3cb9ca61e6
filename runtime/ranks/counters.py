"""Counting communication: what each rank sent over each mesh axis, in numbers a person or a test
can read.

Counting is always on (it costs a dictionary update per collective). ``counters()`` gives the totals
of the calling rank since it started; ``count_communication()`` those of a ``with`` block:

    with count_communication() as volume:
        module(x).backward()
    print(volume)                                             # a table
    assert volume.elements("all_reduce", axis="tp", phase="forward") == 2 * batch * seq * hidden
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.runtime.arguments import checked

Phase = Literal["forward", "backward", "gradients", "setup"]
"""When a collective ran: in the forward or backward pass of an operator or adapter, in the
reduction of parameter gradients (and what optimizers do with them), or outside of training steps.
"""


@dataclass(frozen=True, slots=True)
class CommunicationKey:
    """What calls are added up under."""

    phase: Phase
    collective: str
    axis: str


@dataclass(frozen=True, slots=True)
class CommunicationVolume:
    """The sum over the calls of one key, seen from one rank.

    ``elements``: of the whole tensor a collective works on (what goes into an all-reduce or
    reduce-scatter, what comes out of an all-gather, what one rank holds in an all-to-all,
    broadcast, send or receive). ``num_bytes``: the same in bytes.
    ``received``: elements this rank must receive at least, that is with ring algorithms: ``2
    (n-1)/n`` of an all-reduce, what is not its own of an all-gather or all-to-all, ``n-1`` times
    its piece of a reduce-scatter.
    """

    calls: int = 0
    elements: int = 0
    num_bytes: int = 0
    received: float = 0.0

    def __add__(self, other: CommunicationVolume) -> CommunicationVolume:
        return CommunicationVolume(
            self.calls + other.calls,
            self.elements + other.elements,
            self.num_bytes + other.num_bytes,
            self.received + other.received,
        )


class CommunicationCounters:
    """Volumes by (phase, collective, axis), for one rank. Reads as a table with ``str``.

    ``waited_s``: the seconds for which the host has waited in collectives and for messages between
    processes. With NCCL the device waits and the host does not, so it says nothing there.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        # Of each key the fields of a volume, which are added up in place: this runs for every call.
        self._volumes: dict[tuple[Phase, str, str], list[Any]] = {}
        self._listeners: list[CommunicationCounters] = []

    def add(
        self,
        phase: Phase,
        collective: str,
        axis: str,
        elements: int,
        element_bytes: int,
        received: float,
    ) -> None:
        """Count one call. Counters that listen (see :meth:`listen`) count it too."""
        key = (phase, collective, axis)
        known = self._volumes.get(key)
        if known is None:
            known = self._volumes[key] = [0, 0, 0, 0.0]
        known[0] += 1
        known[1] += elements
        known[2] += elements * element_bytes
        known[3] += received
        for listener in self._listeners:
            listener.add(phase, collective, axis, elements, element_bytes, received)

    @checked
    def total(
        self, collective: str | None = None, *, axis: str | None = None, phase: Phase | None = None
    ) -> CommunicationVolume:
        """The sum over all keys that match; ``None`` matches everything."""
        wanted = (phase, collective, axis)
        total = CommunicationVolume()
        for key, volume in self._volumes.items():
            if all(want in (None, have) for want, have in zip(wanted, key, strict=True)):
                total += CommunicationVolume(*volume)
        return total

    @checked
    def calls(
        self, collective: str | None = None, *, axis: str | None = None, phase: Phase | None = None
    ) -> int:
        """The number of calls over all keys that match, see :meth:`total`."""
        return self.total(collective, axis=axis, phase=phase).calls

    @checked
    def elements(
        self, collective: str | None = None, *, axis: str | None = None, phase: Phase | None = None
    ) -> int:
        """The elements of all calls that match, see :meth:`total`."""
        return self.total(collective, axis=axis, phase=phase).elements

    def items(self) -> list[tuple[CommunicationKey, CommunicationVolume]]:
        """All keys with their volumes, sorted by key."""
        return [
            (CommunicationKey(*key), CommunicationVolume(*volume))
            for key, volume in sorted(self._volumes.items())
        ]

    def clear(self) -> None:
        """Begin at zero again."""
        self._volumes.clear()

    @contextmanager
    def listen(self) -> Iterator[CommunicationCounters]:
        """Counters that see only the calls made inside the ``with`` block; blocks may nest."""
        listener = CommunicationCounters()
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)

    def __str__(self) -> str:
        rows = [("phase", "collective", "axis", "calls", "elements", "bytes")]
        for key, volume in self.items():
            calls, elements, num_bytes = volume.calls, volume.elements, volume.num_bytes
            numbers = (str(calls), f"{elements:,}", f"{num_bytes:,}")
            rows.append((key.phase, key.collective, key.axis, *numbers))
        # As wide as the widest cell; numbers are aligned right.
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        template = "  ".join(
            f"{{:{'<' if i < 3 else '>'}{width}}}" for i, width in enumerate(widths)
        )
        return "\n".join(template.format(*row) for row in rows)
