"""Where ranks lie on the tiers of a machine, up to what costs depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.compiler.cost.machine.hardware import Hardware


def lie(hardware: Hardware, ranks: Sequence[int]) -> bytes:
    """Equal for lists of ranks that fall, in their order, into the same groups of every tier,
    whichever groups these are.
    """
    devices = np.asarray(ranks)
    return b"".join(
        _in_order_of_appearance(tier.group_of[devices]).tobytes() for tier in hardware.tiers
    )


def _in_order_of_appearance(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """The groups by number, where the first to be named is 0, the next 1."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]
