"""Making the buckets and shards of a distributed optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.runtime.bucket import Bucket, GradientSum, hold_gradients_in
from shardwright.runtime.dealing import balanced_owners, even_sizes
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.ranks.world import World
from shardwright.runtime.zero.arena import Arenas
from shardwright.runtime.zero.copy_groups import ZeroGroup, deal, undivided
from shardwright.runtime.zero.gathering import make_contiguous
from shardwright.runtime.zero.remainders import Remainder
from shardwright.runtime.zero.settings import ReductionSettings
from shardwright.runtime.zero.sharded_bucket import ShardedBucket
from shardwright.runtime.zero.shards import ParameterShard, shard_tensor
from shardwright.runtime.zero.update_split import owned_sizes, pieces


def sharded_buckets(
    world: World,
    packed: Sequence[Sequence[GradientSum]],
    settings: ReductionSettings,
    *,
    whole_parameters: bool,
    exchanged: Collection[str] = (),
) -> list[Bucket]:
    """The buckets of ``packed``, with this rank's shards of their parameters. Collective.

    ``whole_parameters``: each parameter is updated by one rank; otherwise ranks update equal slices
    of a bucket. A parameter that no other rank has a copy of stays what it is. Without a stage of
    ZeRO each rank updates all of every parameter, in its own shape.

    ``exchanged``: the names of parameters that the optimizer gets from several ranks
    (``whole_exchange.py``). Their shards are only pieces on the way to an owner, so their gradients
    stay in the dtype in which they are reduced.

    Raises :class:`ConfigError` if masters are to be kept as remainders, and a parameter's dtype is
    no upper half of the master's.
    """
    sums = [item for members in packed for item in members]
    if settings.stores_remainders:
        _check_remainders(world, sums)
    # The ranks among which the update of each parameter is split.
    communicators = [item.communicator for item in sums]
    groups = (
        deal(world, communicators, settings.num_groups)
        if settings.stage
        else undivided(communicators)
    )
    leaders = _counting_ranks(world, sums)
    # Whole parameters have an owner each; flat slices need none.
    owners = _owners(sums, groups) if whole_parameters or not settings.stage else None
    laid = [_lay(members, groups[members[0].communicator.ranks], owners) for members in packed]
    # All places are reserved before any is taken: an arena is as long as what all buckets need.
    parameters, gradients = Arenas(), Arenas()
    is_split = [settings.updates_shards(item.dtype, item.group.inside.size) for item in laid]
    places = [
        parameters.of(item.dtype).reserve(sum(item.slice_sizes)) if split else 0
        for item, split in zip(laid, is_split, strict=True)
    ]
    buckets: list[Bucket] = []
    for item, place, split in zip(laid, places, is_split, strict=True):
        if not split:
            buckets.append(Bucket(item.members))
            continue
        # Not split: every rank updates all of it, and only sums are made.
        buffer = arena = None
        if settings.contiguous_parameters:
            device = item.members[0].parameter.device
            buffer = parameters.of(item.dtype).take(place, sum(item.slice_sizes), device)
            make_contiguous(item.members, buffer)
        # Gradients of the whole bucket stay in one piece of memory.
        if settings.keeps_gradient_buffer:
            arena = gradients.of(settings.gradient_dtype(item.dtype))
        shards = _shards(item, settings, leaders, flat=owners is None, exchanged=exchanged)
        buckets.append(
            ShardedBucket(
                item.members, item.group, item.slice_sizes, shards, settings, buffer, arena
            )
        )
    return buckets


@dataclass(frozen=True, slots=True)
class _Laid:
    """A bucket as it lies in memory: its members in order, and the size of the slice of each rank
    of ``group.inside``, in elements.
    """

    members: Sequence[GradientSum]
    group: ZeroGroup
    slice_sizes: Sequence[int]

    @property
    def sizes(self) -> list[int]:
        return [item.parameter.numel() for item in self.members]

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].parameter.dtype


def _lay(
    members: Sequence[GradientSum], group: ZeroGroup, owners: Mapping[str, int] | None
) -> _Laid:
    if owners is None:
        return _Laid(
            members,
            group,
            even_sizes(sum(item.parameter.numel() for item in members), group.inside.size),
        )
    # What one rank owns lies together, so that it is the rank's slice.
    members = sorted(members, key=lambda item: owners[item.name])
    sizes = [item.parameter.numel() for item in members]
    return _Laid(
        members,
        group,
        owned_sizes(sizes, [owners[item.name] for item in members], group.inside.size),
    )


def _shards(
    laid: _Laid,
    settings: ReductionSettings,
    leaders: Mapping[str, set[int]],
    *,
    flat: bool,
    exchanged: Collection[str],
) -> list[ParameterShard]:
    group, shards = laid.group, []
    # ``ranges``: for each rank of the group the elements of this parameter that it updates.
    for item, ranges in zip(laid.members, pieces(laid.sizes, laid.slice_sizes), strict=True):
        start, stop = ranges[group.inside.index]
        dtype = laid.dtype if item.name in exchanged else settings.state_dtype(laid.dtype)
        tensor, is_view = shard_tensor(item.parameter, start, stop, dtype, flat=flat)
        # Its gradient goes to an owner, and may be in another dtype than the piece.
        if item.name in exchanged:
            hold_gradients_in(tensor, settings.gradient_dtype(laid.dtype))
        remainder = None
        # The low 16 bits of a float32 master; the parameter itself holds the high ones.
        if settings.stores_remainders and laid.dtype == torch.bfloat16 and start < stop:
            remainder = Remainder(
                torch.zeros(stop - start, dtype=torch.int16, device=tensor.device)
            )
        # Several groups have copies of this part: the first one counts it, in the set of ranks that
        # counts this piece of the parameter at all.
        is_counted = group.across.index == 0 and not leaders[item.name].isdisjoint(
            group.everyone.ranks
        )
        # Who holds which elements, for checkpoints.
        held = tuple(
            (rank, a, b) for rank, (a, b) in zip(group.inside.ranks, ranges, strict=True) if a < b
        )
        shards.append(
            ParameterShard(
                name=item.name,
                parameter=item.parameter,
                layout=item.layout,
                tensor=tensor,
                start=start,
                stop=stop,
                is_view=is_view,
                pieces=held,
                copies=group.across.ranks,
                is_counted=is_counted,
                remainder=remainder,
            )
        )
    return shards


def shards_of(buckets: Sequence[Bucket]) -> list[ParameterShard]:
    """All shards of this rank."""
    return list(
        itertools.chain.from_iterable(
            bucket.shards for bucket in buckets if isinstance(bucket, ShardedBucket)
        )
    )


def _check_remainders(world: World, sums: Sequence[GradientSum]) -> None:
    names: dict[str, str] = {}
    for of_rank in world.all_gather_object({str(item.parameter.dtype): item.name for item in sums}):
        names = of_rank | names
    # bfloat16 is the upper half of a float32 number, so a master is the parameter and 16 bits more.
    # Of all ranks, as a stage of a pipeline may have only other parameters.
    if "torch.float16" in names:
        raise ConfigError(
            "store_param_remainders is not possible for float16 parameters",
            why=f"{names['torch.float16']!r} is one, and no part of a float32 number: its "
            "exponent has fewer bits",
            hint="leave out store_param_remainders, or train in bfloat16",
        )
    if "torch.bfloat16" not in names:
        raise ConfigError(
            "store_param_remainders has nothing to do",
            why="no trained parameter is of bfloat16: "
            + ", ".join(f"{name!r} is {dtype}" for dtype, name in names.items()),
            hint="leave it out, or convert the module to bfloat16 before it is compiled",
        )


def _counting_ranks(world: World, sums: Sequence[GradientSum]) -> dict[str, set[int]]:
    """The ranks that count their piece of each parameter, by its name: one rank for each distinct
    piece.
    """
    everyone = world.all_gather_object([item.name for item in sums if item.is_counted])
    leaders: dict[str, set[int]] = {item.name: set() for item in sums}
    for rank, names in enumerate(everyone):
        for name in names:
            leaders.setdefault(name, set()).add(rank)
    return leaders


def _owners(
    sums: Sequence[GradientSum], groups: Mapping[tuple[int, ...], ZeroGroup]
) -> dict[str, int]:
    """The index within its group of the rank that owns each parameter, by its name. Owners are
    balanced over all parameters of a group.
    """
    by_group: dict[tuple[int, ...], list[GradientSum]] = {}
    for item in sums:
        by_group.setdefault(item.communicator.ranks, []).append(item)
    owners = {}
    for ranks, items in by_group.items():
        found = balanced_owners([item.num_elements for item in items], groups[ranks].inside.size)
        owners.update({item.name: owner for item, owner in zip(items, found, strict=True)})
    return owners
