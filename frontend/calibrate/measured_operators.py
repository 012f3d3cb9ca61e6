"""Measuring one device: matrix products over a grid of sizes, memory streams, and the least time of
an operator.

All ranks measure the same at once, as they will compute at once: on a CPU they share caches and
memory. Each point is the median over the ranks. Where there are fewer cores than ranks, as many
ranks measure as have a core each: the fastest of several samples would show just that, as a
scheduler deals out cores in turns.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.frontend.calibrate.effort import Effort
from shardwright.frontend.calibrate.timing import seconds_per_call
from shardwright.runtime.ranks.world import World

Point = dict[str, Any]
"""One measurement: what was measured, and ``seconds``."""


def measure_products(world: World, effort: Effort) -> list[Point]:
    """``[m, k] x [n, k]^T`` at every point of each dtype's grid, and at points between (``"check":
    true``).
    """
    points = []
    for dtype in effort.dtypes:
        sizes = _feasible_sizes(world, dtype, effort)
        grid = [(m, n, k, False) for m, n, k in itertools.product(sizes, repeat=3)]
        # The points between tell how well the table interpolates.
        for m, n, k, check in grid + [(m, n, k, True) for m, n, k in _points_between(sizes)]:
            a = torch.randn(m, k, device=world.device).to(dtype)
            b = torch.randn(n, k, device=world.device).to(dtype)
            seconds = of_all(world, partial(functional.linear, a, b), effort)
            points.append(
                {"dtype": _name(dtype), "m": m, "n": n, "k": k, "check": check, "seconds": seconds}
            )
    return points


def measure_unaligned(world: World, effort: Effort) -> list[Point]:
    """The three products of a linear layer, forward and backward, with rows of 16 bytes and more
    (``"aligned": true``) and with one column less.
    """
    size, points = effort.overlap[1], []
    for columns in (size, size - 1):
        x = torch.randn(size, size, device=world.device).to(effort.attention_dtype)
        weight = torch.randn(columns, size, device=world.device).to(effort.attention_dtype)
        gradient = functional.linear(x, weight)

        def products(x: Tensor = x, weight: Tensor = weight, gradient: Tensor = gradient) -> None:
            functional.linear(x, weight)
            gradient @ weight
            gradient.T @ x

        seconds = of_all(world, products, effort, 3)
        points.append({"aligned": columns == size, "size": size, "seconds": seconds})
    return points


def measure_streams(world: World, effort: Effort) -> list[Point]:
    """Operators that only move memory, for tensors of several sizes; ``bytes`` counts what is read
    and written.
    """
    points: list[Point] = []
    for size in effort.stream_bytes:
        x, y = (torch.ones(size // 4, device=world.device) for _ in range(2))
        # How often each goes over a tensor: reading counts, and writing.
        streams: dict[str, tuple[int, Callable[[], Tensor]]] = {
            "copy": (2, partial(y.copy_, x)),
            "clone": (2, x.clone),
            "add": (3, partial(torch.add, x, y)),
        }
        for name, (passes, call) in streams.items():
            seconds = of_all(world, call, effort, 3)
            points.append(
                {"stream": name, "size": size, "bytes": passes * size, "seconds": seconds}
            )
        if points[-1]["seconds"] > effort.longest_s:
            break
    return points


def measure_launches(world: World, effort: Effort) -> list[Point]:
    """Operators on a few elements that record a backward: what any operator takes at least."""
    x = torch.ones(2, 2, device=world.device, requires_grad=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "add": lambda: x + x,
        "mul": lambda: x * x,
        "sum": lambda: x.sum(),
        "linear": lambda: functional.linear(x, x),
    }
    return [
        {"operator": name, "seconds": of_all(world, call, effort, 5)}
        for name, call in calls.items()
    ]


def of_all(world: World, call: Callable[[], object], effort: Effort, points: int = 1) -> float:
    """Seconds of one call, the median over all ranks that measure, which do so at once; takes the
    time of ``points`` points.
    """
    world.barrier()
    mine = (
        seconds_per_call(call, world.device, points * effort.point_s, effort.sample_s)
        if effort.measures
        else None
    )
    return median_of_all(world, mine)


def median_of_all(world: World, mine: float | None) -> float:
    """Over the ranks that have measured something."""
    return float(
        statistics.median(
            seconds for seconds in world.all_gather_object(mine) if seconds is not None
        )
    )


def _feasible_sizes(world: World, dtype: torch.dtype, effort: Effort) -> tuple[int, ...]:
    """The sizes whose largest product is quick enough, each judged by the size before; at least
    two, the same on all ranks. Small products say nothing of a GPU's rate, nor of the time of its
    large ones.
    """
    sizes = effort.product_sizes
    feasible = list(sizes[:2])
    for smaller, size in itertools.pairwise(sizes[1:]):
        a = torch.randn(smaller, smaller, device=world.device).to(dtype)
        seconds = of_all(world, partial(functional.linear, a, a), effort)
        if seconds * (size / smaller) ** 3 > effort.longest_s:
            break
        feasible.append(size)
    return tuple(feasible)


def _points_between(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Products halfway between grid points where those are far apart, square and oblong."""
    gaps = list(itertools.pairwise(sizes))
    middles = [
        round(math.sqrt(low * high)) for low, high in gaps if high >= 4 * low or len(gaps) == 1
    ]
    oblong = [
        (sizes[-1], middles[0], middles[-1]),
        (middles[-1], sizes[-1], middles[0]),
        (middles[0], middles[-1], sizes[-1]),
    ]
    return [(middle, middle, middle) for middle in middles] + oblong


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
