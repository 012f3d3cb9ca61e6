"""The exchange that brings an optimizer whole tensors of parameters that the plan cuts: its seconds
and bytes.

One of the ranks that hold the pieces of a parameter is its owner. Gradients and values of the
pieces go to the owner in one all-to-all each. What the owner has updated goes back in a third one
(``runtime/zero/whole_exchange.py``). Parameters travel in batches, one after the other, and nothing
runs beside them. A batch takes as long as the rank needs that owns most of it; if one tensor fills
the batch, that is its only owner. Owners are balanced over all parameters, so the bytes of a rank
are those of the mean of all ranks.

Example: 8 parameters of one size over 4 ranks are one batch, and each rank owns 2 of them. A single
large parameter is a batch by itself: its owner receives everything, the other 3 ranks nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.compiler.cost.local_calls import estimated_size
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.collectives import groups_collective_s
from shardwright.runtime.layout import Layout, Mesh

WHOLES = "wholes all_to_all"
"""The name of the exchange: what its counter is called, and its collective."""

GATHER_PASSES = 5, 3
"""How often a rank reads or writes its pieces on the way to their owners, and an owner its wholes.
"""

SCATTER_PASSES = 2, 4
"""How often a rank and an owner do so on the way back."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the exchange of one or several parameters takes in a step.

    ``gather_s``: the seconds of bringing gradients and values to their owners. ``scatter_s``: those
    of bringing back what owners have updated. ``num_bytes``: what one rank puts into the messages.
    """

    gather_s: float = 0.0
    scatter_s: float = 0.0
    num_bytes: float = 0.0

    @property
    def total_s(self) -> float:
        return self.gather_s + self.scatter_s

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(
            self.gather_s + other.gather_s,
            self.scatter_s + other.scatter_s,
            self.num_bytes + other.num_bytes,
        )


NO_EXCHANGE = Exchange()


def exchange_of(
    layout: Layout,
    gradient: torch.dtype,
    values: torch.dtype,
    mesh: Mesh,
    ranks: Sequence[int],
    hardware: Hardware,
    *,
    num_units: int,
    unit_size: int,
    bucket_bytes: float,
    num_shards: int,
) -> Exchange:
    """The exchange of one parameter that ``layout`` cuts over ``mesh``: its share of batches full
    of such parameters.

    - ``gradient``, ``values``: the dtypes in which these travel.
    - ``ranks``: the global ranks of the first unit that the mesh lies on. Unit ``u`` begins at
      ``u * unit_size``.
    - ``bucket_bytes``: the bytes of gradients in a batch.
    - ``num_shards``: the copies of a piece among which ZeRO has split the state; one of them takes
      part.
    """
    axes = tuple(
        axis for axis in mesh.names if axis in layout.cut_axes and mesh.axis_size(axis) > 1
    )
    # The ranks that hold the pieces of one tensor.
    groups = _groups(axes, mesh, tuple(ranks), num_units, unit_size)
    size, num_ranks = math.prod(map(estimated_size, layout.shape)), len(groups[0])
    if num_ranks == 1 or size == 0:
        return NO_EXCHANGE
    # Tensors go in batches, and the rank that owns most of a batch takes longest.
    together, most = _batch(size, num_ranks, gradient, bucket_bytes)
    piece, owned = size / num_ranks, most * size / together

    def message_s(elements: int, dtype: torch.dtype) -> float:
        return (
            groups_collective_s(hardware, "all_to_all", most * elements * dtype.itemsize, groups)
            / together
        )

    def copies_s(passes: tuple[int, int], num_bytes: int) -> float:
        return (passes[0] * piece + passes[1] * owned) * num_bytes / hardware.device.bytes_per_s

    flagged = size + num_ranks  # behind each piece stands a flag: whether the rank has a gradient
    # There: gradient and values to the owner. Back: the new values.
    gather_s = sum(
        message_s(flagged, dtype) + copies_s(GATHER_PASSES, dtype.itemsize)
        for dtype in (gradient, values)
    )
    scatter_s = message_s(size, values) + copies_s(SCATTER_PASSES, values.itemsize)
    num_bytes = (piece + 1) * (gradient.itemsize + values.itemsize) + piece * values.itemsize
    return Exchange(gather_s / num_shards, scatter_s / num_shards, num_bytes / num_shards)


def message_bytes(
    layout: Layout, gradient: torch.dtype, values: torch.dtype, num_ranks: int, bucket_bytes: float
) -> int:
    """The bytes of one all-to-all of a batch full of such parameters, or of one that is larger than
    ``bucket_bytes`` alone. Each rank counts as if it received as much as the one that owns most.
    """
    size = math.prod(map(estimated_size, layout.shape))
    _, most = _batch(size, num_ranks, gradient, bucket_bytes)
    return most * (size + num_ranks) * max(gradient.itemsize, values.itemsize)


def _batch(
    size: int, num_ranks: int, gradient: torch.dtype, bucket_bytes: float
) -> tuple[int, int]:
    """How many parameters of ``size`` elements travel together, and how many of them one rank owns
    at most.
    """
    together = max(1, int(bucket_bytes / gradient.itemsize / size))
    return together, -(-together // num_ranks)


@functools.lru_cache(maxsize=1024)
def _groups(
    axes: tuple[str, ...], mesh: Mesh, ranks: tuple[int, ...], num_units: int, unit_size: int
) -> Groups:
    """The ranks that hold the pieces of one copy, for all copies, which are exchanged at once."""
    return tuple(
        tuple(unit * unit_size + ranks[index] for index in group)
        for unit in range(num_units)
        for group in mesh.groups(axes)
    )
