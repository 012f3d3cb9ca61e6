"""Which part of a bucket each rank of a group updates.

The parameters of a bucket lie end to end in one flat buffer, and rank ``i`` of the group updates
the ``i``-th slice of it. For optimizers that treat every element by itself the slices are equal,
whatever parameters they cut. Other optimizers update whole parameters: one rank owns each of them,
the bucket holds them in the order of their owners, and slices differ in size.

Example: parameters of 6 and 2 elements on 2 ranks. Equal slices give rank 0 the first 4 elements of
the first parameter; rank 1 has its other 2 and the second parameter. With owners, rank 0 has the
first parameter, rank 1 the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import optim
from torch.optim import Optimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    (
        *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop),
    )
)
"""The optimizers that work on any shard: the update of an element depends on the gradients of that
element only.
"""


def owned_sizes(sizes: Sequence[int], owners: Sequence[int], num_ranks: int) -> list[int]:
    """The size of each rank's slice, in elements, if ranks own whole parameters. ``sizes`` and
    ``owners``: those of the parameters, in the order in which they lie.
    """
    assert list(owners) == sorted(owners), (
        f"parameters of {list(owners)} do not lie in the order of their owners"
    )
    result = [0] * num_ranks
    for size, owner in zip(sizes, owners, strict=True):
        result[owner] += size
    return result


def pieces(sizes: Sequence[int], slice_sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The range ``(start, stop)`` of each flat parameter that lies in each rank's slice: a row for
    each parameter, with an entry for each rank. A range may be empty.
    """
    bounds = [0, *itertools.accumulate(slice_sizes)]
    starts = [0, *itertools.accumulate(sizes)]
    result = []
    for start, size in zip(starts, sizes, strict=False):
        row = []
        for low, high in itertools.pairwise(bounds):
            # The slice's bounds, seen from the beginning of the parameter and cut off at its ends.
            first = min(max(low - start, 0), size)
            row.append((first, min(max(high - start, first), size)))
        result.append(row)
    return result
