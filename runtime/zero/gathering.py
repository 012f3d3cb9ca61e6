"""Gathering: after a step, all ranks of a group get what each of them has updated of a bucket's
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwright.runtime.bucket import Bucket, GradientSum
from shardwright.runtime.dealing import EXCHANGES_UNDER_WAY
from shardwright.runtime.ranks.failures import concerning, listed
from shardwright.runtime.ranks.transport import Work
from shardwright.runtime.zero.awaited import await_parameters
from shardwright.runtime.zero.sharded_bucket import ShardedBucket
from shardwright.runtime.zero.shards import fill, note_written


class BucketGathering:
    """Brings the parameters of one bucket to all ranks of its group, in the dtype of the
    parameters.
    """

    def __init__(self, bucket: ShardedBucket) -> None:
        self._bucket = bucket
        self._buffer: Tensor | None = None
        self._work: Work | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [member.parameter for member in self._bucket.members]

    @property
    def is_under_way(self) -> bool:
        return self._work is not None

    def start(self) -> None:
        """Begin to gather. What this rank updated is read now."""
        bucket = self._bucket
        # Nobody else updates any of it.
        if bucket.group.inside.size == 1:
            self._write()
            return
        first = bucket.members[0].parameter
        buffer = bucket.parameter_buffer
        if buffer is None or buffer.device != first.device:
            # The module has moved since its parameters were made views of the buffer.
            buffer = first.detach().new_empty(bucket.length)
        # This rank's slice of the bucket; shards may leave gaps for what has no gradient.
        mine = buffer[bucket.low : bucket.high]
        for shard, offset in zip(bucket.shards, bucket.offsets, strict=True):
            if shard.num_elements:
                shard.write(mine[offset : offset + shard.num_elements])
        self._buffer = buffer
        with concerning(self._subject):
            self._work = bucket.group.inside.all_gather_async_(buffer, bucket.slice_sizes)

    def _subject(self) -> str:
        """What the collective is for, in messages."""
        return (
            "gathering the new values of "
            f"{listed([member.name for member in self._bucket.members])}"
        )

    def _write(self) -> None:
        """Write the parameters of which this rank has all of the optimizer's state."""
        for shard in self._bucket.shards:
            if not shard.is_view and shard.num_elements:
                shard.write(shard.parameter.detach())
                note_written(shard.parameter)

    def finish(self) -> None:
        """Wait, and write the parameters. Does nothing if nothing has started."""
        if self._work is None or self._buffer is None:
            return
        # Taken out first: an error below must not make a second call wait again.
        work, self._work = self._work, None
        with concerning(self._subject):
            work.wait()
        bucket, buffer, self._buffer = self._bucket, self._buffer, None
        with torch.no_grad():
            # What was gathered goes to the parameters, which are views of the buffer or copies.
            for member, piece in zip(
                bucket.members,
                torch.split(buffer[: bucket.num_elements], bucket.sizes),
                strict=True,
            ):
                fill(member.parameter, piece.view(member.parameter.shape))
                note_written(member.parameter)


class ParameterGathering:
    """The gathering of all buckets of ``module``.

    At most :data:`EXCHANGES_UNDER_WAY` buckets are under way at a time, in their order. With
    ``overlaps`` all of them start at once, first those that forward uses first. A bucket then ends
    when :meth:`finish` is called, or when somebody reads one of its parameters from its module.
    """

    def __init__(
        self, module: nn.Module, buckets: Iterable[Bucket], *, overlaps: bool = False
    ) -> None:
        self._module = module
        self._gatherings = [
            BucketGathering(bucket) for bucket in buckets if isinstance(bucket, ShardedBucket)
        ]
        self._overlaps = overlaps

    def run(self) -> None:
        """Gather everything, or begin to. Collective."""
        self.finish()
        if self._overlaps:
            # Buckets come in the order of the backward; the forward needs the last one first.
            for gathering in reversed(self._gatherings):
                gathering.start()
            await_parameters(self._module, self._gatherings)
            return
        earlier = EXCHANGES_UNDER_WAY - 1
        for index, gathering in enumerate(self._gatherings):
            gathering.start()
            if index >= earlier:
                self._gatherings[index - earlier].finish()
        self.finish()

    def finish(self) -> None:
        """Wait for what is under way."""
        for gathering in self._gatherings:
            gathering.finish()


def make_contiguous(members: Sequence[GradientSum], buffer: Tensor) -> None:
    """Move the parameters of ``members`` end to end into ``buffer``, and make them views of it."""
    sizes = [member.parameter.numel() for member in members]
    for member, piece in zip(members, torch.split(buffer[: sum(sizes)], sizes), strict=True):
        view = piece.view(member.parameter.shape)
        view.copy_(member.parameter.detach())
        member.parameter.data = view


def gathered_gradients(buckets: Iterable[Bucket]) -> dict[str, Tensor | None]:
    """The reduced gradient of each parameter, by its name, whole on every rank that has a copy.
    Collective.

    This is for people and tests that look at gradients: if gradients are scattered, it holds in
    memory what ZeRO saves.
    """
    gradients: dict[str, Tensor | None] = {}
    # All ranks reduced these: nothing has to be gathered.
    for bucket in buckets:
        if not isinstance(bucket, ShardedBucket):
            gradients.update((member.name, member.parameter.grad) for member in bucket.members)
            continue
        dtype = bucket.shards[0].tensor.grad_dtype
        buffer = torch.zeros(bucket.length, dtype=dtype, device=bucket.members[0].parameter.device)
        for shard, offset in zip(bucket.shards, bucket.offsets, strict=True):
            if shard.tensor.grad is not None:
                start = bucket.low + offset
                buffer[start : start + shard.num_elements].copy_(shard.tensor.grad.view(-1))
        with concerning(
            f"gathering the gradients of {listed([member.name for member in bucket.members])}"
        ):
            bucket.group.inside.all_gather_async_(buffer, bucket.slice_sizes).wait()
        # A parameter that no rank used has no gradient, as in training on one device.
        for index, (member, piece) in enumerate(
            zip(
                bucket.members,
                torch.split(buffer[: bucket.num_elements], bucket.sizes),
                strict=True,
            )
        ):
            gradients[member.name] = (
                piece.view(member.parameter.shape) if bucket.is_used(index) else None
            )
    return gradients
