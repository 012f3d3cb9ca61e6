"""How much a calibration measures: sizes and times, for a CPU or CUDA, thorough or quick."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shardwright.compiler.cost.machine.hardware import COLLECTIVES


@dataclass(frozen=True)
class Effort:
    """What is measured, and for how long.

    ``product_sizes`` is the grid for m, n and k; its upper end is cut for dtypes in which one
    product of that size takes longer than ``longest_s``. ``stream_bytes`` are sizes of tensors that
    are copied or added, ``message_bytes`` those of collectives, nothing larger than what takes so
    long; on a CPU each comes after ``work_s`` of work, as in a step. ``point_s`` is about the time
    spent on one point, of which there are hundreds, ``sample_s`` that of a sample.
    ``overlap``: the bytes of a message beside products, and the size of these.
    ``attention``: the shapes ``[batch, heads, queries, width]`` in which attention is measured.
    ``measures``: whether this rank measures its device; where ranks share cores, as many do as have
    one each, and the others wait.
    """

    product_sizes: tuple[int, ...]
    longest_s: float
    stream_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    point_s: float
    sample_s: float = 2e-4
    work_s: float = 0.0
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    attention: tuple[tuple[int, int, int, int], ...] = ((4, 4, 128, 64),)
    attention_dtype: torch.dtype = torch.float32
    overlap: tuple[int, int] = (2**14, 32)
    measures: bool = True


_CPU = Effort(
    product_sizes=(8, 16, 32, 128, 512, 2048),
    longest_s=0.6,
    stream_bytes=tuple(2**power for power in (12, 16, 18, 20, 22, 24, 26)),
    message_bytes=tuple(2**power for power in (8, 12, 14, 16, 18, 20, 22, 24)),
    point_s=0.03,
    work_s=2e-3,
    overlap=(2**24, 256),
)
_CUDA = Effort(
    product_sizes=(16, 32, 64, 256, 1024, 4096, 16384),
    longest_s=0.2,
    stream_bytes=tuple(2**power for power in (16, 20, 22, 24, 26, 28, 30)),
    message_bytes=tuple(2**power for power in (8, 12, 14, 16, 18, 20, 22, 24, 26, 28)),
    point_s=0.02,
    # Models are trained in bfloat16 there.
    attention=tuple((batch, 16, 2**14 // batch, width) for batch in (16, 4) for width in (64, 128)),
    attention_dtype=torch.bfloat16,
    # Keys and values of some thousand positions.
    overlap=(2**27, 4096),
)
_QUICK_PRODUCTS = {"cpu": _CPU.product_sizes[:5:2], "cuda": (16, 64, 1024, 8192)}
"""Sizes that show the peak: that of a CPU is seen at 512, that of a GPU only far above 1024."""


def effort_for(device_type: str, *, quick: bool, measures: bool = True) -> Effort:
    """The effort for ``"cpu"`` or ``"cuda"``: about a minute, or with ``quick`` a few seconds and
    wider errors.
    """
    full = replace(_CUDA if device_type == "cuda" else _CPU, measures=measures)
    if not quick:
        return full
    return replace(
        full,
        product_sizes=_QUICK_PRODUCTS[device_type],
        stream_bytes=full.stream_bytes[::2],
        message_bytes=full.message_bytes[:7:2],
        point_s=full.point_s / 3,
    )


def expected_s(effort: Effort, num_tiers: int) -> float:
    """About how long a calibration takes on a quiet machine."""
    points = (
        len(effort.dtypes) * len(effort.product_sizes) ** 3
        + 10 * len(effort.stream_bytes)
        + OTHER_POINTS
    )
    return points * effort.point_s + _links_s(effort, num_tiers)


def share_of_links(effort: Effort, num_tiers: int) -> float:
    """The share of a calibration's time that collectives take."""
    return _links_s(effort, num_tiers) / expected_s(effort, num_tiers)


def _links_s(effort: Effort, num_tiers: int) -> float:
    messages = num_tiers * len(COLLECTIVES) * len(effort.message_bytes)
    return messages * (effort.point_s + WORK_BATCHES * effort.work_s)


OTHER_POINTS = 50
"""About how many points are measured beside: the least times of operators and of a program, and
operators of models.
"""

WORK_BATCHES = 100
"""Stretches of work for one message, about."""
