"""Indices into a dim that is split: each rank looks up its own part of them, so none would miss
what no rank has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.runtime.errors import InputError


def check_indices(known: Tensor, what: str, size: int) -> None:
    """Refuse indices out of range, as one device does. ``known``: whether each of them is in range.

    Raises :class:`InputError`. On a GPU, which is not waited for, its assertion fails as those of
    torch's own kernels do.
    """
    why = f"all of them are from 0 to {size - 1}"
    try:
        torch._assert_async(known.all(), f"{what} is out of range: {why}")
    except RuntimeError as error:
        raise InputError(
            f"{what} is out of range",
            why=why,
            hint="compare the inputs with the sizes of the model",
        ) from error
