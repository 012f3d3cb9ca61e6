"""The pieces of parameters that a rank trains, and which part of each it updates where ZeRO splits the state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.compiler.cost.optimizer_memory import OptimizerMemory, state_bytes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.zero.settings import ReductionSettings
from shardwright.runtime.zero.split import balanced_owners


@dataclass(frozen=True, slots=True)
class Trained:
    """A piece ``shape`` of a trained parameter on this rank, summed over ``copies`` ranks that split its state into ``shards``.
    Parameters of one ``group`` are summed over the same ranks. ``is_shared``: other stages hold it too.

    ``cut``: the axes, and their sizes, over which pieces lie that make a tensor of shape ``whole``, where the optimizer needs
    that; empty where it takes the piece.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: int
    shards: int
    group: object
    is_shared: bool = False
    whole: tuple[int, ...] = ()
    cut: tuple[tuple[str, int], ...] = ()

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


def updated_shares(packed: Sequence[Trained], optimizer: OptimizerMemory, config: ComputeConfig) -> Mapping[str, float]:
    """By name, the share of a parameter that the rank updates which keeps the most state. ``packed``: in the order in which
    buckets hold them.

    An optimizer that treats every element by itself updates an even share. Any other one gets whole parameters, each on one
    rank, as ``runtime.zero.build`` deals them; where several groups split their state, no rank need be the one with the most
    of each. Where the plan cuts a parameter so that its pieces go on to an owner, that is the share of a piece.
    """
    if optimizer.is_elementwise:
        return {item.name: 1 / item.shards for item in packed}
    groups: dict[tuple[object, int], list[Trained]] = {}
    for item in packed:
        groups.setdefault((item.group, item.shards), []).append(item)
    shares: dict[str, float] = {}
    for (_, num_ranks), items in groups.items():
        owners = balanced_owners([item.num_elements for item in items], num_ranks)
        kept = [0.0] * num_ranks
        for item, owner in zip(items, owners, strict=True):
            kept[owner] += 0.0 if item.cut else state_bytes(optimizer, item.shape, item.dtype, config)
        for rank in range(num_ranks):
            exchanged = [item for item, owner in zip(items, owners, strict=True) if item.cut and owner == rank]
            kept[rank] += most_owned(exchanged, config, optimizer)[1]
        most = max(range(num_ranks), key=kept.__getitem__)
        shares |= {item.name: float(owner == most) for item, owner in zip(items, owners, strict=True)}
    return shares


def most_owned(exchanged: Sequence[Trained], config: ComputeConfig, optimizer: OptimizerMemory) -> tuple[frozenset[str], float]:
    """Of the whole tensors that the plan cuts, the names of those that the rank owns for which state, values and gradients of
    its wholes take most, and how many bytes. Owners are those of ``runtime.zero.exchange``.
    """
    axes = {axis: size for item in exchanged for axis, size in item.cut}
    loads = dict.fromkeys(itertools.product(*map(range, axes.values())), 0)
    held = dict.fromkeys(loads, 0.0)
    owned: dict[tuple[int, ...], list[str]] = {place: [] for place in loads}
    settings = ReductionSettings.of(config, config.num_units)
    groups: dict[object, list[list[tuple[int, ...]]]] = {}
    for item in sorted(exchanged, key=lambda item: (-item.whole_elements, item.name)):
        if item.cut not in groups:
            groups[item.cut] = _alike(loads, [axis not in dict(item.cut) for axis in axes])
        num_bytes = state_bytes(optimizer, item.whole, item.dtype, config)
        num_bytes += item.whole_elements * (item.dtype.itemsize + settings.state_dtype(item.dtype).itemsize)
        for group in groups[item.cut]:
            owner = min(group, key=loads.__getitem__)
            loads[owner] += item.whole_elements
            held[owner] += num_bytes
            owned[owner].append(item.name)
    most = max(held, key=held.__getitem__)
    return frozenset(owned[most]), held[most]


def _alike(places: Iterable[tuple[int, ...]], kept: Sequence[bool]) -> list[list[tuple[int, ...]]]:
    """Places that differ along axes only that are not ``kept``."""
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in places:
        groups.setdefault(tuple(itertools.compress(place, kept)), []).append(place)
    return list(groups.values())
