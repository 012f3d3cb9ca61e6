"""The time of one call on a CPU or CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

MOST_SAMPLES = 50


def seconds_per_call(
    call: Callable[[], object], device: torch.device, budget_s: float, sample_s: float
) -> float:
    """The time of one call after warming up: the fastest of at least three samples, taken until
    ``budget_s`` is spent.

    A sample is as many calls as take ``sample_s``. What else the machine does only adds time, hence
    the fastest; what ranks take from each other must be within one sample.
    """
    call()  # loads kernels, fills caches
    calls = max(1, round(sample_s / max(_sample(call, 1, device), 1e-9)))
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 3 or (len(samples) < MOST_SAMPLES and time.perf_counter() < end):
        samples.append(_sample(call, calls, device))
    return min(samples)


def _sample(call: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        return _cuda_sample(call, calls)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _cuda_sample(call: Callable[[], object], calls: int) -> float:
    """Between two events of the stream: without the time it takes the host to hear of the end."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / calls  # milliseconds


def synchronize(device: torch.device) -> None:
    """Return when the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
