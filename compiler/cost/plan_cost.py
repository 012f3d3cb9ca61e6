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

    def hidden_s(self, step_s: float) -> float:
        """The seconds by which all parts of the rank's step together are longer than the step: work
        beside other work. A rounding error counts as 0.
        """
        seconds = self.compute_s + self.communication_s + self.idle_s - step_s
        return seconds if seconds > 1e-9 * step_s else 0.0


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
        return self.in_words()

    def in_words(self, *, see_each: str | None = None) -> str:
        """The step as a whole, each kind of rank with its time and memory, then messages.

        ``see_each``: how the reader gets to see each kind of rank. With it, at most ``FULL_KINDS``
        kinds are listed: of more only the first, the last, and those with most to compute and to
        hold; the others share a line, with the range of their figures.
        """
        lines = [
            (
                f"step {amount(self.step_s, 's')} on {self.hardware}, peak memory "
                f"{amount(self.peak_bytes, 'B')}"
            )
        ]
        # Only pipelines have a bubble.
        if self.bubble:
            lines[0] += f", bubble {self.bubble:.1%}"
        kinds = self._kinds()
        if see_each is None or len(kinds) <= FULL_KINDS:
            for kind in kinds:
                lines += kind.lines()
        else:
            lines += _shortened(kinds, see_each)
        hiding = [rank for rank in self.ranks if rank.hidden_s(self.step_s)]
        if hiding:
            waits = ", as idle" if any(rank.idle_s for rank in hiding) else ""
            lines.append(
                "  some communication runs beside computing: the step has only what computing does "
                f"not hide of it{waits}"
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

    def _kinds(self) -> list[_Kind]:
        """The ranks, those together that cost the same."""
        seen: dict[tuple[Any, ...], list[int]] = {}
        costs = {cost.rank: cost for cost in self.ranks}
        memory = {item.rank: item for item in self.memory}
        for rank, cost in costs.items():
            key = (
                cost.compute_s,
                tuple(cost.comm_s.items()),
                cost.idle_s,
                str(memory[rank].by_category),
            )
            seen.setdefault(key, []).append(rank)
        return [_Kind(tuple(ranks), costs[ranks[0]], memory[ranks[0]]) for ranks in seen.values()]

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


@dataclass(frozen=True)
class _Kind:
    """Ranks that cost the same, and what one of them costs."""

    ranks: tuple[int, ...]
    cost: RankCost
    memory: RankMemory

    def lines(self, why: Sequence[str] = ()) -> list[str]:
        """``ranks 0-3: compute 15.1 ms, ...``, and a line for memory. ``why``: why these ranks are
        listed.
        """
        cost, held = self.cost, self.memory
        reason = f" ({', '.join(why)})" if why else ""
        words = [f"compute {amount(cost.compute_s, 's')}"]
        comm = (
            (name, seconds, cost.comm_bytes.get(name))
            for name, seconds in cost.comm_s.items()
            if seconds
        )
        words += [f"{name} {_exchange(seconds, num_bytes)}" for name, seconds, num_bytes in comm]
        words += [f"idle {amount(cost.idle_s, 's')}"] if cost.idle_s else []
        parts = ", ".join(f"{key} {amount(value, 'B')}" for key, value in held.by_category.items())
        return [
            f"  {_named(self.ranks)}{reason}: {', '.join(words)}",
            f"    {amount(held.peak_bytes, 'B')} at {held.moment or 'the start'}: {parts}",
        ]


FULL_KINDS = 5
"""How many kinds of ranks are all listed, where many would be too much to read."""


def _shortened(kinds: Sequence[_Kind], see_each: str) -> list[str]:
    """The lines of the first and the last kind of rank and of those with most to compute and to
    hold, then a line for all others.
    """
    fullest = max(kinds, key=lambda kind: kind.memory.peak_bytes)
    busiest = max(kinds, key=lambda kind: kind.cost.compute_s)
    # Stages alike differ by rounding: one of them is enough.
    if amount(fullest.cost.compute_s, "s") == amount(busiest.cost.compute_s, "s"):
        busiest = fullest
    lines: list[str] = []
    others: list[_Kind] = []
    for kind in kinds:
        why = ["computes longest"] if kind is busiest else []
        why += ["most memory"] if kind is fullest else []
        if why or kind in (kinds[0], kinds[-1]):
            lines += kind.lines(why)
        else:
            others.append(kind)
    return [*lines, _in_one_line(others, see_each)]


def _in_one_line(kinds: Sequence[_Kind], see_each: str) -> str:
    """What the kinds of ranks cost that are not listed, from least to most:
    ``ranks 1-2, 4: compute 451 ms to 676 ms, memory 727 MB to 3.08 GB; --all prints each``.
    """
    words = [
        f"{name} {_from_to(values, unit)}"
        for name, values, unit in (
            ("compute", [kind.cost.compute_s for kind in kinds], "s"),
            ("communication", [kind.cost.communication_s for kind in kinds], "s"),
            ("idle", [kind.cost.idle_s for kind in kinds], "s"),
            ("memory", [float(kind.memory.peak_bytes) for kind in kinds], "B"),
        )
        if any(values)
    ]
    ranks = sorted(rank for kind in kinds for rank in kind.ranks)
    return f"  {_named(ranks)}: {', '.join(words)}; {see_each}"


def _from_to(values: Sequence[float], unit: str) -> str:
    least, most = amount(min(values), unit), amount(max(values), unit)
    return least if least == most else f"{least} to {most}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans(ranks)}"


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
