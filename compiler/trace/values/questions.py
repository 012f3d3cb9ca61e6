"""Places where a library asks whether it is traced before it looks at values, and what it is told.

``if not is_tracing(mask) and mask.all(): return None`` has two ways: one for calls whose values can
be looked at, and one that is meant to be right for all values. Eager takes the first. A trace takes
the second, unless it is told to take the first with the values of the dummy arguments:
:mod:`shardwright.compiler.trace.values.as_eager` says when both are traced and compared.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType

Question = tuple[str, int, str]
"""File, line and name of the function that asks."""

_ONLY_WARN = {"warn_if_padding_and_no_attention_mask"}
"""Functions of transformers that ask, and do nothing but warn. Both ways compute the same."""


class Questions:
    """The questions of one trace.

    ``answered``: the questions that are told to look at the values of the dummy arguments; ``None``
    for all but ``refused``.
    """

    def __init__(
        self, answered: Collection[Question] | None = (), refused: Collection[Question] = ()
    ) -> None:
        self._answered, self._refused = answered, frozenset(refused)
        self._looking: list[tuple[FrameType, Question]] = []
        self.asked: dict[Question, None] = {}
        self.unanswered: dict[Question, None] = {}
        """Questions that look at values which do not follow from the arguments."""
        self.have_looked = False
        """Whether an asker has been given values of the dummy arguments."""

    def may_look(self, frame: FrameType) -> bool:
        """Note that the function of ``frame`` asks; whether it is told that values can be looked
        at.
        """
        if frame.f_code.co_name in _ONLY_WARN:
            return False
        question = _question(frame)
        self.asked[question] = None
        # A question whose answer has led nowhere is not answered the next time.
        if question in self._refused or (
            self._answered is not None and question not in self._answered
        ):
            return False
        self._looking.append((frame, question))
        return True

    @property
    def hold_in_every_call(self) -> bool:
        """Whether every asker has got the answer of eager, and no value has decided what it did
        then: such a trace is what eager does in every call.
        """
        return not (self.have_looked or self._refused)

    def looks(self) -> Question | None:
        """The question whose asker runs now, itself or in what it calls, and was told to look."""
        frame: FrameType | None = sys._getframe(1) if self._looking else None
        while frame is not None:
            for asker, question in self._looking:
                if asker is frame:
                    return question
            frame = frame.f_back
        return None

    def forget_frames(self) -> None:
        """Let go of the frames: they hold tensors of the trace."""
        self._looking.clear()


def _question(frame: FrameType) -> Question:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
