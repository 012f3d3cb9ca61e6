"""What ranks communicate through, and the memory that it needs.

Example: two ranks sum a gradient of 8 MB, and each gets its half of the sum. Over NCCL a rank holds
the 8 MB and its half. Over gloo it holds 8 MB more: the halves that come from both ranks, which it
adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Backend = Literal["nccl", "gloo"]
"""The backend of ``torch.distributed``. A rank that is a thread of a process with other ranks holds
what it would hold over NCCL.
"""

MOST_MEMORY: Backend = "gloo"
"""The backend that is assumed where no machine is known: it needs most memory."""


def reduce_scatter_bytes(
    sizes: Sequence[int], num_ranks: int, backend: Backend, *, evenly: bool = True
) -> int:
    """The bytes that a rank needs beside tensors of these ``sizes`` and its pieces of their sums,
    while one reduce-scatter over ``num_ranks`` ranks sums them. ``evenly``: whether the pieces are
    as large as each other.

    NCCL adds in place. Over gloo, and of uneven pieces, the runtime has ranks exchange their pieces
    and adds what it receives. Over gloo it lays several tensors end to end for that, and their sums
    too (``runtime/ranks/process_group.py``).
    """
    total = sum(sizes)
    if backend == "nccl":
        return 0 if evenly else total
    return total if len(sizes) == 1 else 2 * total + total // num_ranks
