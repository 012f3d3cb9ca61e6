"""The published pipeline schedules, each a function from sizes to the order of work.

- GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
  Parallelism", 2019
- 1F1B: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM", 2021, sections 2.2.1 (PipeDream-Flush) and 2.2.2 (with interleaved stages)
- ZB-H1: Qi et al., "Zero Bubble Pipeline Parallelism", 2023
- ZB-V: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024

In formulas p is the number of ranks, m of microbatches, v of chunks (stages per rank), r a rank.
:data:`SCHEDULES` lists all by name with what they need.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.compiler.schedule.schedule import (
    RankActions,
    Schedule,
    looped_placement,
    v_placement,
)
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import PlanError, brief, did_you_mean
from shardwright.runtime.schedule_actions import MOST_CELLS, ActionKind, ScheduleAction

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT

StageRuns = list[tuple[int, int]]
"""Forwards or backwards in order, each a (stage, microbatch)."""


@checked
def generate(
    name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """The published schedule ``name`` for ``num_ranks`` ranks with ``chunks`` stages each.

    ``chunks`` defaults to the least that the schedule works with. Any number of microbatches from 1
    up will do, unless the schedule's entry in :data:`SCHEDULES` says otherwise.

    Raises:
        PlanError: an unknown name, or sizes that the schedule cannot have.
    """
    return _generated(name, num_ranks, num_microbatches, chunks)


@functools.lru_cache(maxsize=64)
def _generated(name: str, num_ranks: int, num_microbatches: int, chunks: int | None) -> Schedule:
    """The schedule, made once: a search asks for the same few many times."""
    if name not in SCHEDULES:
        raise PlanError(
            f"unknown pipeline schedule {name!r}", hint=did_you_mean(name, tuple(SCHEDULES))
        )
    method = SCHEDULES[name]
    chunks = method.min_chunks if chunks is None else chunks
    method.check(num_ranks, num_microbatches, chunks)
    placement = method.placement(num_ranks, chunks)
    actions = tuple(
        method.order(rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks)
    )
    return Schedule(num_microbatches, placement, actions, name)


def _gpipe(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> RankActions:
    """All forwards, then all backwards in the opposite order. Bubble (p-1)/(m+p-1) of the time; all
    m microbatches are held.
    """
    forwards = _rounds(rank, num_ranks, num_microbatches, range(chunks))
    # The last forward is of the last chunk, the only one whose gradient is there at once.
    return _one_forward_one_backward(forwards, forwards[::-1], warmup=len(forwards))


def _1f1b(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> RankActions:
    """One forward, one backward after p-r-1 forwards to begin with. The bubble of GPipe; at most
    p-r microbatches are held.
    """
    runs = [(rank, microbatch) for microbatch in range(num_microbatches)]
    return _one_forward_one_backward(runs, runs, warmup=num_ranks - rank - 1)


def _1f1b_interleaved(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> RankActions:
    """1F1B with v stages per rank, p microbatches at a time through each. Bubble (p-1)/(v*m) of the
    work, v times the messages.

    2(p-r-1) + (v-1)p forwards come first: p of each earlier chunk, and twice the way to the last
    rank, as the first microbatch goes there and its gradient comes back.
    """
    forwards = _rounds(rank, num_ranks, num_microbatches, range(chunks))
    backwards = _rounds(rank, num_ranks, num_microbatches, range(chunks)[::-1])
    return _one_forward_one_backward(
        forwards, backwards, warmup=2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks
    )


def _zb_h1(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> RankActions:
    """1F1B where weight gradients wait for the time that would be bubble.

    Input gradients travel on at once. Rank r lets r weight gradients wait, so that each rank holds
    p microbatches, the most that 1F1B holds anywhere. With equal times of F, I and W a third of the
    bubble of 1F1B is left (m >= p).
    """
    work = _StageWork()
    for _ in range(num_ranks - rank - 1):
        work.run(F, rank)
    while work.count(W, rank) < num_microbatches:
        if work.count(F, rank) < num_microbatches:
            work.run(F, rank)
        if work.count(I, rank) < num_microbatches:
            work.run(I, rank)
        # Past the last input gradient nothing is left to wait for: the rest of the weight gradients
        # run.
        if work.waiting(rank) > rank or work.count(I, rank) == num_microbatches:
            work.run(W, rank)
    return work.actions(num_microbatches)


def _zb_v(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> RankActions:
    """Two stages per rank on a V: ranks work on the way down and up, weight gradients fill what
    would be bubble.

    Rank r has the stages r and 2p-1-r, so that all ranks have their first backward early and hold
    2p stage activations of half the size: as much as 1F1B at most. With equal times of F, I and W
    nothing is left of the bubble but the way of the first microbatch down the ranks, (p-1)/(6m) of
    the work (m >= 2p).
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    # The fixed phases may name more microbatches than there are; these are left out at the end.
    work = _StageWork()
    for _ in range(2 * (num_ranks - rank) - 1):  # until the first microbatch comes back up
        work.run(F, down)
    for _ in range(rank):  # until its gradient comes down
        work.run(F, up)
        work.run(F, down)
    for _ in range(num_ranks - rank):  # until its gradient has been down and comes up again
        work.run(F, up)
        work.run(I, up)
        work.run(W, up)
    while work.count(F, up) < num_microbatches:
        if work.count(F, down) < num_microbatches:
            work.run(F, down)
        work.run(I, down)
        work.run(W, down)
        work.run(F, up)
        work.run(I, up)
        work.run(W, up)
    for _ in range(rank):  # others wait for these gradients, nobody for the weights
        work.run(I, down)
        work.run(I, up)
    for _ in range(num_ranks - rank):
        work.run(I, down)
        work.run(W, down)
    for stage in (up, down):
        for _ in range(work.waiting(stage)):
            work.run(W, stage)
    return work.actions(num_microbatches)


