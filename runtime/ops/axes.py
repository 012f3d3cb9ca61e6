"""What parallel operators share: reducing over the axes that split a factor, and accumulating in a
wide enough dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.runs import Run, joined, within

_HALF = (torch.float16, torch.bfloat16)

Axes = tuple[AxisGroup, ...]
"""The axes that split one factor, major to minor."""


def communicating(axes: Axes) -> Axes:
    """The axes that have several ranks."""
    for axis in axes:
        if axis.communicator.size == 1:
            return tuple(axis for axis in axes if axis.size > 1)
    return axes


Length = int | tuple[int, ...]
"""How many things axes cut; or of what lies end to end (a class token, patches), how many of each:
these are cut one by one.
"""


def whole_length(length: Length) -> int:
    """How many things there are in all."""
    return length if isinstance(length, int) else sum(length)


class Dealing(Protocol):
    """What deals things to ranks, and knows which are this rank's: as an axis does."""

    def runs(self, count: int) -> tuple[Run, ...]: ...


def piece_runs(axes: Sequence[Dealing], count: Length, unit: int = 1) -> tuple[Run, ...]:
    """Where this rank's piece of ``count`` units of ``unit`` things lies, which ``axes`` cut, major
    to minor.
    """
    found: list[Run] = []
    begin = 0
    for segment in (count,) if isinstance(count, int) else count:
        runs: tuple[Run, ...] = ((begin, segment),)
        for axis in axes:
            runs = within(runs, axis.runs(sum(size for _, size in runs)))
        found += runs
        begin += segment
    return joined((start * unit, size * unit) for start, size in found)


def sum_over(x: Tensor, axes: Axes, phase: Phase = "forward") -> Tensor:
    """The sum over the ranks of all ``axes``; records no gradient."""
    for axis in axes:
        x = axis.communicator.all_reduce(x, "sum", phase=phase)
    return x.detach()


def max_over(x: Tensor, axes: Axes) -> Tensor:
    """The maximum over the ranks of all ``axes``; records no gradient."""
    for axis in axes:
        x = axis.communicator.all_reduce(x, "max", phase="forward")
    return x.detach()


def local_max(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The maximum along ``dims``, kept with size 1; minus infinity where there is no element."""
    if x.numel() == 0:
        return x.new_full(
            [1 if dim in dims else size for dim, size in enumerate(x.shape)], -math.inf
        )
    return x.amax(dims, keepdim=True)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed in single precision, as PyTorch's kernels do."""
    return torch.float32 if dtype in _HALF else dtype


def cast_by_autocast(x: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``operator``, one of PyTorch's, makes of its input ``x`` under autocast: some compute in
    float32, each device type has a list of its own. ``operator`` must accept a tensor ``[1, 1]``;
    it is asked once.
    """
    if x.dtype not in _HALF or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(_dtype_under_autocast(operator, x.device, x.dtype))


@functools.cache
def _dtype_under_autocast(
    operator: Callable[[Tensor], Tensor], device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    with torch.no_grad():
        return operator(torch.zeros(1, 1, dtype=dtype, device=device)).dtype
