"""Measuring how much of a message costs no time while the ranks compute.

Each rank sends a block to the next one, as in a ring, computes for about as long, and then waits.
Of three times, of the work alone (10 ms), of the message alone (8 ms) and of both (13 ms), it
follows that 5 of the 8 ms were hidden: 0.63. A GPU with links of its own hides nearly all; on a CPU
threads that send take cores from those that compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwright.frontend.calibrate.effort import Effort
from shardwright.frontend.calibrate.timing import synchronize
from shardwright.runtime.ranks.world import World

_SAMPLES = 9


def measure_overlap(world: World, effort: Effort) -> list[dict[str, Any]]:
    """The seconds of work, of a message, and of both at once, on the slowest rank; nothing for a
    rank alone. Collective.
    """
    if world.size == 1:
        return []
    device = world.device
    num_bytes, size = effort.overlap
    x = torch.randn(size, size, device=device)
    block = torch.ones(num_bytes // 4, device=device)
    axis = world.everyone
    send, receive = [0] * axis.size, [0] * axis.size
    send[(axis.index + 1) % axis.size] = receive[(axis.index - 1) % axis.size] = len(block)

    def message() -> None:
        axis.all_to_all_rows_async(block, send, receive, phase="setup").wait()

    def slowest_s(call: Callable[[], object]) -> float:
        world.barrier()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        return float(max(world.all_gather_object(time.perf_counter() - start)))

    def work(num_products: int) -> None:
        for _ in range(num_products):
            torch.mm(x, x)

    slowest_s(message)  # what the first call takes to set up is left out
    slowest_s(partial(work, 1))
    alone_s = min(slowest_s(message) for _ in range(3))
    once_s = min(slowest_s(partial(work, 10)) for _ in range(3)) / 10
    as_long = partial(work, max(1, round(alone_s / once_s)))

    def both() -> None:
        coming = axis.all_to_all_rows_async(block, send, receive, phase="setup")
        as_long()
        coming.wait()

    # In turns, so that load from elsewhere meets all three; the fastest of each count.
    samples = [[slowest_s(call) for call in (as_long, message, both)] for _ in range(_SAMPLES)]
    names = ("work_s", "message_s", "both_s")
    return [dict(zip(names, map(min, zip(*samples, strict=True)), strict=True))]


def overlap_of(points: Sequence[Mapping[str, float]]) -> float:
    """The part of the shorter of work and message that both at once take less than one after the
    other; 1 where nothing was measured.
    """
    shares = [
        (point["work_s"] + point["message_s"] - point["both_s"])
        / min(point["work_s"], point["message_s"])
        for point in points
    ]
    return min(1.0, max(0.0, statistics.median(shares))) if shares else 1.0
