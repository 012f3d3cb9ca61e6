"""Move the begins of stages for schedules that the model of stages does not describe, by simulating the schedule itself.

Stages are cut for the time of 1F1B (:mod:`shardwright.policies.autodist.stages.split`). Where a schedule puts off gradients of
weights, or a position runs several stages, other cuts can be better. Each begin is tried a few blocks earlier and later, as
long as the step gets shorter: a local optimum, for small schedules only, as each trial is a simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.policies.autodist.stages.menu import Tables
from shardwright.policies.autodist.stages.split import Split, Stage

REACH = 2
"""How many blocks a begin is moved at once, at most: of two places next to each other, one is often crossed by more."""

MAX_ACTIONS = 4096
"""Forwards that are simulated in all for one cut."""


def moved(
    split: Split,
    tables: Sequence[Tables],
    in_flight: Sequence[int],
    num_microbatches: int,
    memory_bytes: float,
    step_s: Callable[[Split], float],
) -> Split:
    """The split with its begins moved; ``step_s`` says what a step of a split takes.

    ``tables``: by menu. ``in_flight``: the microbatches that each stage holds. ``memory_bytes``: what a stage may take.
    """
    left = MAX_ACTIONS // max(1, num_microbatches * len(split.stages))
    best_s = step_s(split) if left else 0.0
    improved = True
    while improved:
        improved = False
        for number, by in itertools.product(range(1, len(split.stages)), _steps()):
            trial = _with_begin(split, number, split.stages[number].start + by, tables, in_flight, memory_bytes)
            if trial is None:
                continue
            if left == 0:
                return split
            left -= 1
            seconds = step_s(trial)
            if seconds < best_s * (1 - 1e-12):
                split, best_s, improved = trial, seconds, True
    return split


def _steps() -> list[int]:
    return [sign * distance for distance in range(1, REACH + 1) for sign in (-1, 1)]


def _with_begin(
    split: Split, number: int, begin: int, tables: Sequence[Tables], in_flight: Sequence[int], memory_bytes: float
) -> Split | None:
    """The split whose stage ``number`` begins at block ``begin``; None if a stage would be empty or not fit."""
    before, own = split.stages[number - 1], split.stages[number]
    if not before.start < begin < own.stop:
        return None
    found: list[Stage] = list(split.stages)
    for index, start, stop in ((number - 1, before.start, begin), (number, begin, own.stop)):
        table, count = tables[found[index].menu], in_flight[index]
        if table.least_bytes(count)[start, stop] > memory_bytes * (1 + 1e-12):
            return None
        again = table.recomputed(start, stop, count, memory_bytes)
        found[index] = replace(found[index], start=start, stop=stop, recomputed=again)
    used = [tables[s.menu].used_bytes(s.start, s.stop, s.recomputed, count) for s, count in zip(found, in_flight, strict=True)]
    return replace(split, stages=tuple(found), used_bytes=max(used))
