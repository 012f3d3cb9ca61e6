"""The pieces of parameters that a rank trains, and which part of each it updates where ZeRO splits the state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.compiler.cost.optimizer_memory import OptimizerMemory, state_bytes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.zero.split import balanced_owners


@dataclass(frozen=True, slots=True)
class Trained:
    """A piece ``shape`` of a trained parameter on this rank, summed over ``copies`` ranks that split its state into ``shards``.
    Parameters of one ``group`` are summed over the same ranks. ``is_shared``: other stages hold it too.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: int
    shards: int
    group: object
    is_shared: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def updated_shares(packed: Sequence[Trained], optimizer: OptimizerMemory, config: ComputeConfig) -> Mapping[str, float]:
    """By name, the share of a parameter that the rank updates which keeps the most state. ``packed``: in the order in which
    buckets hold them.

    An optimizer that treats every element by itself updates an even share. Any other one gets whole parameters, each on one
    rank, as ``runtime.zero.build`` deals them; where several groups split their state, no rank need be the one with the most
    of each.
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
            kept[owner] += state_bytes(optimizer, item.shape, item.dtype, config)
        most = max(range(num_ranks), key=kept.__getitem__)
        shares |= {item.name: float(owner == most) for item, owner in zip(items, owners, strict=True)}
    return shares
