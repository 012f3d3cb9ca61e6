"""Pipelines of the model of :mod:`pipeline_files` with published schedules."""

from __future__ import annotations

from typing import Any

from pipeline_files import Pipe

from shardwright.compiler.schedule.published import generate


def make_pipe(
    name: str,
    num_positions: int,
    num_microbatches: int,
    chunks: int = 1,
    tp: tuple[int, ...] | None = None,
    **keywords: Any,
) -> Pipe:
    """A pipeline with a published schedule. ``tp``: how many ranks each of its positions has."""
    train = generate(name, num_positions, num_microbatches, chunks)
    tp = tp or (1,) * num_positions
    ranks = [tuple(range(sum(tp[:i]), sum(tp[: i + 1]))) for i in range(num_positions)]
    own = {rank: position for position, group in enumerate(ranks) for rank in group}
    forwards = {
        r: " ".join(str(a) for a in train.actions[p] if a.kind == "F") for r, p in own.items()
    }
    actions = {r: " ".join(map(str, train.actions[p])) for r, p in own.items()}
    return Pipe(
        tuple(ranks[p] for p in train.placement), num_microbatches, actions, forwards, **keywords
    )
