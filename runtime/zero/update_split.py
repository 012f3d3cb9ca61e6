"""Splits: which part of a bucket each rank of a group updates.

The parameters of a bucket lie end to end in one flat buffer; rank ``i`` of the group updates the
``i``-th slice of it. For optimizers that treat every element by itself the slices are equal,
whatever parameters they cut. Others update whole parameters: each is owned by one rank, the bucket
holds them in the order of their owners, and slices differ in size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "ASGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Rprop",
    )
)
"""Optimizers whose update of an element depends on that element's gradients only, so that they work
on any shard.
"""


def owned_sizes(sizes: Sequence[int], owners: Sequence[int], num_ranks: int) -> list[int]:
    """The sizes of the slices of parameters of ``sizes``, which lie in the order of their
    ``owners``.
    """
    assert list(owners) == sorted(owners), (
        f"parameters of {list(owners)} do not lie in the order of their owners"
    )
    result = [0] * num_ranks
    for size, owner in zip(sizes, owners, strict=True):
        result[owner] += size
    return result


def pieces(sizes: Sequence[int], slice_sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """By parameter, then by rank: ``(start, stop)`` within the flat parameter of what lies in the
    rank's slice.
    """
    bounds = [0, *itertools.accumulate(slice_sizes)]
    starts = [0, *itertools.accumulate(sizes)]
    result = []
    for start, size in zip(starts, sizes, strict=False):
        row = []
        for low, high in itertools.pairwise(bounds):
            first = min(max(low - start, 0), size)
            row.append((first, min(max(high - start, first), size)))
        result.append(row)
    return result
