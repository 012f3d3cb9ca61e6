"""Pipeline schedules for tests: all published ones up to a size, and random ones that work."""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Iterator
from random import Random

from shardwright.compiler.schedule.dataflow import Dataflow
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


def sizes_of(
    name: str, max_ranks: int, max_microbatches: int, max_chunks: int
) -> Iterator[tuple[int, int, int]]:
    """All (ranks, microbatches, chunks) that a schedule is made for, found from its entry and not
    by trying.
    """
    method = SCHEDULES[name]
    for num_ranks in range(1, max_ranks + 1):
        for num_microbatches in range(1, max_microbatches + 1):
            for chunks in range(
                method.min_chunks, min(max_chunks, method.max_chunks or max_chunks) + 1
            ):
                if num_microbatches % num_ranks == 0 or not method.whole_rounds:
                    yield num_ranks, num_microbatches, chunks


def schedules_of(
    name: str, max_ranks: int = 8, max_microbatches: int = 16, max_chunks: int = 3
) -> Iterator[tuple[int, int, int, Schedule]]:
    """All sizes of a schedule with the schedule itself."""
    for sizes in sizes_of(name, max_ranks, max_microbatches, max_chunks):
        yield *sizes, generate(name, *sizes)


def dependencies(
    schedule: Schedule, dataflow: Dataflow
) -> dict[ScheduleAction, set[ScheduleAction]]:
    """What each compute action needs, without the order of the ranks: the definition, written apart
    from the validator.
    """
    actions = {action for rank in schedule.actions for action in rank}

    def made(stage: int, microbatch: int) -> ScheduleAction:
        split = ScheduleAction(I, stage, microbatch)
        return split if split in actions else ScheduleAction(B, stage, microbatch)

    needs: dict[ScheduleAction, set[ScheduleAction]] = {}
    for action in actions:
        stage, microbatch = action.stage, action.microbatch
        earlier = {
            s
            for s in range(stage)
            if (s, stage) in dataflow.activations
            or schedule.placement[s] == schedule.placement[stage]
        }
        later = {
            s
            for s in range(stage + 1, schedule.num_stages)
            if (stage, s) in dataflow.gradients
            or schedule.placement[s] == schedule.placement[stage]
        }
        if action.kind is F:
            needs[action] = {ScheduleAction(F, s, microbatch) for s in earlier}
        elif action.kind is W:
            needs[action] = {ScheduleAction(I, stage, microbatch)}
        else:
            needs[action] = {ScheduleAction(F, stage, microbatch)} | {
                made(s, microbatch) for s in later
            }
    return needs


def can_run(schedule: Schedule, dataflow: Dataflow) -> bool:
    """Whether needs and the order of the ranks together have no circle."""
    needs = {action: set(before) for action, before in dependencies(schedule, dataflow).items()}
    for actions in schedule.actions:
        for before, after in itertools.pairwise(actions):
            needs[after].add(before)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError:
        return False
    return True


def random_dataflow(rng: Random, num_stages: int) -> Dataflow:
    """A chain with links left out and skips put in, some of them without gradient."""
    pairs = [
        (s, t)
        for t in range(num_stages)
        for s in range(t)
        if rng.random() < (0.8 if s + 1 == t else 0.3)
    ]
    consumers = {s: {t for source, t in pairs if source == s} for s in range(num_stages)}
    return Dataflow.of(num_stages, consumers, [pair for pair in pairs if rng.random() < 0.2])


def random_schedule(
    rng: Random, dataflow: Dataflow, num_ranks: int, num_microbatches: int
) -> Schedule:
    """A schedule that runs: the ranks' shares of one random sequence in which everything comes
    after what it needs.
    """
    num_stages = dataflow.num_stages
    placement = [
        *range(num_ranks),
        *(rng.randrange(num_ranks) for _ in range(num_stages - num_ranks)),
    ]
    rng.shuffle(placement)
    actions: list[list[ScheduleAction]] = [[] for _ in range(num_ranks)]
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            kinds = (F, I, W) if rng.random() < 0.5 else (F, B)
            actions[placement[stage]] += [ScheduleAction(kind, stage, microbatch) for kind in kinds]
    unordered = Schedule(num_microbatches, tuple(placement), tuple(map(tuple, actions)), "random")
    sorter = graphlib.TopologicalSorter(dependencies(unordered, dataflow))
    sorter.prepare()
    shares: list[list[ScheduleAction]] = [[] for _ in range(num_ranks)]
    ready: list[ScheduleAction] = []
    while sorter.is_active():
        ready += sorted(sorter.get_ready(), key=str)
        action = ready.pop(rng.randrange(len(ready)))
        sorter.done(action)
        shares[placement[action.stage]].append(action)
    return Schedule(num_microbatches, tuple(placement), tuple(map(tuple, shares)), "random")