def _infer_pipe(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> RankActions:
    """Forwards only. Bubble (p-1)/(v*m) of the work where p divides m or v is 1; nothing is
    held.
    """
    return tuple(
        ScheduleAction(F, *run) for run in _rounds(rank, num_ranks, num_microbatches, range(chunks))
    )


def _rounds(rank: int, num_ranks: int, num_microbatches: int, chunks: range) -> StageRuns:
    """The pairs (stage, microbatch) of a rank in order: p microbatches go through its chunks one
    after the other, then the next p.
    """
    runs = []
    # Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", section
    # 2.2.
    for start in range(0, num_microbatches, num_ranks):
        end = min(start + num_ranks, num_microbatches)
        runs += [
            (chunk * num_ranks + rank, microbatch)
            for chunk in chunks
            for microbatch in range(start, end)
        ]
    return runs


def _one_forward_one_backward(
    forwards: StageRuns, backwards: StageRuns, warmup: int
) -> RankActions:
    """The actions of a rank: ``warmup`` forwards, then forwards and backwards by turns, then the
    backwards that are left.
    """
    actions = [ScheduleAction(F, *run) for run in forwards[:warmup]]
    left = iter(backwards)
    for run in forwards[warmup:]:
        actions += [ScheduleAction(F, *run), ScheduleAction(B, *next(left))]
    return (*actions, *(ScheduleAction(B, *run) for run in left))


class _StageWork:
    """Builds one rank's actions: each kind takes the microbatches of a stage in ascending order."""

    def __init__(self) -> None:
        self._actions: list[ScheduleAction] = []
        self._counts: Counter[tuple[ActionKind, int]] = Counter()

    def run(self, kind: ActionKind, stage: int) -> None:
        """Add the next microbatch's action of this kind."""
        self._actions.append(ScheduleAction(kind, stage, self.count(kind, stage)))
        self._counts[kind, stage] += 1

    def count(self, kind: ActionKind, stage: int) -> int:
        return self._counts[kind, stage]

    def waiting(self, stage: int) -> int:
        """How many weight gradients could be computed."""
        return self.count(I, stage) - self.count(W, stage)

    def actions(self, num_microbatches: int) -> RankActions:
        """All actions of the first microbatches.

        What depends on what lies within one microbatch, so leaving out whole microbatches cannot
        break an order that works.
        """
        return tuple(action for action in self._actions if action.microbatch < num_microbatches)


@dataclass(frozen=True)
class ScheduleMethod:
    """A published schedule and what it needs.

    ``order(rank, num_ranks, num_microbatches, chunks)`` makes one rank's actions; ``max_chunks`` is
    ``None`` where any number of chunks works.
    """

    name: str
    order: Callable[[int, int, int, int], RankActions]
    min_chunks: int = 1
    max_chunks: int | None = None
    v_shaped: bool = False
    whole_rounds: bool = False
    """The number of ranks must divide the number of microbatches."""
    trains: bool = True
    splits_backward: bool = False
    """Input and weight gradients are computed by separate actions."""

    def placement(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        """The rank of every stage."""
        return v_placement(num_ranks) if self.v_shaped else looped_placement(num_ranks, chunks)

    def check(self, num_ranks: int, num_microbatches: int, chunks: int) -> None:
        """Refuse sizes that the schedule cannot have.

        Raises:
            PlanError: says which, and what would work.
        """
        for noun, count in (("ranks", num_ranks), ("microbatches", num_microbatches)):
            if count < 1:
                raise PlanError(
                    f"a pipeline with {brief(count)} {noun}",
                    hint=f"ask for at least one of the {noun}",
                )
        if num_ranks * num_microbatches * max(1, chunks) > MOST_CELLS:
            raise PlanError(
                f"schedule {self.name!r} is too long",
                why=f"stages times microbatches are at most {MOST_CELLS:,}; asked for were "
                f"{brief(num_ranks)} ranks, "
                f"{brief(chunks)} stages on each, {brief(num_microbatches)} microbatches",
                hint="ask for fewer microbatches",
            )
        if chunks < self.min_chunks or (self.max_chunks is not None and chunks > self.max_chunks):
            accepted = (
                f"exactly {self.min_chunks}"
                if self.max_chunks == self.min_chunks
                else f"at least {self.min_chunks}"
            )
            raise PlanError(
                f"schedule {self.name!r} with {chunks} stages per rank",
                why=f"it works with {accepted}",
                hint=f"make {num_ranks * self.min_chunks} stages for {num_ranks} ranks, or choose "
                "another schedule",
            )
        # Interleaved schedules take microbatches in rounds of as many as there are ranks.
        if self.whole_rounds and num_microbatches % num_ranks:
            below = num_microbatches // num_ranks * num_ranks
            counts = f"{below} or {below + num_ranks}" if below else f"{num_ranks}"
            raise PlanError(
                f"schedule {self.name!r} with {num_microbatches} microbatches on {num_ranks} ranks",
                why=f"it takes {num_ranks} microbatches at a time, and {num_microbatches} is not "
                "a multiple of that",
                hint=f"use {counts} microbatches, or schedule '1f1b' or 'zb_v', which take any "
                "number",
            )


_METHODS = (
    ScheduleMethod("gpipe", _gpipe),
    ScheduleMethod("1f1b", _1f1b, max_chunks=1),
    ScheduleMethod("1f1b_interleaved", _1f1b_interleaved, min_chunks=2, whole_rounds=True),
    ScheduleMethod("zb_h1", _zb_h1, max_chunks=1, splits_backward=True),
    ScheduleMethod("zb_v", _zb_v, min_chunks=2, max_chunks=2, v_shaped=True, splits_backward=True),
    ScheduleMethod("infer_pipe", _infer_pipe, trains=False),
)

SCHEDULES: Mapping[str, ScheduleMethod] = {method.name: method for method in _METHODS}
"""The schedules by the names that users choose them with."""
