"""The exchange that brings an optimizer whole tensors of parameters that the plan cuts: its seconds
and bytes.

Gradients and values of the pieces go to the owner of the whole, one of the ranks that hold them, in
one all-to-all each; what it has updated goes back in a third (``runtime.zero.exchange``).
Parameters travel in batches, one after the other, and nothing runs beside them. A batch waits for
the rank that owns most of it: of a tensor that fills one by itself, the only owner. Owners are
balanced over all parameters, so that a rank's bytes are those of the mean of all ranks.
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
"""What the exchange is called, by what counters and their collective call it."""

GATHER_PASSES = 5, 3
"""How often a rank reads or writes its pieces on their way to their owners, and an owner its
wholes.
"""

SCATTER_PASSES = 2, 4
"""The same on the way back."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What parameters take of the exchange in a step. ``gather_s``: seconds of bringing gradients
    and values to their owners, ``scatter_s`` of bringing back what these have updated.
    ``num_bytes``: that a rank puts into the messages.
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
    """Of one parameter that ``layout`` cuts over ``mesh``, its share of batches full of such
    parameters.

    ``ranks``: the global ranks of the first unit that the mesh lies on; unit ``u`` begins at ``u *
    unit_size``.
    ``bucket_bytes``: of gradients in a batch. ``num_shards``: the copies of a piece among which
    ZeRO has split the state; one of them takes part.
    """
    axes = tuple(
        axis for axis in mesh.names if axis in layout.cut_axes and mesh.axis_size(axis) > 1
    )
    groups = _groups(axes, mesh, tuple(ranks), num_units, unit_size)
    size, num_ranks = math.prod(map(estimated_size, layout.shape)), len(groups[0])
    if num_ranks == 1 or size == 0:
        return NO_EXCHANGE
    together, most = _batch(size, num_ranks, gradient, bucket_bytes)
    piece, owned = size / num_ranks, most * size / together

    def message_s(elements: int, dtype: torch.dtype) -> float:
        return (
            groups_collective_s(hardware, "all_to_all", most * elements * dtype.itemsize, groups)
            / together
        )

    def copies_s(passes: tuple[int, int], num_bytes: int) -> float:
        return (passes[0] * piece + passes[1] * owned) * num_bytes / hardware.device.bytes_per_s

    flagged = size + num_ranks  # behind each piece stands whether there is one
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
    """Of a message of a batch full of such parameters, or of one alone if it is larger than
    ``bucket_bytes``; counted as of an all-to-all in which each rank receives as much as the one
    that owns most.
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
