"""The schedule of a pipeline: for each rank, its actions in order; for each stage, its rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.runtime.arguments import checked_fields
from shardwright.runtime.hashed_once import HashedOnce, hashed_once
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction

RankActions = tuple[ScheduleAction, ...]
"""What one rank does, in order."""


@hashed_once
@checked_fields
@dataclass(frozen=True, slots=True)
class Schedule(HashedOnce):
    """The order of work of a pipeline.

    ``placement[stage]`` is the stage's rank, ``actions[rank]`` what that rank does. A rank here is
    a position in the pipeline; with tensor or data parallelism inside the plan it stands for all
    ranks of its stages' sub-mesh, which do the same.

    Nothing is checked here: ``validate`` does that.
    """

    num_microbatches: int
    placement: tuple[int, ...]
    actions: tuple[RankActions, ...]
    name: str = "custom"

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """The number of positions in the pipeline."""
        return len(self.actions)

    @property
    def trains(self) -> bool:
        """Whether there is any backward; a schedule without is for inference."""
        backward = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
        return any(action.kind in backward for actions in self.actions for action in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on ``rank``, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def texts(self) -> tuple[str, ...]:
        """The actions of each rank as text, ``0F0 0F1 0B0 0B1``: what option ``actions`` of the
        policies takes.
        """
        return tuple(" ".join(map(str, actions)) for actions in self.actions)

    def __str__(self) -> str:
        """One line per rank: ``rank 0: 0F0 0F1 0B0 0B1``."""
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(self.texts))


def looped_placement(num_ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """``chunks`` stages per rank, dealt in turn: 2 ranks, 2 chunks -> ``(0, 1, 0, 1)``."""
    return tuple(range(num_ranks)) * chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down and up again: 3 ranks -> ``(0, 1, 2, 2, 1, 0)``. The first rank has
    the last stage too.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))
