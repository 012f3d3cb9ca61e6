"""Checksums of tensors, to tell whether ranks hold the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.runtime.ranks.communicator import Communicator

# 2**64 / golden ratio, odd: neighbouring positions get unrelated weights.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64


def checksum(x: Tensor) -> Tensor:
    """An int64 scalar on the device of ``x``: a position-weighted sum of its bytes and sizes,
    modulo 2**64.

    Equal for equal shape, dtype and bits, NaN included; practically never for different ones.
    """
    octets = x.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(octets, (0, -octets.numel() % 8)).view(torch.int64)
    weights = (torch.arange(1, words.numel() + 1, device=x.device) * _MULTIPLIER) | 1
    sizes = 0
    for size in x.shape:
        sizes = (sizes + size + 1) * _MULTIPLIER
    return (words * weights).sum() + _wrapped(sizes)


def differing(
    tensors: Mapping[str, Tensor], communicator: Communicator
) -> tuple[str, list[list[int]]] | None:
    """The first tensor whose value is not the same on all ranks of the group, and which ranks agree
    with each other.

    One small collective; ``None`` where all agree. Every rank passes the same names in the same
    order.
    """
    if not tensors or communicator.size == 1:
        return None
    mine = torch.stack([checksum(x) for x in tensors.values()])
    per_rank = torch.stack(communicator.all_gather(mine, phase="setup")).tolist()  # [rank][tensor]
    for name, values in zip(tensors, zip(*per_rank, strict=True), strict=True):
        if len(set(values)) > 1:
            return name, _alike(values, communicator.ranks)
    return None


def _alike(values: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Ranks by equal value, in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return list(groups.values())


def _wrapped(value: int) -> int:
    """``value`` modulo 2**64 as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
