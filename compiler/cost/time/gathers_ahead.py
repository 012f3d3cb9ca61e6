"""How much of the gathers of weights costs nothing, as the program starts them one weight ahead.

A rank that stores weights in pieces (ZeRO-3) asks for one, starts the gather of the next one, and
only then computes (``runtime/gathered_weights.py``). So a gather is under way from the place where
the weight before it is asked for to the place where it is needed. What the device computes in
between hides it:

- **Forward.** The next weight is the one that followed in the forward before. The first one of a
  forward is waited for, and so are weights that something else than a gather has made of a stored
  parameter, further gathers of a weight that is cut along several axes, and activations.
- **Backward** asks for what operators have kept, the last one first. Each asking starts what the
  backward will need next: of what was gathered before, the latest that is still needed. The first
  one of a backward is waited for.
- A **recompute region** runs again before its backward and gathers in the order of its forward,
  each weight one ahead. Backward starts its first one as it would start what an operator kept, and
  the region's last one starts what backward will need after the region.

Ranks do one collective at a time along an axis. So a message over the same axes that is waited for,
such as the reduce-scatter of a gradient, ends what hides a gather: it comes after the gather.
Joining pieces that do not arrive in their places is work of the device, and takes its time.

Example: three weights, gathers of 2 ms, and products of 1.5 ms forward and 3 ms backward. In
forward the first gather takes 2 ms, the others 0.5 ms each behind the product before them. In
backward the last weight takes 2 ms again. The product of the last one hides the gather of the
second, and that of the second the gather of the first, so both cost nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.program import Adapt, Instruction, Program, gathers_at, joins

Both = tuple[float, float]


@dataclass(frozen=True)
class Message:
    """What a gather sends, in seconds: in forward, and once more in backward."""

    forward_s: float
    again_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """What an instruction does, forward and backward: the seconds in which it computes, and the
    axes over which it communicates, whose messages it waits for. ``region``: the number of the
    recompute region that it stands in.
    """

    busy: OpTime
    axes: tuple[Collection[str], Collection[str]]
    region: int | None = None


@dataclass(frozen=True)
class GathersAndWork:
    """What a program gathers, and what it does meanwhile. ``messages``: of the gathers, by the
    position of the first one of each collective. ``work``: of each instruction. ``asked``: where
    operators keep what backward gathers again (:func:`kept_weights.asked_again`).
    """

    program: Program
    messages: Mapping[int, Message]
    work: Sequence[Work]
    asked: Mapping[str, tuple[int, int]]

    def axes_at(self, position: int) -> tuple[str, ...]:
        """The axes that a gather goes over."""
        gather = self.program.body[position]
        assert isinstance(gather, Adapt)
        return gather.step.axes


def hidden_ahead(gathers: GathersAndWork, device: Device) -> dict[int, Both]:
    """The seconds of gathers that cost nothing, forward and again in backward, by the position of
    the first gather of each collective.
    """
    program, messages, work = gathers.program, gathers.messages, gathers.work
    hidden = dict.fromkeys(messages, (0.0, 0.0))
    if not messages:
        return hidden
    forward = [(item.busy.forward_s, item.axes[0]) for item in work]
    for position, start in _started_in_forward(program).items():
        between = busy_s(forward[start + 1 : position], gathers.axes_at(position))
        hidden[position] = device.hidden_s(messages[position].forward_s, between), 0.0
    backward = _Backward(gathers)
    for position, (start, until) in backward.ahead.items():
        between = busy_s(backward.steps[start:until], gathers.axes_at(position))
        again_s = device.hidden_s(messages[position].again_s, between)
        hidden[position] = hidden[position][0], again_s
    return hidden


BusyStep = tuple[float, Collection[str]]
"""The seconds that are computed, and the axes over which a message is waited for."""


def busy_s(between: Iterable[BusyStep], axes: Sequence[str]) -> float:
    """The seconds that are computed until something waits for a message over the same axes."""
    found = 0.0
    for seconds, waited in between:
        if not set(axes).isdisjoint(waited):
            break
        found += seconds
    return found


def gathers_parameter(item: Instruction) -> bool:
    """Whether a forward begins this one weight ahead: the first gather of a collective of
    parameters.
    """
    return (
        isinstance(item, Adapt)
        and item.gathers_weight
        and not joins(item)
        and item.value.kind is ValueKind.PARAMETER
    )


def _started_in_forward(program: Program) -> dict[int, int]:
    """The gathers that forward starts ahead, by position, and where: at the weight before."""
    found: dict[int, int] = {}
    before: int | None = None
    for position, item in enumerate(program.body):
        if not gathers_parameter(item):
            continue
        if before is not None:
            found[position] = _end_of_group(program, before)
        before = position
    return found


def _end_of_group(program: Program, position: int) -> int:
    return position + len(gathers_at(program.body, position)) - 1


@dataclass(eq=False)
class Gathers:
    """What backward gathers for operators that keep it, or for a region. ``positions``: those of
    the collectives, in their order. ``first``, ``last``: the operators that keep what they make; of
    a region nothing is kept, and ``first`` is behind all operators. ``place``: how far on in the
    forward it comes. ``is_needed``: backward will come to it, and has not yet.
    """

    positions: list[int]
    first: int
    last: int
    place: int
    is_needed: bool = True


class _Backward:
    """A backward as it runs. ``steps``: what it does, one after the other. ``ahead``: the gathers
    that it starts ahead, by position: the numbers of the step before which each is started, and of
    the one that needs it.
    """

    def __init__(self, gathers: GathersAndWork) -> None:
        work = gathers.work
        self.steps: list[BusyStep] = []
        self.ahead: dict[int, tuple[int, int]] = {}
        self._started: dict[int, int] = {}  # of a gather, and before which step
        inside: dict[int, list[int]] = {}
        for position, item in enumerate(work):
            if item.region is not None:
                inside.setdefault(item.region, []).append(position)
        regions = {number: _region(gathers, positions) for number, positions in inside.items()}
        uses = kept_gathers(gathers)
        # in the order of the forward
        self._all = sorted((*uses, *regions.values()), key=lambda gathers: gathers.place)
        asking: dict[int, list[Gathers]] = {}
        for use in uses:
            asking.setdefault(use.last, []).append(use)
        for position in range(len(work) - 1, -1, -1):
            item = work[position]
            if item.region is not None and inside[item.region]:
                positions, inside[item.region] = inside[item.region], []
                self._run_again(work, positions, regions[item.region])
            for use in asking.get(position, ()):
                self._take(use.positions[0])
                self._start_after(use, position)
            self.steps.append((item.busy.backward_s, item.axes[1]))

    def _run_again(self, work: Sequence[Work], positions: list[int], region: Gathers) -> None:
        """The second run of a region, which waits for a gather once the next one is started."""
        region.is_needed = False
        following = dict(zip(region.positions, region.positions[1:], strict=False))
        for position in positions:
            if position in region.positions:
                self._take(position)
            self.steps.append((work[position].busy.forward_s, work[position].axes[0]))
            if position in following:
                self._started[following[position]] = len(self.steps)
            elif position in region.positions:
                self._start_after(region, positions[0])

    def _take(self, position: int) -> None:
        if position in self._started:
            self.ahead[position] = self._started.pop(position), len(self.steps)

    def _start_after(self, gathers: Gathers, position: int) -> None:
        """Start what backward needs next, when it is at ``position``."""
        gathers.is_needed = False
        number = bisect_left(self._all, gathers.place, key=lambda other: other.place)
        # What is there already, for an operator that backward has not come to, starts nothing.
        while number and not self._all[number - 1].is_needed:
            number -= 1
            if self._all[number].first < position:
                return
        if number:
            self._started.setdefault(self._all[number - 1].positions[0], len(self.steps))


def _region(gathers: GathersAndWork, positions: Sequence[int]) -> Gathers:
    """What a region gathers. Nothing, if no backward comes to it."""
    body, work = gathers.program.body, gathers.work
    inside = [position for position in positions if gathers_parameter(body[position])]
    is_needed = bool(inside) and any(work[p].busy.backward_s for p in positions)
    return Gathers(inside, len(work), positions[0], positions[-1], is_needed)


def kept_gathers(gathers: GathersAndWork) -> list[Gathers]:
    """What operators outside regions keep, in the order of the forward."""
    program, asked = gathers.program, gathers.asked
    found: list[Gathers] = []
    made = {item.result.name for item in program.body if isinstance(item, Adapt)}
    for position, item in enumerate(program.body):
        in_region = gathers.work[position].region is not None
        if not isinstance(item, Adapt) or joins(item) or in_region:
            continue
        group = gathers_at(program.body, position)
        places = [asked[adapter.result.name] for adapter in group if adapter.result.name in asked]
        # What is gathered along a further axis comes after the first gather, and is waited for.
        if places and not (item.value.name in made and item.value.name in asked):
            firsts, lasts = zip(*places, strict=True)
            found.append(Gathers([position], min(firsts), max(lasts), position))
    return found
