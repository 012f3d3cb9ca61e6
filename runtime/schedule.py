"""The actions of a pipeline schedule: what one rank does, one after the other, as data.

A **stage** is a contiguous piece of the model; a **microbatch** is one sample of a step. An action has a text form, which
is what schedules are written, stored and reported in:

==============  =====================================================================================
``0F3``         stage 0 runs forward on microbatch 3
``0B3``         stage 0 runs its whole backward on microbatch 3
``0I3``         stage 0 computes the gradients of its inputs for microbatch 3, and only these
``0W3``         stage 0 computes the gradients of its parameters for microbatch 3, after ``0I3``
``0SEND_F3>1``  what ``0F3`` made for stage 1 starts on its way there
``1RECV_F3<0``  a buffer for what ``0F3`` made for stage 1 is posted; ``1F3`` waits until it is filled
``1SEND_B3>0``  the gradient that ``1B3`` or ``1I3`` made of what stage 0 sent starts on its way back
``0RECV_B3<1``  a buffer for that gradient is posted; ``0B3`` or ``0I3`` waits until it is filled
``0REDUCE3``    the gradients of stage 0 are complete: microbatch 3 was the last to add to them
==============  =====================================================================================

A microbatch's backward is either ``B``, or ``I`` and ``W``. The split is that of "Zero Bubble Pipeline Parallelism" (Qi et
al., 2023), whose ``B`` is the ``I`` here. All messages from one rank to another form one channel: they are sent and received
in the same order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from shardwright.runtime.errors import PlanError


class ActionKind(StrEnum):
    """What an action does; the value is how text names it."""

    FORWARD = "F"
    """Run the stage's forward; its activations are held from here on."""
    BACKWARD = "B"
    """Compute the gradients of inputs and parameters; nothing is held any more."""
    INPUT_GRADIENT = "I"
    """Compute the gradients of the inputs only, so that they can travel on."""
    WEIGHT_GRADIENT = "W"
    """Compute the gradients of the parameters; nothing is held any more."""
    SEND = "SEND"
    """Start sending; the stage's next actions need not wait for it."""
    RECV = "RECV"
    """Post a buffer to receive into; the action that uses it waits."""
    REDUCE = "REDUCE"
    """Start reducing the gradients of the stage's parameters over their ranks."""


COMPUTES = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT})
"""The kinds that take computing time. The others are derived from the order of these."""

Payload = Literal["activations", "gradients"]
"""What a message carries: results of a forward on their way to a later stage, or their gradients on the way back."""

Message = tuple[Payload, int, int, int]
"""``(payload, sending stage, receiving stage, microbatch)``: what a SEND and its RECV have in common."""


@dataclass(frozen=True, slots=True)
class ScheduleAction:
    """One action of one stage on one microbatch.

    ``peer`` is the *stage* at the other end of a message and ``what`` its payload; both are ``None`` for other actions.
    The rank of a stage is in the schedule's placement. A message is sent once per pair of stages and microbatch; it holds all
    values that the receiving stage is the first on its rank to use.

    Raises:
        PlanError: a message without peer or payload, or another action with one.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    peer: int | None = None
    what: Payload | None = None

    def __post_init__(self) -> None:
        if self.is_message != (self.peer is not None) or self.is_message != (self.what is not None):
            raise PlanError(
                f"a {self.kind.name} action with peer={self.peer} and what={self.what!r}",
                why="SEND and RECV have a peer stage and a payload, other actions have neither",
                hint='write for example ScheduleAction(ActionKind.SEND, 0, 3, peer=1, what="activations")',
            )

    @property
    def is_message(self) -> bool:
        """Whether this is one end of a message."""
        return self.kind is ActionKind.SEND or self.kind is ActionKind.RECV

    @property
    def is_compute(self) -> bool:
        """Whether this is one of :data:`COMPUTES`."""
        return self.kind in COMPUTES

    def __str__(self) -> str:
        if not self.is_message:
            return f"{self.stage}{self.kind.value}{self.microbatch}"
        letter, arrow = ("F" if self.what == "activations" else "B"), (">" if self.kind is ActionKind.SEND else "<")
        return f"{self.stage}{self.kind.value}_{letter}{self.microbatch}{arrow}{self.peer}"


def message_of(action: ScheduleAction) -> Message:
    """The message that a SEND or a RECV is one end of."""
    assert action.peer is not None and action.what is not None
    ends = (action.stage, action.peer) if action.kind is ActionKind.SEND else (action.peer, action.stage)
    return (action.what, *ends, action.microbatch)


_COMPUTE = re.compile(r"(\d+)(F|B|I|W|REDUCE)(\d+)", re.ASCII)
_MESSAGE = re.compile(r"(\d+)(?:(SEND)_([FB])(\d+)>|(RECV)_([FB])(\d+)<)(\d+)", re.ASCII)


def parse_action(text: str) -> ScheduleAction:
    """The action with this text form: ``parse_action(str(action)) == action``.

    Raises:
        PlanError: not a text form of an action.
    """
    if match := _COMPUTE.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return ScheduleAction(ActionKind(kind), int(stage), int(microbatch))
    if match := _MESSAGE.fullmatch(text):
        stage, kind, letter, microbatch, peer = (group for group in match.groups() if group is not None)
        what: Payload = "activations" if letter == "F" else "gradients"
        return ScheduleAction(ActionKind(kind), int(stage), int(microbatch), int(peer), what)
    raise PlanError(
        f"{text!r} is not an action of a schedule",
        why="an action is written <stage><kind><microbatch>, and messages name the other stage",
        hint="write for example 0F3, 0B3, 0I3, 0W3, 0SEND_F3>1, 1RECV_F3<0, 0REDUCE3",
    )


def parse_actions(text: str) -> tuple[ScheduleAction, ...]:
    """The actions in ``text``, separated by blanks, line ends or commas.

    Raises:
        PlanError: one of them is not a text form of an action.
    """
    return tuple(parse_action(word) for word in text.replace(",", " ").split())
