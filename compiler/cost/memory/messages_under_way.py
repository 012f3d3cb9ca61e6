"""The bytes of messages that a rank of a pipeline holds while each of its actions runs.

The rules are those of ``runtime.pipeline.transfers``:

- The buffer of a message is there from the moment its receive is posted. Receives are posted for
  the action that runs, for the next :data:`AHEAD` actions that receive something, and for whatever
  comes before these on the same channel.
- A message that was sent is held until its receiver answers: until something arrives that the
  receiver sent after it had used the message. Transports that tell earlier when a message is gone
  hold less, so this is an upper bound.

Ranks of one position are taken to be alike, with the largest pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.runtime.schedule_actions import AHEAD, PAYLOADS, Payload, ScheduleAction


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value that crosses from stage ``source`` to stage ``target``: its bytes on a rank of each,
    and whether a gradient comes back. ``is_kept``: whether autograd of the source keeps it anyway.
    """

    name: str
    source: int
    target: int
    sent_bytes: int
    received_bytes: int
    differentiable: bool
    is_kept: bool = False


class _Incoming(NamedTuple):
    """A message that a position receives."""

    payload: Payload
    value: Value
    microbatch: int


class _Outgoing(NamedTuple):
    """A message that a position has sent to ``peer``, whose action number ``used_by`` uses it."""

    name: tuple[Payload, int, str, int]
    num_bytes: int
    peer: int
    used_by: int


def bytes_under_way(
    position: int,
    actions: Sequence[Sequence[ScheduleAction]],
    positions: Mapping[int, int],
    values: Iterable[Value],
) -> Iterator[int]:
    """The bytes of messages under way while each action of ``position`` runs, in order. What the
    action itself receives or sends does not count.

    ``actions``: the actions of every position that compute. ``positions``: the position of each
    stage.
    """
    ends = _Ends(position, actions, positions, list(values))
    own = actions[position]
    to_post = deque(ends.needs(action) for action in own if ends.receives(action))
    sending: list[_Outgoing] = []
    num_ahead = 0
    for action in own:
        # Post the receives of this action and of the next ``AHEAD`` ones; then take what it needs.
        receives = ends.receives(action)
        while to_post and num_ahead < AHEAD + receives:
            for message in to_post.popleft():
                ends.post(message)
            num_ahead += 1
        num_ahead -= receives
        for message in ends.needs(action):
            # The peer sent this after its action ``number``, so what that action used is gone.
            peer, number = ends.take(message)
            sending = [sent for sent in sending if sent.peer != peer or sent.used_by > number]
        yield ends.posted_bytes + sum({sent.name: sent.num_bytes for sent in sending}.values())
        sending += ends.sends(action)


class _Ends:
    """What the actions of one position receive from others, and send to them. ``posted_bytes``: the
    bytes of receives that are posted and not taken yet.
    """

    def __init__(
        self,
        position: int,
        actions: Sequence[Sequence[ScheduleAction]],
        positions: Mapping[int, int],
        values: Sequence[Value],
    ) -> None:
        self._positions = positions
        self._received: dict[tuple[Payload, int], list[Value]] = {}
        self._sent: dict[tuple[Payload, int], list[Value]] = {}
        # The pairs that get anything, also from another stage of this position.
        self._receives: set[tuple[Payload, int]] = set()
        for value in sorted(values, key=lambda value: value.name):
            pairs: list[tuple[Payload, int, int]] = [("activations", value.source, value.target)]
            pairs += [("gradients", value.target, value.source)] if value.differentiable else []
            for payload, source, target in pairs:
                is_remote = positions[source] != positions[target]
                if positions[source] == position and is_remote:
                    self._sent.setdefault((payload, source), []).append(value)
                if positions[target] == position:
                    self._receives.add((payload, target))
                    if is_remote:
                        self._received.setdefault((payload, target), []).append(value)
        coming = self._coming()
        senders = {positions[stage] for _, stage in coming}
        receivers = {
            positions[value.target if payload == "activations" else value.source]
            for (payload, _), sent in self._sent.items()
            for value in sent
        }
        self._numbers: dict[tuple[Payload, int, int], int] = {}
        for peer in senders | receivers:
            for number, action in enumerate(actions[peer]):
                if action.kind in PAYLOADS:
                    made = (PAYLOADS[action.kind], action.stage, action.microbatch)
                    self._numbers[made] = number
        # A channel is the messages from one peer in the order of its actions, which is the order in
        # which they must be received.
        self._channels: dict[int, deque[_Incoming]] = {}
        for peer in senders:
            channel = self._channels[peer] = deque()
            for action in actions[peer]:
                if action.kind in PAYLOADS:
                    sent = coming.get((PAYLOADS[action.kind], action.stage), ())
                    channel.extend(_Incoming(p, value, action.microbatch) for p, value in sent)
        self._posted: set[_Incoming] = set()
        self.posted_bytes = 0

    def _coming(self) -> dict[tuple[Payload, int], list[tuple[Payload, Value]]]:
        """What an action sends to this position, in the order in which it is sent; by payload and
        sending stage.
        """
        found: dict[tuple[Payload, int], list[tuple[int, str, Value]]] = {}
        for (payload, own), values in self._received.items():
            for value in values:
                # Gradients come back from where the value went.
                source = value.source if payload == "activations" else value.target
                found.setdefault((payload, source), []).append((own, value.name, value))
        return {
            key: [(key[0], value) for *_, value in sorted(items, key=lambda i: i[:2])]
            for key, items in found.items()
        }

    def receives(self, action: ScheduleAction) -> bool:
        """Whether an action gets anything, from wherever."""
        return action.kind in PAYLOADS and (PAYLOADS[action.kind], action.stage) in self._receives

    def needs(self, action: ScheduleAction) -> list[_Incoming]:
        """What an action gets from other positions."""
        payload = PAYLOADS.get(action.kind)
        if payload is None:
            return []
        return [
            _Incoming(payload, value, action.microbatch)
            for value in self._received.get((payload, action.stage), ())
        ]

    def post(self, message: _Incoming) -> None:
        """Post the receive of a message, and of those before it on its channel, unless that has
        happened.
        """
        channel = self._channels[self._sender(message)[0]]
        while message not in self._posted:
            self._posted.add(channel[0])
            self.posted_bytes += _received_bytes(channel.popleft())

    def take(self, message: _Incoming) -> tuple[int, int]:
        """A message has come: the position that sent it, and the number of its action that made
        it.
        """
        self.posted_bytes -= _received_bytes(message)
        return self._sender(message)

    def sends(self, action: ScheduleAction) -> Iterator[_Outgoing]:
        """The messages that go out after an action, without those that autograd keeps anyway."""
        payload = PAYLOADS.get(action.kind)
        if payload is None:
            return
        for value in self._sent.get((payload, action.stage), ()):
            # Activations go on to the target, gradients back to the source.
            forward = payload == "activations"
            other = value.target if forward else value.source
            if not (forward and value.is_kept):
                name = (payload, action.stage, value.name, action.microbatch)
                used_by = self._numbers[payload, other, action.microbatch]
                yield _Outgoing(
                    name,
                    value.sent_bytes if forward else value.received_bytes,
                    self._positions[other],
                    used_by,
                )

    def _sender(self, message: _Incoming) -> tuple[int, int]:
        stage = message.value.source if message.payload == "activations" else message.value.target
        return self._positions[stage], self._numbers[message.payload, stage, message.microbatch]


def _received_bytes(message: _Incoming) -> int:
    value = message.value
    return value.received_bytes if message.payload == "activations" else value.sent_bytes
