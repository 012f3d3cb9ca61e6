"""The pieces of parameters that a rank trains, and which part of each it updates if ZeRO splits the
optimizer's state.

Example: three parameters of 40, 30 and 30 elements, and state that is split over 2 ranks. With
Adam, which treats every element by itself, each rank updates half of each parameter. With an
optimizer that needs whole parameters, one rank updates the 40, the other one the two of 30.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory, state_bytes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.dealing import balanced_owners, deal_owners


@dataclass(frozen=True, slots=True)
class Trained:
    """The piece of a trained parameter on the rank.

    - ``name``: the name of the value, and ``fqn`` that of the parameter in the module.
    - ``shape``: the shape of the piece.
    - ``copies``: the ranks over which its gradient is summed, and ``shards`` the parts into which
      they split its state.
    - ``group``: equal for parameters that are summed over the same ranks.
    - ``cut``: the axes, with sizes, over which the pieces of a tensor of shape ``whole`` lie, if
      the optimizer needs that tensor. It is empty if the optimizer takes the piece.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: int
    shards: int
    group: object
    whole: tuple[int, ...] = ()
    cut: tuple[tuple[str, int], ...] = ()
    fqn: str = ""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def whole_elements(self) -> int:
        return math.prod(self.whole)

    @property
    def updated_shape(self) -> tuple[int, ...]:
        """The shape of what the optimizer updates, unless ZeRO splits it."""
        return self.whole if self.cut else self.shape


def updated_shares(
    packed: Sequence[Trained], optimizer: OptimizerMemory, config: ComputeConfig
) -> Mapping[str, float]:
    """The share of each parameter, by name, that the busiest rank updates: the one that needs most
    memory for it. ``packed``: the parameters in the order in which buckets hold them.

    An optimizer that treats every element by itself updates an even share on each rank. Any other
    one gets whole parameters, each on one rank, as the runtime deals them. If the plan cuts a
    parameter, so that its pieces go on to an owner, the share is that of a piece. Each group that
    splits its state has its own busiest rank, so with several groups this is an upper bound.
    """
    if optimizer.is_elementwise:
        # An elementwise update is split evenly, whatever the shapes.
        return {item.name: 1 / item.shards for item in packed}

    def needed_bytes(item: Trained) -> float:
        # The owner of a parameter in pieces gathers its value and its gradient first.
        values_and_gradients = 2 * item.whole_elements * item.dtype.itemsize if item.cut else 0
        return state_bytes(optimizer, item.updated_shape, item.dtype, config) + values_and_gradients

    shares: dict[str, float] = {}
    for ranks in _dealt(packed):
        most = max(ranks, key=lambda items: _most(items, needed_bytes))
        shares |= {item.name: float(items is most) for items in ranks for item in items}
    return shares


def most_state_bytes(
    packed: Sequence[Trained], optimizer: OptimizerMemory, config: ComputeConfig
) -> float:
    """The bytes of the optimizer's state on the rank that keeps most. It need not be the rank of
    :func:`updated_shares`.
    """

    def kept_bytes(item: Trained) -> float:
        return state_bytes(optimizer, item.updated_shape, item.dtype, config)

    if optimizer.is_elementwise:
        return sum(kept_bytes(item) / item.shards for item in packed)
    return sum(max(_most(items, kept_bytes) for items in ranks) for ranks in _dealt(packed))


def _dealt(packed: Iterable[Trained]) -> Iterator[list[list[Trained]]]:
    """What each rank updates, for one group that splits its state after the other. Everything that
    is not split makes one more group, of one rank.
    """
    groups: dict[object, list[Trained]] = {}
    for item in packed:
        groups.setdefault((item.group, item.shards) if item.shards > 1 else None, []).append(item)
    for items in groups.values():
        ranks: list[list[Trained]] = [[] for _ in range(items[0].shards)]
        for item, owner in zip(
            items, balanced_owners([item.num_elements for item in items], len(ranks)), strict=True
        ):
            ranks[owner].append(item)
        yield ranks


def _most(items: Sequence[Trained], weigh: Callable[[Trained], float]) -> float:
    """The weight of ``items`` on the rank that has most: everything that the plan leaves whole, and
    the tensors that it owns of the rest.
    """
    return (
        sum(weigh(item) for item in items if not item.cut)
        + most_owned([item for item in items if item.cut], weigh)[1]
    )


def most_owned(
    exchanged: Iterable[Trained], weigh: Callable[[Trained], float]
) -> tuple[frozenset[str], float]:
    """The names of the whole tensors on the rank whose own weigh most, and their weight.

    ``exchanged``: parameters that the plan cuts, and whose optimizer needs them whole.
    """
    # A place on the mesh, one index per axis, stands for a rank.
    items = {item.fqn or item.name: item for item in exchanged}
    axes = {axis: size for item in items.values() for axis, size in item.cut}
    # Deal owners as the runtime does: the place with the least to own gets the next one.
    loads = dict.fromkeys(itertools.product(*map(range, axes.values())), 0)
    weights = dict.fromkeys(loads, 0.0)
    owned: dict[tuple[int, ...], list[str]] = {place: [] for place in loads}
    cuts = dict.fromkeys(item.cut for item in items.values())
    # The places that differ along the cut axes only hold the pieces of one tensor.
    groups = {cut: _alike(loads, [axis not in dict(cut) for axis in axes]) for cut in cuts}
    # One whole per parameter and group of places that holds its pieces: each has one owner there.
    wholes = (
        ((fqn, tuple(group)), item.whole_elements, group)
        for fqn, item in items.items()
        for group in groups[item.cut]
    )
    for (fqn, _), owner in deal_owners(wholes, loads).items():
        weights[owner] += weigh(items[fqn])
        owned[owner].append(items[fqn].name)
    most = max(weights, key=weights.__getitem__)
    return frozenset(owned[most]), weights[most]


def _alike(places: Iterable[tuple[int, ...]], kept: Sequence[bool]) -> list[list[tuple[int, ...]]]:
    """The places in groups: those of one group differ only along axes that are not ``kept``."""
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in places:
        groups.setdefault(tuple(itertools.compress(place, kept)), []).append(place)
    return list(groups.values())
