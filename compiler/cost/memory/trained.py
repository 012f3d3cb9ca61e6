"""The pieces of parameters that a rank trains, and which part of each it updates where ZeRO splits
the state.
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
    """A piece ``shape`` of a trained parameter on this rank, summed over ``copies`` ranks that
    split its state into ``shards``. Parameters of one ``group`` are summed over the same ranks.
    ``name``: of the value, ``fqn`` in the module.

    ``cut``: the axes, and their sizes, over which pieces lie that make a tensor of shape ``whole``,
    where the optimizer needs that; empty where it takes the piece.
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
        """Of what the optimizer updates, where ZeRO does not split it."""
        return self.whole if self.cut else self.shape


def updated_shares(
    packed: Sequence[Trained], optimizer: OptimizerMemory, config: ComputeConfig
) -> Mapping[str, float]:
    """By name, the share of a parameter that the rank updates which needs most for that.
    ``packed``: in the order in which buckets hold them.

    An optimizer that treats every element by itself updates an even share. Any other one gets whole
    parameters, each on one rank, as the runtime deals them; where several groups split their state,
    no rank need be the one with the most of each. Where the plan cuts a parameter so that its
    pieces go on to an owner, that is the share of a piece.
    """
    if optimizer.is_elementwise:
        return {item.name: 1 / item.shards for item in packed}

    def needed_bytes(item: Trained) -> float:
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
    """Of the optimizer's state on the rank that keeps most, which need not be the one of
    :func:`updated_shares`.
    """

    def kept_bytes(item: Trained) -> float:
        return state_bytes(optimizer, item.updated_shape, item.dtype, config)

    if optimizer.is_elementwise:
        return sum(kept_bytes(item) / item.shards for item in packed)
    return sum(max(_most(items, kept_bytes) for items in ranks) for ranks in _dealt(packed))


def _dealt(packed: Iterable[Trained]) -> Iterator[list[list[Trained]]]:
    """For each group that splits its state, what each of its ranks updates; all that is not split,
    together.
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
    """What of ``items`` weighs on the rank that has most: all that the plan leaves whole, and what
    it owns of the rest.
    """
    return (
        sum(weigh(item) for item in items if not item.cut)
        + most_owned([item for item in items if item.cut], weigh)[1]
    )


def most_owned(
    exchanged: Iterable[Trained], weigh: Callable[[Trained], float]
) -> tuple[frozenset[str], float]:
    """Of the whole tensors that the plan cuts, the names of those of the rank whose own weigh most,
    and how much that is.

    Places on the mesh stand for ranks.
    """
    items = {item.fqn or item.name: item for item in exchanged}
    axes = {axis: size for item in items.values() for axis, size in item.cut}
    loads = dict.fromkeys(itertools.product(*map(range, axes.values())), 0)
    weights = dict.fromkeys(loads, 0.0)
    owned: dict[tuple[int, ...], list[str]] = {place: [] for place in loads}
    cuts = dict.fromkeys(item.cut for item in items.values())
    groups = {cut: _alike(loads, [axis not in dict(cut) for axis in axes]) for cut in cuts}
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
    """Places that differ along axes only that are not ``kept``."""
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in places:
        groups.setdefault(tuple(itertools.compress(place, kept)), []).append(place)
    return list(groups.values())
