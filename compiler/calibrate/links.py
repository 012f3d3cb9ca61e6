"""Measuring what connects devices: every collective of the runtime, by size, over groups of each tier.

All groups of a tier communicate at once, as the groups along a mesh axis do. A point is the time of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.calibrate.effort import Effort
from shardwright.compiler.calibrate.timing import synchronize
from shardwright.compiler.cost.hardware import COLLECTIVES
from shardwright.runtime.communicator import Communicator
from shardwright.runtime.world import World

WARM_UP_CALLS = 2
NUM_BATCHES = 7
MOST_CALLS = 50
"""In one batch."""

Groups = tuple[tuple[int, ...], ...]


def measure_links(world: World, tiers: Sequence[tuple[str, Sequence[Groups]]], effort: Effort) -> list[dict[str, Any]]:
    """Points ``{tier, kind, ranks, bytes, seconds}`` for every tier's lists of groups; groups of one list have one size.

    ``bytes`` counts as in :func:`shardwright.compiler.cost.collectives.collective_s`.
    """
    points = []
    for name, lists in tiers:
        for groups in lists:
            communicator = world.partition(groups, name)
            for kind in COLLECTIVES:
                for num_bytes in effort.message_bytes:
                    call, messages = _call(kind, communicator, num_bytes, world.device)
                    seconds = _slowest(world, call, effort.point_s) / messages
                    point = {"tier": name, "kind": kind, "ranks": len(groups[0]), "bytes": num_bytes, "seconds": seconds}
                    points.append(point)
    return points


def _call(kind: str, communicator: Communicator, num_bytes: int, device: torch.device) -> tuple[Callable[[int], object], int]:
    """What runs the collective (it is told which call this is), and how many it runs one after the other."""
    size, count = communicator.size, num_bytes // 4
    piece = max(count // size, 1)
    x = torch.ones(max(count, 1), device=device)
    rows = torch.ones(size, piece, device=device)
    match kind:
        case "all_reduce":
            return lambda index: communicator.all_reduce(x), 1
        case "all_gather":
            return lambda index: communicator.all_gather_cat(rows[0]), 1
        case "reduce_scatter":
            return lambda index: communicator.reduce_scatter(rows), 1
        case "all_to_all":
            return lambda index: communicator.all_to_all(list(rows), [(piece,)] * size), 1
        case "broadcast":  # from another root each time, or roots would run ahead
            return lambda index: communicator.broadcast(x, index % size), 1
        case _:
            return lambda index: _there_and_back(communicator, x), 2


def _there_and_back(communicator: Communicator, x: Tensor) -> None:
    """Members in pairs; the last of an odd number looks on."""
    partner = communicator.index ^ 1
    if partner >= communicator.size:
        return
    for sender in (communicator.index & ~1, communicator.index | 1):
        if sender == communicator.index:
            communicator.send(x, partner)
        else:
            communicator.receive(x.shape, x.dtype, partner, device=x.device)


def _slowest(world: World, call: Callable[[int], object], budget_s: float) -> float:
    """Seconds of one call on the slowest rank, in the fastest of some batches of calls. All ranks make the same calls."""
    warm_up_s = max(world.all_gather_object(_batch(world, call, WARM_UP_CALLS)))
    calls = min(max(round(budget_s / NUM_BATCHES / max(warm_up_s, 1e-9)), 1), MOST_CALLS)
    batches = [_batch(world, call, calls) for _ in range(NUM_BATCHES)]
    return float(min(map(max, zip(*world.all_gather_object(batches), strict=True))))


def _batch(world: World, call: Callable[[int], object], calls: int) -> float:
    """Seconds per call of several in a row, on this rank."""
    world.barrier()
    synchronize(world.device)
    start = time.perf_counter()
    for index in range(calls):
        call(index)
    synchronize(world.device)
    return (time.perf_counter() - start) / calls
