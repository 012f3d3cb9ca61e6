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
- **Recompute regions** gather in their second forward when they need a weight, none ahead.

Ranks do one collective at a time along an axis. So a message over the same axes that is waited for,
such as the reduce-scatter of a gradient, ends what hides a gather: it comes after the gather.
Joining pieces that do not arrive in their places is work of the device, and takes its time.

Example: three weights, gathers of 2 ms, and products of 1.5 ms forward and 3 ms backward. In
forward the first gather takes 2 ms, the others 0.5 ms each behind the product before them. In
backward the last weight takes 2 ms again. The product of the last one hides the gather of the
second, and that of the second the gather of the first, so both cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.program import Adapt, Program, gathers_at, joins

Both = tuple[float, float]


@dataclass(frozen=True)
class Message:
    """What a gather sends, in seconds: in forward, and once more in backward."""

    forward_s: float
    again_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """What an instruction does, forward and backward: the seconds in which it computes, and the
    axes over which it communicates, whose messages it waits for.
    """

    busy: OpTime
    axes: tuple[Collection[str], Collection[str]]
    runs_again: bool = False


def hidden_ahead(
    program: Program,
    messages: Mapping[int, Message],
    work: Sequence[Work],
    asked: Mapping[str, tuple[int, int]],
    device: Device,
) -> dict[int, Both]:
    """The seconds of gathers that cost nothing, forward and again in backward, by the position of
    the first gather of each collective.

    ``messages``: those of the gathers, by the same positions. ``work``: that of each instruction.
    ``asked``: where operators keep what backward gathers again (:func:`kept_weights.asked_again`).
    """
    hidden = dict.fromkeys(messages, (0.0, 0.0))
    for position, start in _started_in_forward(program).items():
        message_s = messages[position].forward_s
        busy_s = _busy_s(work[start + 1 : position], 0, _axes_at(program, position))
        hidden[position] = device.hidden_s(message_s, busy_s), 0.0
    for position, (start, until) in _started_in_backward(program, work, asked).items():
        message_s = messages[position].again_s
        # From the backward of the operator at ``start``, down to that before the one that asks.
        between = work[start:until:-1]
        busy_s = _busy_s(between, 1, _axes_at(program, position))
        hidden[position] = hidden[position][0], device.hidden_s(message_s, busy_s)
    return hidden


def _axes_at(program: Program, position: int) -> tuple[str, ...]:
    gather = program.body[position]
    assert isinstance(gather, Adapt)
    return gather.step.axes


def _busy_s(between: Sequence[Work], direction: int, axes: Sequence[str]) -> float:
    """The seconds that are computed until something waits for a message over the same axes. A
    region that backward runs again counts as such: it gathers its own weights.
    """
    found = 0.0
    for item in between:
        if not set(axes).isdisjoint(item.axes[direction]) or (direction and item.runs_again):
            break
        found += item.busy.backward_s if direction else item.busy.forward_s
    return found


def _started_in_forward(program: Program) -> dict[int, int]:
    """The gathers that forward starts ahead, by position, and where: at the weight before."""
    found: dict[int, int] = {}
    before: int | None = None
    for position, item in enumerate(program.body):
        if not isinstance(item, Adapt) or not item.gathers_weight or joins(item):
            continue
        if item.value.kind is not ValueKind.PARAMETER:
            continue
        if before is not None:
            found[position] = _end_of_group(program, before)
        before = position
    return found


def _end_of_group(program: Program, position: int) -> int:
    return position + len(gathers_at(program.body, position)) - 1


@dataclass
class _Use:
    """What one collective gathers again: its ``position``, and where operators keep it."""

    position: int
    first: int
    last: int


def _started_in_backward(
    program: Program, work: Sequence[Work], asked: Mapping[str, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """The gathers that backward starts ahead, by position: the operator at whose backward each is
    started, and the one at whose backward it is needed.
    """
    uses: list[_Use] = []
    made = {item.result.name for item in program.body if isinstance(item, Adapt)}
    for position, item in enumerate(program.body):
        if not isinstance(item, Adapt) or joins(item) or work[position].runs_again:
            continue
        group = gathers_at(program.body, position)
        places = [asked[adapter.result.name] for adapter in group if adapter.result.name in asked]
        # What is gathered along a further axis comes after the first gather, and is waited for.
        if places and not (item.value.name in made and item.value.name in asked):
            firsts, lasts = zip(*places, strict=True)
            uses.append(_Use(position, min(firsts), max(lasts)))
    found: dict[int, tuple[int, int]] = {}
    there: set[int] = set()  # what was started or asked for
    for use in sorted(uses, key=lambda use: -use.last):
        there.add(use.position)
        earlier = [other for other in uses if other.position < use.position]
        following = next((o for o in reversed(earlier) if o.first < use.last), None)
        if following is not None and following.position not in there:
            there.add(following.position)
            found[following.position] = use.last, following.last
    return found
