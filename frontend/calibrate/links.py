"""Measuring what connects devices: every collective of the runtime, by size, over groups of each
tier.

All groups of a tier communicate at once, as the groups along a mesh axis do. A point is the time of
the slowest rank.

On a CPU ranks compute a while before each call, as they do in a step: then members do not come at
the same moment, threads that send and receive have gone to sleep, and caches hold other things.
What the work takes without calls is subtracted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.cost.machine.hardware import COLLECTIVES
from shardwright.frontend.calibrate.effort import Effort
from shardwright.frontend.calibrate.timing import synchronize
from shardwright.runtime.activity import tell
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.world import World

WARM_UP_CALLS = 2
NUM_BATCHES = 7
MOST_CALLS = 50
"""The most calls in one batch."""

LEAST_CALLS_AFTER_WORK = 5
BATCHES_AFTER_WORK = 9

WORK_SIZE = 192
"""The size of the square matrices whose products are the work between calls."""

Groups = tuple[tuple[int, ...], ...]


def measure_links(
    world: World,
    tiers: Sequence[tuple[str, Sequence[Groups]]],
    effort: Effort,
    share_before: float = 0.0,
) -> list[dict[str, Any]]:
    """Points ``{tier, kind, ranks, bytes, seconds}`` for every tier's lists of groups; groups of
    one list have one size. Of a tier's second list, its smaller groups, every other size is enough.

    ``bytes`` counts as in ``collective_s``. ``share_before``: of the calibration that is done.
    """
    points = []
    work = Work(world, effort.work_s)
    num_kinds, num_begun = len(COLLECTIVES) * sum(len(lists) for _, lists in tiers), 0
    for name, lists in tiers:
        for number, groups in enumerate(lists):
            communicator = world.partition(groups, name)
            for kind in COLLECTIVES:
                # Most of the time goes here, so that each is told of.
                share = share_before + (1 - share_before) * num_begun / num_kinds
                tell(f"{kind} of {len(groups[0])} ranks, {name}", share)
                num_begun += 1
                for num_bytes in effort.message_bytes[:: number + 1]:
                    call, messages = _call(kind, communicator, num_bytes, world.device)
                    seconds = slowest(world, call, effort.point_s, work) / messages
                    point = {
                        "tier": name,
                        "kind": kind,
                        "ranks": len(groups[0]),
                        "bytes": num_bytes,
                        "seconds": seconds,
                    }
                    points.append(point)
                    # Larger messages would take longer still, and tell nothing new.
                    if seconds * messages > effort.longest_s:
                        break
    return points


def _call(
    kind: str, communicator: Communicator, num_bytes: int, device: torch.device
) -> tuple[Callable[[int], object], int]:
    """What runs the collective (it is told which call this is), and how many it runs one after the
    other.
    """
    size, count = communicator.size, num_bytes // 4
    # In float32; at least one element for each member.
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


class Work:
    """Products that take about ``seconds`` together, the same number on all ranks."""

    def __init__(self, world: World, seconds: float) -> None:
        self.x = torch.randn(WORK_SIZE, WORK_SIZE, device=world.device) if seconds else None
        self.num_products = 0
        if seconds:
            self.num_products = 1
            once_s = min(_batch(world, lambda index: None, 3, self) for _ in range(3))
            self.num_products = max(1, round(seconds / max(world.all_gather_object(once_s))))

    def __call__(self) -> None:
        for _ in range(self.num_products):
            torch.mm(self.x, self.x)  # type: ignore[arg-type]


def slowest(world: World, call: Callable[[int], object], budget_s: float, work: Work) -> float:
    """Seconds of one call on the slowest rank. All ranks make the same calls.

    Of batches of calls in a row the fastest counts. After work it is the median: how long threads
    take to wake up differs from call to call, and a step has its share of all kinds.
    """
    # As many calls as fill the time, known from the first few.
    warm_up_s = max(world.all_gather_object(_batch(world, call, WARM_UP_CALLS, work)))
    calls = min(max(round(budget_s / NUM_BATCHES / max(warm_up_s, 1e-9)), 1), MOST_CALLS)
    if not work.num_products:
        return min(
            _slowest_batches(world, [_batch(world, call, calls, work) for _ in range(NUM_BATCHES)])
        )
    calls = max(calls, LEAST_CALLS_AFTER_WORK)
    # Calls after work, and the work alone: the difference is what the calls take.
    both, alone = [], []
    for _ in range(BATCHES_AFTER_WORK):  # in turns, so that load from elsewhere meets both
        both.append(_batch(world, call, calls, work))
        alone.append(_batch(world, nothing, calls, work))
    with_calls_s, alone_s = (
        statistics.median(_slowest_batches(world, batches)) for batches in (both, alone)
    )
    return max(with_calls_s - alone_s, LEAST_CALL_S)


LEAST_CALL_S = 1e-6
"""What a call takes at least, where load from elsewhere hides it."""


def nothing(index: int) -> None:
    """The call of a batch that is work alone."""


def _slowest_batches(world: World, batches: Sequence[float]) -> list[float]:
    """The seconds of each batch on its slowest rank."""
    return list(map(max, zip(*world.all_gather_object(batches), strict=True)))


def _batch(world: World, call: Callable[[int], object], calls: int, work: Work) -> float:
    """Seconds per call of several in a row, on this rank, with the work between them."""
    world.barrier()
    synchronize(world.device)
    start = time.perf_counter()
    for index in range(calls):
        work()
        call(index)
    synchronize(world.device)
    return (time.perf_counter() - start) / calls
