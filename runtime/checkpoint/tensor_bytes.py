"""The bytes of a tensor, without NumPy."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def bytes_of(x: Tensor) -> memoryview:
    """The elements of ``x`` in row-major order. A copy is made only of what is not contiguous or
    not on the CPU.

    The view keeps the memory alive.
    """
    values = x.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    flat = values.view(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)
    buffer = (
        # By address, as ``numpy()`` knows no bfloat16 and the runtime needs no numpy.
        (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
        if flat.numel()
        else (ctypes.c_ubyte * 0)()
    )
    buffer.keeps_alive = flat  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")
