"""Buckets whose sums go to the ranks that update the parameters.

Example: a bucket of 10 elements on 4 ranks has slices of 3 elements, so it is padded to 12. Rank 3
has elements 9 to 11: one of the last parameter, and two of padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.runtime.bucket import (
    Bucket,
    GradientSum,
    Named,
    dense,
    hold_gradients_in,
    set_reduced,
)
from shardwright.runtime.ranks.failures import concerning
from shardwright.runtime.ranks.transport import Work
from shardwright.runtime.zero.arena import Arena
from shardwright.runtime.zero.copy_groups import ZeroGroup
from shardwright.runtime.zero.settings import ReductionSettings
from shardwright.runtime.zero.shards import ParameterShard


class ShardedBucket(Bucket):
    """A bucket of which each rank of ``group.inside`` updates a slice: rank ``i`` has the one of
    ``slice_sizes[i]`` elements.

    ``shards``: what this rank updates of each member. The gradient of a shard is a piece of this
    rank's slice of the sum over ``group.everyone``. The sum is made in one of two ways:

    - *reduced*: all ranks get all of it. The ``grad`` of the parameters are views of it, too.
    - *scattered* (``settings.scatters``): each rank gets its slice only, summed inside the group
      first and then across the groups. From then on the ``grad`` of a parameter is ``None``. With
      stage 2 the buffer is freed as well, so that several backward passes may each be reduced
      (:meth:`end_round`): their sums are added up in the slice.

    With ``settings.contiguous_gradients`` gradients are views of the buffer as they arrive, in the
    dtype in which they are reduced. Otherwise they stay tensors of their own in the dtype of the
    parameter, and the buffer exists only while they are reduced.

    ``parameter_buffer``: the buffer that the parameters are views of, if they are. ``arena``: where
    the buffer of the gradients lies, if it shares memory with those of other buckets.
    """

    def __init__(
        self,
        members: Sequence[GradientSum],
        group: ZeroGroup,
        slice_sizes: Sequence[int],
        shards: Sequence[ParameterShard],
        settings: ReductionSettings,
        parameter_buffer: Tensor | None = None,
        arena: Arena | None = None,
    ) -> None:
        super().__init__(members)
        self.is_local = False
        self.dtype = settings.gradient_dtype(self.dtype)
        self._is_contiguous = settings.contiguous_gradients
        if self._is_contiguous:
            for member in members:
                hold_gradients_in(member.parameter, self.dtype)
        self.group = group
        self.parameter_buffer = parameter_buffer
        self.slice_sizes = list(slice_sizes)
        self.length = sum(slice_sizes)
        self._arena = arena
        # Behind the gradients lies a flag for each member: whether any rank used it.
        self._place = 0 if arena is None else arena.reserve(self.length + len(members))
        self.shards = shards
        self._scatters = settings.scatters
        self._frees = settings.frees_gradients
        bounds = [0, *itertools.accumulate(slice_sizes)]
        self.low, self.high = bounds[group.inside.index : group.inside.index + 2]
        # Where the shard of each member begins in this rank's slice.
        starts = itertools.accumulate(self.sizes, initial=0)
        self.offsets = [
            start + shard.start - self.low for start, shard in zip(starts, shards, strict=False)
        ]
        # This rank's slice of the sum, over all backward passes that have been reduced.
        self._mine: Tensor | None = None
        self._used: set[int] = set()  # the members that some rank used
        self._is_published = False  # whether the shards have their gradients

    @property
    def holders(self) -> list[Named]:
        """See :attr:`Bucket.holders`. If a shard's gradient is a view of a parameter's, the
        parameter holds it.
        """
        if self._scatters:
            return [(shard.name, shard.tensor) for shard in self.shards]
        copies = [
            shard
            for shard in self.shards
            if shard.tensor.grad_dtype != self.dtype or not self._is_contiguous
        ]
        return [*super().holders, *((shard.name, shard.tensor) for shard in copies)]

    @property
    def counted(self) -> list[Named]:
        return [(shard.name, shard.tensor) for shard in self.shards if shard.is_counted]

    @property
    def leaves_gradients(self) -> bool:
        """See :attr:`Bucket.leaves_gradients`."""
        return not self._scatters

    def _new_buffer(self, length: int, device: torch.device) -> Tensor:
        return (
            super()._new_buffer(length, device)
            if self._arena is None
            else self._arena.take(self._place, length, device)
        )

    def take(self, index: int) -> None:
        """See :meth:`Bucket.take`."""
        if self._is_contiguous:
            self._pack(index)

    def _pack(self, index: int) -> None:
        if self._is_contiguous:
            super()._pack(index)
        else:
            gradient = self.members[index].parameter.grad
            assert gradient is not None
            self._allocated()
            self._views[index].copy_(dense(gradient))

    def _launch(self, buffer: Tensor) -> list[Work]:
        if not self._scatters:
            return super()._launch(buffer)
        # Every rank needs all flags, so these are all-reduced beside the gradients.
        work = self.group.inside.reduce_scatter_async_(buffer[: self.length], self.slice_sizes)
        return [work, self.communicator.all_reduce_async(buffer[self.length :])]

    def end_round(self) -> None:
        """Wait for the sums under way. From then on the parameters have no gradients, and this
        rank's slice is all that is held.
        """
        if not self._works or not self._scatters:
            return
        self.wait()
        self._note_used()
        arriving = self._allocated()[self.low : self.high]
        for member in self.members:
            member.parameter.grad = None
        if self._frees or not self._is_contiguous:
            # Without the clone the slice, a view, would keep the whole buffer alive.
            self._drop_buffer()
            arriving = arriving.clone() if self._mine is None else arriving
        self._mine = arriving if self._mine is None else self._mine.add_(arriving)

    def finish(self, divisor: int, after: Callable[[Tensor], None]) -> None:
        """Wait for the sum, divide it, and give each shard its gradient."""
        if self._scatters:
            self.end_round()
            assert self._mine is not None
            mine = gradients = self._mine
            with concerning(self._subject):
                self.group.across.all_reduce_(mine, phase="gradients")
            gradients = mine[: max(0, self.num_elements - self.low)]  # without the padding
        else:
            self.wait()
            # After ``module.zero_grad()``, which no bucket sees, the last step's are still there.
            self._used = set()
            self._note_used()
            gradients = self.gradients
            mine = self._allocated()[self.low : self.high]
        if divisor > 1:
            gradients.div_(divisor)
        after(gradients)
        self._publish(mine if self._scatters or self._is_contiguous else mine.clone())

    def clear(self, set_to_none: bool) -> None:
        """Forget the gradients of parameters and shards. Without ``set_to_none`` parameters that
        had a gradient get one of zeros.
        """
        # Gradients of a call before, and those that have arrived in the bucket since.
        used = {
            index for index, member in enumerate(self.members) if member.parameter.grad is not None
        } | self._used
        self._mine = None
        self._used, self._is_published = set(), False
        for shard in self.shards:
            shard.tensor.grad = None
        for index, member in enumerate(self.members):
            member.parameter.grad = None
            # Torch's ``set_to_none=False`` keeps gradients as zeros.
            if index in used and not set_to_none:
                if self._is_contiguous:
                    self._allocated()
                    view = self._views[index].zero_()
                    set_reduced(view, False)
                    member.parameter.grad = view
                else:
                    member.parameter.grad = torch.zeros_like(member.parameter)

    def has_reduced(self, index: int, gradient: Tensor | None) -> bool:
        return self._is_published if self._scatters else super().has_reduced(index, gradient)

    def is_used(self, index: int) -> bool:
        """Whether some rank used a member, once its gradient has been reduced."""
        return index in self._used

    def _note_used(self) -> None:
        self._used |= set(range(len(self.members))) - set(self._unused) | set(
            self._used_elsewhere()
        )

    def _publish(self, mine: Tensor) -> None:
        """Give parameters and shards their gradients. ``mine``: this rank's slice of the sum.

        A member that no rank used gets none, as in training on one device.
        """
        # Not scattered: every rank has the whole sum, and parameters get their gradients.
        if not self._scatters:
            for index in self._used:
                parameter, view = self.members[index].parameter, self._views[index]
                parameter.grad = (
                    view if self._is_contiguous else view.to(parameter.dtype, copy=True)
                )
                set_reduced(parameter.grad, True)
            if not self._is_contiguous:
                self._drop_buffer()
        if self.shards:
            # Reduced in one dtype, and given to the optimizer in that of its state.
            mine = mine.to(self.shards[0].tensor.grad_dtype)
        # The optimizer sees shards: each gets its part of the slice.
        for index, (shard, offset) in enumerate(zip(self.shards, self.offsets, strict=True)):
            used = index in self._used and shard.num_elements > 0
            gradient = (
                mine[offset : offset + shard.num_elements].view(shard.tensor.shape)
                if used
                else None
            )
            shard.tensor.grad = gradient
        self._is_published = True
