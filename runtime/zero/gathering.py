"""Gathering: after a step, what each rank has updated of a bucket's parameters goes to all ranks of the group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwright.runtime.bucket import Bucket
from shardwright.runtime.communicator import Work
from shardwright.runtime.zero.bucket import ShardedBucket


class BucketGathering:
    """Brings the parameters of one bucket to all ranks of its group, in the dtype of the parameters."""

    def __init__(self, bucket: ShardedBucket) -> None:
        self._bucket = bucket
        self._buffer: Tensor | None = None
        self._work: Work | None = None

    def start(self) -> None:
        """Begin: what this rank updated is read now."""
        bucket = self._bucket
        first = bucket.members[0].parameter
        self._buffer = first.detach().new_empty(bucket.length)
        mine = self._buffer[bucket.low : bucket.high]
        for shard, offset in zip(bucket.shards, bucket.offsets, strict=True):
            if shard.num_elements:
                mine[offset : offset + shard.num_elements].copy_(shard.tensor.detach().view(-1))
        self._work = bucket.group.inside.all_gather_async_(self._buffer, bucket.slice_sizes)

    def finish(self) -> None:
        """Wait, and write the parameters. Does nothing if nothing has started."""
        if self._work is None or self._buffer is None:
            return
        self._work.wait()
        bucket = self._bucket
        with torch.no_grad():
            for member, piece in zip(bucket.members, torch.split(self._buffer[: sum(bucket.sizes)], bucket.sizes), strict=True):
                member.parameter.copy_(piece.view(member.parameter.shape))
        self._work, self._buffer = None, None


def gathered_gradients(buckets: Iterable[Bucket]) -> dict[str, Tensor | None]:
    """The reduced gradients by name of the parameter, on every rank all of its local piece. Collective.

    For looking at them: where gradients are scattered, this holds in memory what ZeRO saves.
    """
    gradients: dict[str, Tensor | None] = {}
    for bucket in buckets:
        if not isinstance(bucket, ShardedBucket):
            gradients.update((member.name, member.parameter.grad) for member in bucket.members)
            continue
        buffer = torch.zeros(bucket.length, dtype=bucket.dtype, device=bucket.members[0].parameter.device)
        for shard, offset in zip(bucket.shards, bucket.offsets, strict=True):
            if shard.tensor.grad is not None:
                start = bucket.low + offset
                buffer[start : start + shard.num_elements].copy_(shard.tensor.grad.view(-1))
        bucket.group.inside.all_gather_async_(buffer, bucket.slice_sizes).wait()
        for index, (member, piece) in enumerate(
            zip(bucket.members, torch.split(buffer[: sum(bucket.sizes)], bucket.sizes), strict=True)
        ):
            gradients[member.name] = piece.view(member.parameter.shape) if bucket.is_used(index) else None
    return gradients


class ParameterGathering:
    """The gathering of all buckets, in their order, at most two of them under way at a time."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._gatherings = [BucketGathering(bucket) for bucket in buckets if isinstance(bucket, ShardedBucket)]

    def run(self) -> None:
        """Gather everything. Collective."""
        previous: BucketGathering | None = None
        for gathering in self._gatherings:
            gathering.start()
            if previous is not None:
                previous.finish()
            previous = gathering
        if previous is not None:
            previous.finish()
