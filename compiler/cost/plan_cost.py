"""What a plan costs: seconds of a step and bytes of every rank, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.plan.amounts import amount


@dataclass(frozen=True, slots=True)
class Activity:
    """What a unit rank does from ``start_s`` to ``end_s``: an action of the schedule (``0F3``), or
    a part of the step.
    """

    rank: int
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RankCost:
    """The seconds of one unit rank in a step.

    ``comm_s``: the seconds of each collective, under names like ``"tp all_reduce"``.
    ``comm_bytes``: the bytes that go through it, as :func:`shardwright.count_communication` counts
    them. ``idle_s``: waiting for other ranks, or for communication that no other work hides.
    """

    rank: int
    compute_s: float
    comm_s: Mapping[str, float]
    idle_s: float = 0.0
    comm_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def communication_s(self) -> float:
        return sum(self.comm_s.values())


@dataclass(frozen=True)
class PlanCost:
    """The cost of one step of a plan.

    - ``step_s``: the seconds of the step.
    - ``ranks``, ``memory``: the seconds and bytes of every unit rank.
    - ``timeline``: what one rank of each stage does when.
    - ``messages``: for each pair ``"stage 0 to 1"``, the seconds for which the values or gradients
      of a step are under way, one after the other. The part that no other work hides is also in
      the ranks' ``idle_s``.
    - ``message_bytes``: the bytes of these messages, of all ranks together.
    - ``bubble``: the share of the ranks' time in which a pipeline's schedule lets them wait.
    - ``extrapolated``: what lies outside the sizes that the hardware's calibration measured.
    - ``assumed``: what is taken for granted of data, in words.
    - ``apart_s``: of a search, the seconds of a step whose messages were each sent by itself and
      waited for, where a compile sends several as one or computes meanwhile.
    """

    hardware: str
    step_s: float
    ranks: tuple[RankCost, ...]
    memory: tuple[RankMemory, ...]
    timeline: tuple[Activity, ...] = ()
    bubble: float = 0.0
    extrapolated: tuple[str, ...] = ()
    messages: Mapping[str, float] = field(default_factory=dict)
    message_bytes: Mapping[str, float] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    apart_s: float | None = None

    @property
    def compared_s(self) -> float:
        """The seconds of the step as bounds and predictions count it: each message by itself."""
        return self.step_s if self.apart_s is None else self.apart_s

    @property
    def peak_bytes(self) -> int:
        """The bytes of the rank that needs most."""
        return max((memory.peak_bytes for memory in self.memory), default=0)

    @property
    def compute_s(self) -> float:
        """The seconds of the rank that computes longest."""
        return max((rank.compute_s for rank in self.ranks), default=0.0)

    @property
    def communication_s(self) -> float:
        """The seconds of the rank that communicates longest."""
        return max((rank.communication_s for rank in self.ranks), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "step_s": self.step_s,
            "bubble": self.bubble,
            "ranks": [asdict(rank) for rank in self.ranks],
            "memory": [memory.to_json() for memory in self.memory],
            "timeline": [[a.rank, a.name, a.start_s, a.end_s] for a in self.timeline],
            "extrapolated": list(self.extrapolated),
            "messages": dict(self.messages),
            "message_bytes": dict(self.message_bytes),
            "assumed": list(self.assumed),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanCost:
        """The reverse of :meth:`to_json`."""
        return cls(
            data["hardware"],
            data["step_s"],
            tuple(RankCost(**rank) for rank in data["ranks"]),
            tuple(map(RankMemory.from_json, data["memory"])),
            tuple(Activity(*item) for item in data["timeline"]),
            data["bubble"],
            tuple(data["extrapolated"]),
            dict(data["messages"]),
            dict(data["message_bytes"]),
            tuple(data.get("assumed", ())),
        )

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1)

    def __str__(self) -> str:
        """A few lines: the step, and each kind of rank."""
        # The step as a whole, each kind of rank with its time and memory, then messages.
        lines = [
            (
                f"step {amount(self.step_s, 's')} on {self.hardware}, peak memory "
                f"{amount(self.peak_bytes, 'B')}"
            )
        ]
        # Only pipelines have a bubble.
        if self.bubble:
            lines[0] += f", bubble {self.bubble:.1%}"
        # Ranks that cost the same share one line.
        seen: dict[tuple[Any, ...], list[int]] = {}
        memory = {item.rank: item for item in self.memory}
        for cost in self.ranks:
            key = (
                cost.compute_s,
                tuple(cost.comm_s.items()),
                cost.idle_s,
                str(memory[cost.rank].by_category),
            )
            seen.setdefault(key, []).append(cost.rank)
        # Ranks with equal texts are told of once: ``ranks 0-3: compute 15.1 ms, ...``.
        by_rank = {cost.rank: cost for cost in self.ranks}
        for ranks in seen.values():
            cost, held = by_rank[ranks[0]], memory[ranks[0]]
            words = [f"compute {amount(cost.compute_s, 's')}"]
            comm = (
                (name, seconds, cost.comm_bytes.get(name))
                for name, seconds in cost.comm_s.items()
                if seconds
            )
            words += [
                f"{name} {_exchange(seconds, num_bytes)}" for name, seconds, num_bytes in comm
            ]
            words += [f"idle {amount(cost.idle_s, 's')}"] if cost.idle_s else []
            title = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans(ranks)}"
            lines.append(f"  {title}: {', '.join(words)}")
            parts = ", ".join(
                f"{key} {amount(value, 'B')}" for key, value in held.by_category.items()
            )
            lines.append(
                f"    {amount(held.peak_bytes, 'B')} at {held.moment or 'the start'}: {parts}"
            )
        if self.messages:
            longest = max(self.messages, key=lambda name: self.messages[name])
            told = _exchange(self.messages[longest], self.message_bytes.get(longest))
            lines.append(
                f"  messages under way: {told} from {longest}, which is most; bytes of all "
                "ranks together"
            )
        if self.extrapolated:
            lines.append(f"  {self.beyond}")
        if self.assumed:
            lines.append(f"  {self.assumes}")
        return "\n".join(lines)

    @property
    def beyond(self) -> str:
        """What lies outside the sizes that were measured, in a line; empty if nothing does."""
        first, more = self.extrapolated[:3], len(self.extrapolated) - 3
        if not first:
            return ""
        return (
            f"beyond what was measured: {', '.join(first)}{f' and {more} more' if more > 0 else ''}"
        )

    @property
    def assumes(self) -> str:
        """What is taken for granted of data, in a line; empty if nothing is."""
        return f"assumed of the data: {'; '.join(self.assumed)}" if self.assumed else ""


def _exchange(seconds: float, num_bytes: float | None) -> str:
    """Seconds, and bytes where they are known: ``1.5 ms (2 MB)``."""
    return amount(seconds, "s") + (f" ({amount(num_bytes, 'B')})" if num_bytes is not None else "")


def spans(ranks: Sequence[int]) -> str:
    """Ascending ranks in words: ``0-3, 6``."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
