"""Checksums of tensors, to tell whether ranks hold the same values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.runtime.ranks.communicator import Communicator

# 2**64 / golden ratio, odd: neighbouring positions get unrelated weights.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
# Words that are weighted at once, 1 MiB of them: temporary memory does not grow with the tensor.
_CHUNK = 2**17


def checksum(x: Tensor) -> Tensor:
    """An int64 scalar on the device of ``x``: a position-weighted sum of its bytes and sizes,
    modulo 2**64.

    Equal for equal shape, dtype and bits, NaN included; practically never for different ones.
    """
    words = _words(x.detach().contiguous().reshape(-1).view(torch.uint8))
    positions = torch.arange(1, min(words.numel(), _CHUNK) + 1, device=x.device)
    weights = (positions * _MULTIPLIER) | 1
    # An odd weight has an inverse modulo 2**64, so no single word can change unnoticed.
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for index, start in enumerate(range(0, words.numel(), _CHUNK)):
        chunk = words[start : start + _CHUNK]
        weight_of_chunk = _wrapped((index * _MULTIPLIER) | 1)
        total += (chunk * weights[: chunk.numel()]).sum() * weight_of_chunk
    sizes = 0
    for size in x.shape:
        sizes = (sizes + size + 1) * _MULTIPLIER
    return total + _wrapped(sizes)


def _words(octets: Tensor) -> Tensor:
    """Bytes as int64, with zeros behind where they do not fill the last word."""
    rest = -octets.numel() % 8
    is_aligned = octets.storage_offset() % 8 == 0
    if rest or not is_aligned:
        octets = torch.nn.functional.pad(octets, (0, rest)) if rest else octets.clone()
    return octets.view(torch.int64)


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
            return name, alike(values, communicator.ranks)
    return None


def alike(values: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Ranks by equal value, in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return list(groups.values())


def _wrapped(value: int) -> int:
    """``value`` modulo 2**64 as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
