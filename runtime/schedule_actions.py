"""The actions of a pipeline schedule: what one rank does, one after the other, as data.

A **stage** is a contiguous piece of the model; a **microbatch** is one sample of a step. An action
has a text form, which is what schedules are written, stored and reported in:

=======  ==================================================================================
``0F3``  stage 0 runs forward on microbatch 3
``0B3``  stage 0 runs its whole backward on microbatch 3
``0I3``  stage 0 computes the gradients of its inputs for microbatch 3, and only these
``0W3``  stage 0 computes the gradients of its parameters for microbatch 3, after ``0I3``
=======  ==================================================================================

A microbatch's backward is either ``B``, or ``I`` and ``W``. The split is that of "Zero Bubble
Pipeline Parallelism" (Qi et al., 2023), whose ``B`` is the ``I`` here. Messages between ranks
follow from the actions at both ends (:mod:`shardwright.runtime.pipeline.transfers`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


Payload = Literal["activations", "gradients"]
"""What a message carries: results of a forward on their way to a later stage, or their gradients on
the way back.
"""

PAYLOADS: Mapping[ActionKind, Payload] = {
    ActionKind.FORWARD: "activations",
    ActionKind.BACKWARD: "gradients",
    ActionKind.INPUT_GRADIENT: "gradients",
}
"""What an action receives and sends."""

AHEAD = 2
"""Receives are posted for the action that runs and for so many later ones that receive something:
messages travel while what came before them is used.
"""


@dataclass(frozen=True, slots=True)
class ScheduleAction:
    """One action of one stage on one microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})", re.ASCII)

_LONG_ACTION = re.compile(r"\d+[FBIW]\d+", re.ASCII)

MOST_CELLS = 2**20
"""The most stages times microbatches of a schedule: more would fill the memory before anything else
notices.
"""


def parse_action(text: str) -> ScheduleAction:
    """The action with this text form: ``parse_action(str(action)) == action``.

    Raises:
        PlanError: not a text form of an action.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise PlanError(
            f"{text[:60]!r} is not an action of a schedule",
            why="its numbers have more than six digits"
            if _LONG_ACTION.fullmatch(text)
            else "an action is written <stage><kind><microbatch>, with kind F, B, I or W",
            hint="write for example 0F3, 0B3, 0I3, 0W3; messages and reductions follow from these",
        )
    stage, kind, microbatch = match.groups()
    return ScheduleAction(ActionKind(kind), int(stage), int(microbatch))


def parse_actions(text: str) -> tuple[ScheduleAction, ...]:
    """The actions in ``text``, separated by blanks, line ends or commas.

    Raises:
        PlanError: one of them is not a text form of an action.
    """
    return tuple(parse_action(word) for word in text.replace(",", " ").split())
