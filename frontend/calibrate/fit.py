"""Fit the numbers of a hardware file to measured points, with the relative error of each fit."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.compiler.cost.machine.efficiency import BandwidthTable, EfficiencyTable
from shardwright.compiler.cost.machine.hardware import Link
from shardwright.compiler.cost.time.collectives import flat_lines

Points = Sequence[Mapping[str, Any]]

FASTEST_BYTES_PER_S = 1e14
"""What a link counts as when the messages measured are too small to see its bandwidth."""


def fit_products(
    points: Points,
) -> tuple[dict[str, float], dict[str, EfficiencyTable], dict[str, float]]:
    """``(peaks, tables, errors)`` by dtype: the best rate measured, the grid relative to it, the
    error between grid points.
    """
    peaks, tables, errors = {}, {}, {}
    for dtype in dict.fromkeys(point["dtype"] for point in points):
        own = [point for point in points if point["dtype"] == dtype]
        # Multiply and add count as two operations.
        rates = {
            (p["m"], p["n"], p["k"], p["check"]): 2.0 * p["m"] * p["n"] * p["k"] / p["seconds"]
            for p in own
        }
        grid = {key[:3]: rate for key, rate in rates.items() if not key[3]}
        sizes = tuple(sorted({m for m, _, _ in grid}))
        peak = max(rates.values())
        # k varies fastest, as the table has it.
        fractions = tuple(grid[key] / peak for key in itertools.product(sizes, repeat=3))
        table = EfficiencyTable(sizes, sizes, sizes, fractions)
        peaks[dtype], tables[dtype] = peak, table
        errors[dtype] = mean_error(
            (rate, table.at(*key[:3]) * peak) for key, rate in rates.items() if key[3]
        )
    return peaks, tables, errors


def fit_streams(points: Points) -> tuple[float, BandwidthTable, float]:
    """``(bytes/s of large tensors, bytes/s by size, error)``.

    The first is that of the largest copy into memory that is there already. By size all streams
    count together, those too that make new tensors, as operators do: large ones pay for pages they
    have not used before.
    """
    num_bytes, rates = [], []
    for size in sorted({p["size"] for p in points}):
        own = [p for p in points if p["size"] == size]
        num_bytes.append(round(statistics.fmean(p["bytes"] for p in own)))
        # Copies and additions of one size are one point, by what they move together.
        rates.append(sum(p["bytes"] for p in own) / sum(p["seconds"] for p in own))
    table = BandwidthTable(tuple(num_bytes), tuple(rates))
    largest = next(point for point in reversed(points) if point["stream"] == "copy")
    return (
        largest["bytes"] / largest["seconds"],
        table,
        mean_error((p["seconds"], p["bytes"] / table.at(p["bytes"])) for p in points),
    )


def fit_launches(points: Points) -> tuple[float, float]:
    """``(seconds, error)``: the median operator."""
    seconds = statistics.median(point["seconds"] for point in points)
    return seconds, mean_error((point["seconds"], seconds) for point in points)


def fit_unaligned(points: Points) -> float:
    """The part of their rate that products reach whose rows are no multiple of 16 bytes."""
    seconds = {point["aligned"]: point["seconds"] for point in points}
    return float(min(1.0, seconds[True] / seconds[False]))


def fit_host(host: Mapping[str, float], launch_s: float) -> tuple[float, float]:
    """What a program adds to the least time of an operator, forward and backward."""
    return max(0.0, host["forward_s"] - launch_s), max(0.0, host["backward_s"] - launch_s)


def fit_fetches(points: Points) -> tuple[float | None, float]:
    """``(bytes/s, error)`` of fetching what a product needs from memory; ``None`` if its arithmetic
    hides that.
    """
    more_s = sum(point["seconds"] - point["cached_s"] for point in points)
    if more_s <= HIDDEN * sum(point["cached_s"] for point in points):
        return None, 0.0
    rate = sum(point["bytes"] for point in points) / more_s
    return rate, mean_error(
        (point["seconds"], point["cached_s"] + point["bytes"] / rate) for point in points
    )


HIDDEN = 0.01
"""A product that takes no longer than this share more hides what it fetches."""


def fit_rates(points: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Bytes/s of each operator, forward and backward."""
    rates = {}
    for point in points:
        forward = point["forward_bytes"] / point["forward_s"]
        backward = point["backward_bytes"] / point["backward_s"]
        rates[point["operator"]] = (forward, backward)
    return rates


def fit_link(points: Points, otherwise: float = FASTEST_BYTES_PER_S) -> tuple[Link, float]:
    """The link on which the model of collectives comes closest to the points, and its mean relative
    error.

    ``otherwise``: its bytes per second where larger messages took no longer, so that the points
    tell none.

    For each point one algorithm's line counts, ``steps * latency + share * bytes / bandwidth``;
    which one depends on the link. Given the lines, least squares of the relative errors; then the
    lines are chosen anew, until they stay.
    """
    lines = [flat_lines(point["kind"], point["ranks"]) for point in points]
    chosen = [max(options) for options in lines]  # rings to begin with: the most steps
    latency, per_byte = 0.0, 0.0
    # Lines and link follow from each other, and mostly agree after two or three rounds.
    for _ in range(20):
        # Relative errors: each point is divided by its seconds.
        steps = np.array(
            [line[0] / point["seconds"] for line, point in zip(chosen, points, strict=True)]
        )
        shares = np.array(
            [
                line[1] * point["bytes"] / point["seconds"]
                for line, point in zip(chosen, points, strict=True)
            ]
        )
        latency, per_byte = _least_squares(steps, shares, 1 / otherwise)
        best = [
            min(options, key=lambda line: line[0] * latency + line[1] * point["bytes"] * per_byte)
            for options, point in zip(lines, points, strict=True)
        ]
        if best == chosen:
            break
        chosen = best
    seconds = [
        line[0] * latency + line[1] * point["bytes"] * per_byte
        for line, point in zip(chosen, points, strict=True)
    ]
    error = mean_error(
        (point["seconds"], modelled) for point, modelled in zip(points, seconds, strict=True)
    )
    return Link(latency, 1 / per_byte), error


def _least_squares(steps: Any, shares: Any, least: float) -> tuple[float, float]:
    """``latency >= 0`` and ``per_byte > 0`` with the least ``|latency * steps + per_byte * shares -
    1|^2``; where the best ``per_byte`` is not positive, with ``least`` in its place.
    """
    latency, per_byte = np.linalg.lstsq(
        np.stack([steps, shares], axis=1), np.ones(len(steps)), rcond=None
    )[0].tolist()
    # Neither may be negative; at the border of what is allowed one unknown is left.
    if latency < 0:
        return 0.0, float(shares.sum() / (shares @ shares))
    if per_byte <= 1 / FASTEST_BYTES_PER_S:
        return max(0.0, float(steps @ (1 - least * shares) / (steps @ steps))), least
    return latency, per_byte


def mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    """The mean factor, less 1, between ``(measured, modelled)``: twice as much and half as much are
    both 1.0.
    """
    logarithms = [abs(math.log(modelled / measured)) for measured, modelled in pairs]
    return math.expm1(statistics.fmean(logarithms)) if logarithms else 0.0
