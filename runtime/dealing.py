"""How gradients are dealt into buckets, and parameters to the ranks that update them.

The runtime deals by these functions, and so does the cost model, which thereby counts the buckets
and owners that a run has. Everything here is plain data: no tensors, no ranks.

An example: gradients of 4, 4 and 8 bytes, summed over the same ranks, come in this order, and a
bucket holds 10 bytes. The first two share a bucket, the third gets the next one. Where three
parameters of 5, 4 and 3 elements have two ranks to own them, the first rank gets 5 and the second 4
and 3.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

EXCHANGES_UNDER_WAY = 2
"""How many exchanges may be under way at a time: sums of gradients that need room of their own, and
buckets of parameters that are gathered.
"""

Place = TypeVar("Place", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class Entry(NamedTuple):
    """What decides which bucket a gradient comes to.

    ``group``: what it is summed over; equal for gradients that are summed over the same ranks.
    ``dtype``: of the parameter.
    ``num_bytes``: in the bucket, on the rank with the largest piece, so that all ranks make the
    same buckets. ``is_apart``: it shares no bucket with gradients that are not, as the optimizer
    gets the whole tensor from several ranks.
    """

    group: Hashable
    dtype: Hashable
    num_bytes: float
    is_apart: bool = False


def in_use_order(names: Sequence[str], used: Iterable[str]) -> list[int]:
    """The indices of ``names`` in the order in which forward uses them. What it never uses comes
    first: backward, which takes the other direction, must not wait for it before the others.
    """
    position = {name: index for index, name in enumerate(used)}
    return sorted(range(len(names)), key=lambda index: position.get(names[index], -1))


def deal_buckets(entries: Sequence[Entry], cap_bytes: float) -> list[list[int]]:
    """The indices of ``entries`` by bucket, each of at most ``cap_bytes`` (a larger gradient gets
    one of its own).

    ``entries`` is in the order in which backward is expected to bring the gradients; so are the
    buckets, by their last member.
    """
    filling: dict[Hashable, tuple[list[int], float]] = {}
    buckets: list[list[int]] = []
    for index, entry in enumerate(entries):
        # A bucket is summed in one collective: over one group, in one dtype.
        key = (entry.group, entry.dtype, entry.is_apart)
        members, filled = filling.get(key, ([], 0.0))
        if not members or filled + entry.num_bytes > cap_bytes:
            members, filled = [], 0.0
            buckets.append(members)
        members.append(index)
        filling[key] = (members, filled + entry.num_bytes)
    # In the order in which they are complete, as backward fills them.
    return sorted(buckets, key=lambda members: members[-1])


def deal_owners(
    wholes: Iterable[tuple[Key, int, Sequence[Place]]], loads: MutableMapping[Place, int]
) -> dict[Key, Place]:
    """The place that owns each tensor, by key: the largest first, each to the one of its places
    that has least so far.

    ``wholes``: a key that sorts, the number of elements, and the places that may own it. ``loads``:
    the elements that each place has already; those it gets are added. Where all places may own
    everything, no place gets more than 4/3 of the best possible maximum (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969).
    """
    owners: dict[Key, Place] = {}
    ordered: list[Any] = sorted(wholes, key=lambda whole: (-whole[1], whole[0]))
    for key, size, places in ordered:
        owners[key] = min(places, key=loads.__getitem__)
        loads[owners[key]] += size
    return owners


def balanced_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Which of ``num_ranks`` owns each of the parameters of ``sizes``; any of them may."""
    places = range(num_ranks)
    owners = deal_owners(
        ((index, size, places) for index, size in enumerate(sizes)), dict.fromkeys(places, 0)
    )
    return [owners[index] for index in range(len(sizes))]


def even_sizes(num_elements: int, num_ranks: int) -> list[int]:
    """The sizes of equal slices that hold ``num_elements``; the last ones may reach beyond them."""
    return [-(-num_elements // num_ranks)] * num_ranks
