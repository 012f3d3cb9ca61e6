"""Arenas: one buffer in which several buckets have their place."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every place begins at a multiple of this many elements, as collectives are faster on aligned
memory.
"""


class Arena:
    """A flat buffer of ``dtype`` with places for several users.

    All places are reserved first. The buffer is made, of zeros, when the first place is taken.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._length = 0
        self._buffer: Tensor | None = None

    def reserve(self, length: int) -> int:
        """Reserve a place of ``length`` elements, and return the element at which it begins."""
        assert self._buffer is None, "places are reserved before the first one is taken"
        start = self._length
        self._length += -(-length // ALIGNMENT) * ALIGNMENT
        return start

    def take(self, start: int, length: int, device: torch.device) -> Tensor:
        """The reserved place as a view [length] of the buffer on ``device``. On another device than
        before, the buffer is made again.
        """
        if self._buffer is None or self._buffer.device != device:
            self._buffer = torch.zeros(self._length, dtype=self._dtype, device=device)
        return self._buffer[start : start + length]


class Arenas:
    """An arena for each dtype."""

    def __init__(self) -> None:
        self._by_dtype: dict[torch.dtype, Arena] = {}

    def of(self, dtype: torch.dtype) -> Arena:
        return self._by_dtype.setdefault(dtype, Arena(dtype))
