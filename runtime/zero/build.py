"""Making the buckets and shards of a distributed optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from shardwright.runtime.bucket import Bucket, GradientSum
from shardwright.runtime.world import World
from shardwright.runtime.zero.bucket import ShardedBucket
from shardwright.runtime.zero.gathering import contiguous
from shardwright.runtime.zero.groups import ZeroGroup, deal
from shardwright.runtime.zero.settings import ReductionSettings
from shardwright.runtime.zero.shards import ParameterShard, shard_tensor
from shardwright.runtime.zero.split import balanced_owners, even_sizes, owned_sizes, pieces


def sharded_buckets(
    world: World, packed: Sequence[Sequence[GradientSum]], settings: ReductionSettings, *, whole_parameters: bool
) -> list[Bucket]:
    """The buckets of ``packed``, with this rank's shards of their parameters. Collective.

    ``whole_parameters``: each parameter is updated by one rank; else ranks update equal slices of a bucket. A parameter that no
    other rank has a copy of stays what it is.
    """
    sums = [item for members in packed for item in members]
    groups = deal(world, [item.communicator for item in sums], settings.num_groups)
    leaders = _counting_ranks(world, sums)
    owners = _owners(sums, groups) if whole_parameters else None
    buckets: list[Bucket] = []
    for members in packed:
        first = members[0]
        group = groups[first.communicator.ranks]
        dtype = settings.state_dtype(first.parameter.dtype)
        if group.inside.size == 1 and dtype == first.parameter.dtype:
            buckets.append(Bucket(members))
            continue
        num_ranks = group.inside.size
        if owners is None:
            sizes = [item.parameter.numel() for item in members]
            slice_sizes = even_sizes(sum(sizes), num_ranks)
        else:
            members = sorted(members, key=lambda item: owners[item.name])
            sizes = [item.parameter.numel() for item in members]
            slice_sizes = owned_sizes(sizes, [owners[item.name] for item in members], num_ranks)
        buffer = contiguous(members, sum(slice_sizes)) if settings.contiguous_parameters else None
        shards = []
        for item, ranges in zip(members, pieces(sizes, slice_sizes), strict=True):
            start, stop = ranges[group.inside.index]
            tensor, is_view = shard_tensor(item.parameter, start, stop, dtype, flat=owners is None)
            is_counted = group.across.index == 0 and not leaders[item.name].isdisjoint(group.everyone.ranks)
            held = tuple((rank, a, b) for rank, (a, b) in zip(group.inside.ranks, ranges, strict=True) if a < b)
            shards.append(
                ParameterShard(
                    item.name, item.parameter, item.layout, tensor, start, stop, is_view, held, group.across.ranks, is_counted
                )
            )
        buckets.append(ShardedBucket(members, group, slice_sizes, shards, settings, buffer))
    return buckets


def shards_of(buckets: Sequence[Bucket]) -> list[ParameterShard]:
    """All shards of this rank."""
    return list(itertools.chain.from_iterable(bucket.shards for bucket in buckets if isinstance(bucket, ShardedBucket)))


def _counting_ranks(world: World, sums: Sequence[GradientSum]) -> dict[str, set[int]]:
    """By name, the ranks that count their piece of a parameter: one for each distinct piece."""
    everyone = world.all_gather_object([item.name for item in sums if item.is_counted])
    leaders: dict[str, set[int]] = {item.name: set() for item in sums}
    for rank, names in enumerate(everyone):
        for name in names:
            leaders.setdefault(name, set()).add(rank)
    return leaders


def _owners(sums: Sequence[GradientSum], groups: Mapping[tuple[int, ...], ZeroGroup]) -> dict[str, int]:
    """By name, the index of the rank that owns a parameter, balanced over all parameters of a group."""
    by_group: dict[tuple[int, ...], list[GradientSum]] = {}
    for item in sums:
        by_group.setdefault(item.communicator.ranks, []).append(item)
    owners = {}
    for ranks, items in by_group.items():
        found = balanced_owners([item.num_elements for item in items], groups[ranks].inside.size)
        owners.update({item.name: owner for item, owner in zip(items, found, strict=True)})
    return owners
