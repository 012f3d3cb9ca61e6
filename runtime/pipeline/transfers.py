"""What crosses between stages in one step: receives posted ahead, sends under way, hand-overs
between stages of one rank.

Messages from one rank to another are one channel (see :mod:`~shardwright.runtime.ranks.messages`).
The sender sends what an action made right after it, in the order of ``(receiving stage, name,
box)``. A receiver knows the actions of its peers, so it posts the receives of each channel in the
order in which its peer sends, as far ahead as ``schedule_actions.AHEAD`` says, and
further where a message it needs comes after others of the channel.

What is sent must live until it is gone, and not every transport tells when that is: gloo does so to
nobody who does not wait. But a rank sends what an action made after it has received what the action
needs. So what comes from a peer tells that everything is gone which that peer has used up to then,
and waiting for it takes no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.runtime.errors import UsageError
from shardwright.runtime.pipeline.segment import Segment, Transfer, box_shape, part
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.messages import Messages, Sending
from shardwright.runtime.ranks.transport import Work
from shardwright.runtime.schedule_actions import AHEAD, PAYLOADS, Payload, ScheduleAction
from shardwright.runtime.transfer import Box


class Arrival(NamedTuple):
    """A local tensor that one action needs: which stage uses it, and what is in it."""

    payload: Payload
    stage: int
    peer: int  # the stage it comes from
    name: str
    microbatch: int


class _Piece(NamedTuple):
    """A part of a local tensor that comes from, or goes to, another rank."""

    transfer: Transfer
    stage: int  # of this rank
    box: Box


class _Part(NamedTuple):
    """The part of a local tensor in ``box`` that ``peer`` sends after its action number ``action``.
    ``staging``: a buffer of its own, where it needs one.
    """

    work: Work
    staging: Tensor | None
    box: Box
    peer: int
    action: int


@dataclass(eq=False)
class _Buffer:
    """A local tensor that is being received, and its parts under way."""

    tensor: Tensor
    parts: list[_Part] = field(default_factory=list)


class _Sent(NamedTuple):
    """A message on its way to ``peer``, whose action number ``action`` needs it; ``None`` if that
    peer sends nothing back.
    """

    sending: Sending
    peer: int
    action: int | None


class Routes:
    """Which parts of which tensors of a microbatch this rank exchanges with whom, in the order of
    the channels.
    """

    def __init__(self, rank: int, segments: Mapping[int, Segment]) -> None:
        self.rank = rank
        self.segments = segments
        # Pieces that come in, by sender, kind and the stage that sends.
        incoming: dict[tuple[int, Payload, int], list[_Piece]] = {}
        for stage, segment in segments.items():
            for transfer in segment.receives:
                for peer, box in transfer.pieces:
                    incoming.setdefault((peer, "activations", transfer.stage), []).append(
                        _Piece(transfer, stage, box)
                    )
            for transfer in segment.sends:
                for peer, box in transfer.grad_pieces if transfer.differentiable else ():
                    incoming.setdefault((peer, "gradients", transfer.stage), []).append(
                        _Piece(transfer, stage, box)
                    )
        # By peer, payload and sending stage, in the order in which the peer sends.
        self._incoming = {}
        for key, pieces in incoming.items():
            if key[0] != rank:
                there = (piece for piece in pieces if _is_there(piece.box))
                in_order = sorted(there, key=lambda p: (p.stage, p.transfer.name, p.box))
                self._incoming[key] = in_order

    @property
    def senders(self) -> set[int]:
        """The unit ranks that send to this one."""
        return {peer for peer, _, _ in self._incoming}

    @property
    def receivers(self) -> set[int]:
        """The unit ranks that this one sends to."""
        pieces: list[tuple[int, Box]] = []
        for segment in self.segments.values():
            for transfer in segment.sends:
                pieces += transfer.pieces
            for transfer in segment.receives:
                pieces += transfer.grad_pieces if transfer.differentiable else ()
        return {peer for peer, box in pieces if _is_there(box)} - {self.rank}

    def arrivals(self, peer: int, action: ScheduleAction) -> list[tuple[Arrival, _Piece]]:
        """What comes from a peer that runs this action, in order."""
        payload = PAYLOADS.get(action.kind)
        if payload is None:
            return []
        found = []
        for piece in self._incoming.get((peer, payload, action.stage), ()):
            name, target = piece.transfer.name, action.stage
            arrival = Arrival(payload, piece.stage, target, name, action.microbatch)
            found.append((arrival, piece))
        return found

    def needs(self, action: ScheduleAction) -> list[tuple[Arrival, Transfer]]:
        """What an action of this rank receives."""
        payload = PAYLOADS.get(action.kind)
        # A weight gradient receives nothing.
        if payload is None:
            return []
        segment = self.segments[action.stage]
        transfers = (
            segment.receives
            if payload == "activations"
            else [t for t in segment.sends if t.differentiable]
        )
        return [
            (Arrival(payload, action.stage, t.stage, t.name, action.microbatch), t)
            for t in transfers
        ]


class Exchange:
    """All transfers of one rank in one step.

    ``routes``: those of each microbatch. ``actions``: what each unit rank that takes part does,
    without what is left out in this step. ``to_world``: the rank of the world that is a unit rank
    here.
    """

    def __init__(
        self,
        rank: int,
        routes: Sequence[Routes],
        actions: Mapping[int, Sequence[ScheduleAction]],
        messages: Messages,
        to_world: Callable[[int], int],
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._routes = routes
        self._messages = messages
        self._to_world = to_world
        self._device = device
        senders = sorted({peer for of_microbatch in routes for peer in of_microbatch.senders})
        self._channels: dict[int, deque[tuple[int, Arrival, _Piece]]] = {
            peer: deque() for peer in senders
        }
        for peer, channel in self._channels.items():
            for number, action in enumerate(actions[peer]):
                arrivals = routes[action.microbatch].arrivals(peer, action)
                channel.extend((number, *item) for item in arrivals)

        def numbers(listed: Sequence[ScheduleAction]) -> dict[tuple[Payload, int, int], int]:
            receiving = [(n, a) for n, a in enumerate(listed) if a.kind in PAYLOADS]
            return {(PAYLOADS[a.kind], a.stage, a.microbatch): n for n, a in receiving}

        # By peer: the numbers of its actions by what they receive.
        self._used_by = {peer: numbers(actions[peer]) for peer in senders}
        self._buffers: dict[Arrival, _Buffer] = {}
        self._posted: dict[tuple[int, Arrival], int] = {}
        self._local: dict[Arrival, list[Tensor]] = {}
        self._sending: deque[_Sent] = deque()
        self._waiting: dict[
            tuple[Payload, int, int], ScheduleAction
        ] = {}  # own actions by what they receive
        self._to_post: deque[list[tuple[Arrival, Transfer]]] = deque()
        self._num_ahead = 0  # actions of which the receives are posted and that have not run
        for action in actions[rank]:
            needed = routes[action.microbatch].needs(action)
            if needed:
                self._waiting[needed[0][0].payload, action.stage, action.microbatch] = action
                self._to_post.append(needed)

    def post_ahead(self, action: ScheduleAction) -> None:
        """Post the receives of ``action``, which runs now, and of those to come that are near
        enough.
        """
        while self._sending and self._sending[0].sending.is_completed():
            self._sending.popleft()
        needed = self._routes[action.microbatch].needs(action)
        while self._to_post and self._num_ahead < AHEAD + bool(needed):
            for arrival, transfer in self._to_post.popleft():
                self._post(arrival, transfer)
            self._num_ahead += 1
        self._num_ahead -= bool(needed)

    def receive(self, arrival: Arrival, transfer: Transfer) -> Tensor:
        """Wait for a local tensor of ``transfer``. It is new, or a view of what another stage of
        this rank made.
        """
        # Pieces from other ranks, and those that another stage of this rank has made.
        pieces = _remote_and_local(arrival, transfer, self._rank)
        local = self._local.pop(arrival, [])
        assert len(local) == len(pieces.local), f"{arrival} is used before it is made"
        # All of it was made here: no copy.
        if pieces.local and box_shape(pieces.local[0]) == transfer.shape:
            return local[0]
        buffer = self._buffers.pop(arrival, None)
        if buffer is None:
            buffer = _Buffer(torch.empty(transfer.shape, dtype=transfer.dtype, device=self._device))
        # Contiguous parts arrive in place, others by way of a buffer.
        for item in buffer.parts:
            item.work.wait()
            if item.staging is not None:
                part(buffer.tensor, item.box).copy_(item.staging)
            self._let_go(item.peer, item.action)
        for box, x in zip(pieces.local, local, strict=True):
            part(buffer.tensor, box).copy_(x)
        return buffer.tensor

    def send(self, action: ScheduleAction, transfer: Transfer, x: Tensor) -> None:
        """Start to send this rank's tensor of ``transfer`` to all ranks that need a part of it."""
        payload = PAYLOADS[action.kind]
        x = x.detach()
        if x.dtype != transfer.dtype and x.device.type != "cpu":
            raise _other_dtype(action, transfer, x)
        assert x.shape == transfer.shape and x.dtype == transfer.dtype, (
            f"{transfer.name!r} of {action} is {x.dtype}{list(x.shape)}, not "
            f"{transfer.dtype}{list(transfer.shape)}"
        )
        pieces = transfer.pieces if payload == "activations" else transfer.grad_pieces
        title = (
            repr(transfer.name)
            if payload == "activations"
            else f"the gradient of {transfer.name!r}"
        )
        # In the order in which the receiver expects them.
        for peer, box in sorted(pieces, key=lambda piece: piece[1]):
            # To a stage of this rank: kept for it, not sent.
            if peer == self._rank:
                arrival = Arrival(
                    payload, transfer.stage, action.stage, transfer.name, action.microbatch
                )
                self._local.setdefault(arrival, []).append(part(x, box))
            elif _is_there(box):
                what = f"{title} of {action}"
                sending = self._messages.send(
                    part(x, box), self._to_world(peer), what, phase=_phase(payload)
                )
                # Kept alive until the receiver has used it.
                used_by = self._used_by.get(peer, {}).get(
                    (payload, transfer.stage, action.microbatch)
                )
                self._sending.append(_Sent(sending, peer, used_by))

    def finish(self) -> None:
        """Wait until all that was sent may be freed."""
        while self._sending:
            self._sending.popleft().sending.wait()

    def _let_go(self, peer: int, action: int) -> None:
        """What this action of ``peer`` has made has come: let go of all that it and those before it
        have used.
        """
        kept: deque[_Sent] = deque()
        for sent in self._sending:
            if sent.peer == peer and sent.action is not None and sent.action <= action:
                sent.sending.wait()
            else:
                kept.append(sent)
        self._sending = kept

    def _post(self, arrival: Arrival, transfer: Transfer) -> None:
        """Post the receives of one tensor, and of what its senders send before."""
        missing: dict[int, int] = {}
        for peer, _ in _remote_and_local(arrival, transfer, self._rank).remote:
            missing[peer] = missing.get(peer, 0) + 1
        for peer, count in missing.items():
            while self._posted.get((peer, arrival), 0) < count:
                assert self._channels[peer], f"rank {peer} does not send {arrival}"
                self._post_next(peer)
            del self._posted[peer, arrival]

    def _post_next(self, peer: int) -> None:
        # The next piece of the channel, into its place in the whole tensor.
        action, arrival, (transfer, _, box) = self._channels[peer].popleft()
        buffer = self._buffers.get(arrival)
        if buffer is None:
            buffer = _Buffer(torch.empty(transfer.shape, dtype=transfer.dtype, device=self._device))
            self._buffers[arrival] = buffer
        target = part(buffer.tensor, box)
        # A message needs contiguous memory.
        staging = (
            None
            if target.is_contiguous()
            else torch.empty(box_shape(box), dtype=transfer.dtype, device=self._device)
        )
        title = (
            repr(arrival.name)
            if arrival.payload == "activations"
            else f"the gradient of {arrival.name!r}"
        )
        what = f"{self._waiting[arrival.payload, arrival.stage, arrival.microbatch]} for {title}"
        received = target if staging is None else staging
        work = self._messages.receive_(
            received, self._to_world(peer), what, phase=_phase(arrival.payload)
        )
        buffer.parts.append(_Part(work, staging, box, peer, action))
        self._posted[peer, arrival] = self._posted.get((peer, arrival), 0) + 1


