"""Comparing two things fairly: interleaved pairs, the median of their ratios, and how sure one can
be of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """``ours / theirs`` over interleaved pairs of steps."""

    ours_s: float
    theirs_s: float
    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        times = f"{self.ours_s * 1e3:.1f} ms against {self.theirs_s * 1e3:.1f} ms"
        return (
            f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]  ({times}, {self.num_pairs} "
            "pairs)"
        )


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    num_pairs: int,
    num_warmup: int = 5,
    barrier: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """Time both ``num_pairs`` times in turn, each going first in every second pair; ``barrier``
    encloses each step.

    ``clock`` in seconds: for steps of one thread that wait for nobody, ``time.process_time`` does
    not count what other programs take of the machine.
    """

    def seconds(step: Callable[[], object]) -> float:
        barrier()
        start = clock()
        step()
        barrier()
        return clock() - start

    for _ in range(num_warmup):
        seconds(ours), seconds(theirs)
    times = np.empty((num_pairs, 2))
    for pair in range(num_pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            times[pair, side] = seconds((ours, theirs)[side])
    return summarise(times)


def summarise(times: np.ndarray) -> Ratio:
    """The ratio of ``times`` [pairs, 2] in seconds, with a 95 % bootstrap interval of the
    median.
    """
    ratios = times[:, 0] / times[:, 1]
    draws = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    ours_s, theirs_s = np.median(times, axis=0)
    return Ratio(
        float(ours_s),
        float(theirs_s),
        float(np.median(ratios)),
        float(low),
        float(high),
        len(ratios),
    )
