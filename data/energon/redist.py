"""Dealing saved states to another number of ranks or workers.

What is left of the epochs that are under way is cut anew, so that each sample is still seen exactly
once in them; from the next epoch on the new workers have their own split. Samples come in another
order, as other workers read them.

An example: 2 workers share 8 samples, and each has read 1. Dealt to 3 workers, what is left is 2
and 3, 3 and 4 samples; each of the three reads 2 of these 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.data.energon.worker_config import global_boundaries
from shardwright.data.energon.worker_stream import (
    KIND,
    Segment,
    Split,
    WorkerStream,
    blended,
    cut,
    worker_streams,
)
from shardwright.data.sample_stream import BlendedStream
from shardwright.data.state import check_state
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, DataError

_SHARED = (
    "world_size",
    "num_workers",
    "seed_offset",
    "num_samples",
    "weights",
    "repeat",
    "shuffle",
    "max_samples_per_sequence",
    "batch_size",
    "fingerprint",
)


@checked
def redistribute(
    states: Sequence[Any], *, world_size: int, num_workers: int, batch_size: int | None = None
) -> list[dict[str, Any]]:
    """The states for ``world_size`` ranks with ``num_workers`` workers each, from those of all
    ranks of another number. ``batch_size``: of a rank, where it is to be another one.

    Raises :class:`DataError` for states that do not belong together.
    """
    if world_size < 1 or num_workers < 0:
        raise ConfigError(f"{world_size} ranks with {num_workers} workers each cannot read")
    found = _checked(states)
    first = found[0]
    # Without workers the process of the rank itself reads, as one worker would.
    total = world_size * max(1, num_workers)
    order = (first["seed_offset"], first["shuffle"], first["max_samples_per_sequence"])
    splits = []
    for number, num_samples in enumerate(first["num_samples"]):
        if num_samples < total:
            raise ConfigError(f"{num_samples} samples do not give each of {total} workers one")
        splits.append(Split(num_samples, *order, number))
    left, next_epochs = _left(found, splits)
    # By source, then by worker.
    pieces = [_dealt(own, total) for own in left]
    per_rank = max(1, num_workers)

    def segments_of(worker: int) -> list[list[list[int]]]:
        """What a worker reads first, of each source. A state is JSON, which has lists only."""
        return [[list(segment) for segment in by_worker[worker]] for by_worker in pieces]

    moved = []
    for rank in range(world_size):
        workers = range(rank * per_rank, (rank + 1) * per_rank)
        dealt = {"first_epoch": next_epochs, "segments": list(map(segments_of, workers))}
        moved.append(
            {
                **first,
                "rank": rank,
                "world_size": world_size,
                "num_workers": num_workers,
                "batch_size": batch_size or first["batch_size"],
                # The new state is one of the beginning: what was read is no longer in ``dealt``.
                "position": 0,
                "dealt": dealt,
            }
        )
    return moved


def _dealt(left: Sequence[Segment], num_workers: int) -> list[list[Segment]]:
    """What is left of a source, by new worker: each epoch is cut evenly."""
    by_worker: list[list[Segment]] = [[] for _ in range(num_workers)]
    for epoch in sorted({segment.epoch for segment in left}):
        own = [segment for segment in left if segment.epoch == epoch]
        bounds = global_boundaries(sum(segment.size for segment in own), num_workers)
        for segments, piece in zip(by_worker, cut(own, bounds), strict=True):
            segments += piece
    return by_worker


def _left(
    states: Sequence[dict[str, Any]], splits: Sequence[Split]
) -> tuple[list[list[Segment]], list[int]]:
    """The rest that all workers still have to read of the epochs that are under way, and the epoch
    that nobody has begun; both by source.
    """
    places: list[list[tuple[WorkerStream, int]]] = [[] for _ in splits]
    per_rank = max(1, states[0]["num_workers"])
    for state in states:
        dealt = state.get("dealt")
        for worker in range(per_rank):
            # Workers take batches in turns: after 5 batches of 2 workers, worker 0 has made 3 and
            # worker 1 has made 2.
            turns = (state["position"] + per_rank - 1 - worker) // per_rank
            streams = worker_streams(
                splits,
                per_rank * len(states),
                state["rank"] * per_rank + worker,
                None if dealt is None else dealt["segments"][worker],
                None if dealt is None else dealt["first_epoch"],
            )
            position = turns * state["batch_size"]
            blend = blended(streams, state["weights"])
            read = blend.turns_before(position) if isinstance(blend, BlendedStream) else [position]
            for own, stream, count in zip(places, streams, read, strict=True):
                own.append((stream, count))
    found = [_left_of_source(own) for own in places]
    return [left for left, _ in found], [epoch for _, epoch in found]


def _left_of_source(places: Sequence[tuple[WorkerStream, int]]) -> tuple[list[Segment], int]:
    # A worker that has just ended an epoch has not begun the next one.
    last = max(stream.epoch_at(position - 1) if position else -1 for stream, position in places)
    last = max([last, *(stream.first_epoch - 1 for stream, _ in places)])
    left = [segment for stream, position in places for segment in stream.left(position, last)]
    return left, last + 1


def _checked(states: Sequence[Any]) -> list[dict[str, Any]]:
    """The states in the order of the ranks, if they are those of all ranks of one run."""
    if not states or any(state is None for state in states):
        raise DataError(
            "a state of a rank is missing",
            why=f"there are {len(states)}, of which "
            f"{sum(state is None for state in states)} say that nothing was read",
            hint="give the states of all ranks, which save_state_global collects",
        )
    first = check_state(states[0], KIND, {})
    missing = [name for name in ("rank", *_SHARED) if name not in first]
    if missing:
        raise DataError(f"the state of the loader has no {missing[0]!r}")
    if not first["repeat"]:
        raise DataError(
            "the states are those of a dataset that does not repeat",
            why="all ranks take the same number of steps of it, which the new ones would not",
            hint="validate on as many ranks and workers as before, or from the start",
        )
    shared = {name: first[name] for name in _SHARED}
    # States may come in any order: each says whose it is.
    found = sorted((check_state(state, KIND, shared) for state in states), key=lambda s: s["rank"])
    if [state["rank"] for state in found] != list(range(first["world_size"])):
        raise DataError(
            f"these are not the states of all {first['world_size']} ranks",
            why=f"they are those of ranks {[state['rank'] for state in found]}",
            hint="give one state of each data-parallel rank; twins have the same",
        )
    return found