def _other_dtype(action: ScheduleAction, transfer: Transfer, x: Tensor) -> UsageError:
    dtype, traced = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, transfer.dtype))
    return UsageError(
        f"{transfer.name!r}, which {action} sends to another stage, is {dtype} on {x.device} "
        f"and was traced as {traced}",
        why=f"autocast computes more operators in float32 on {x.device.type} than on a CPU, "
        "whose list tracing knows",
        hint=f"settle its dtype in the model, as with `.to(torch.{dtype})`, or cut the stages "
        "elsewhere",
    )


class _Pieces(NamedTuple):
    remote: list[tuple[int, Box]]
    local: list[Box]


def _remote_and_local(arrival: Arrival, transfer: Transfer, rank: int) -> _Pieces:
    """Where the parts of an incoming tensor come from, in the order in which they are sent."""
    pieces = sorted(
        transfer.pieces if arrival.payload == "activations" else transfer.grad_pieces,
        key=lambda piece: piece[1],
    )
    remote = [(peer, box) for peer, box in pieces if peer != rank and _is_there(box)]
    return _Pieces(remote, [box for peer, box in pieces if peer == rank])


def _is_there(box: Box) -> bool:
    return all(stop > start for start, stop in box)


def _phase(payload: Payload) -> Phase:
    return "forward" if payload == "activations" else "backward"
