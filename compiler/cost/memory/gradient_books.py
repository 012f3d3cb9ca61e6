"""The gradients of a rank's parameters in the ledger, as ``runtime.training.reducer`` and
``runtime.zero`` hold them.

Gradients that are summed over ranks move into buckets.

- The buffer of a bucket stays from step to step.
- With ZeRO-2 the buffer is made when the bucket's first gradient comes. When the sum is complete,
  this rank's slice of it takes its place.
- With ``contiguous_grad_buffer=False`` gradients are tensors of their own, and a buffer exists only
  while they are summed.
- A reduce-scatter over gloo takes as much room again as its bucket, for two buckets at most. Over
  NCCL that is so only where ranks update whole parameters, and slices differ in size.

Example: parameters of 40 and 60 elements in float32 make a bucket of ``(100 + 2) * 4`` bytes, with
one flag per parameter. On 4 ranks of ZeRO-2 what stays after the backward is a slice of 100 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from shardwright.compiler.cost.machine.backend import Backend, reduce_scatter_bytes
from shardwright.compiler.cost.memory.ledger import Ledger
from shardwright.compiler.cost.memory.trained_parameters import (
    Trained,
    most_state_bytes,
    updated_shares,
)
from shardwright.compiler.cost.memory.whole_memory import WholeTensors
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory, gradient_bytes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.dealing import EXCHANGES_UNDER_WAY, Entry, deal_buckets, even_sizes
from shardwright.runtime.zero.settings import ReductionSettings

GRADIENT, TEMPORARY = "gradient", "temporary"


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """A bucket of gradients that are summed together.

    ``is_split``: whether the optimizer updates shards of it. ``element_bytes``: the bytes of one
    element. ``length``: its elements, of which this rank updates ``slice_elements``. ``arrived``:
    the members whose gradient has come in this backward.
    """

    members: Sequence[Trained]
    is_split: bool
    element_bytes: float
    slice_elements: int
    length: int
    arrived: set[str] = field(default_factory=set)

    @property
    def buffer_bytes(self) -> int:
        # Behind the gradients stands one flag for each member: whether it has a gradient at all.
        return round((self.length + len(self.members)) * self.element_bytes)


class GradientBooks:
    """The gradients and the optimizer state of the parameters ``trained``, which are listed in the
    order in which forward first uses them.

    ``made``: the storages of gradients that a backward has made and that stay. Its keys are names
    of parameters and buckets. ``reduces``: whether this backward is the last one of the step.
    ``backend``: what sums gradients.
    """

    def __init__(
        self,
        ledger: Ledger,
        trained: Sequence[Trained],
        config: ComputeConfig,
        optimizer: OptimizerMemory,
        *,
        staged: bool,
        backend: Backend,
    ) -> None:
        self._backend: Backend = backend
        self._ledger, self._config, self._optimizer = ledger, config, optimizer
        self._trained = {item.name: item for item in trained}
        self._settings = ReductionSettings.of(config, config.num_units)
        # A pipeline accumulates gradients up to its last backward, so it cannot free them before.
        self._frees = self._settings.frees_gradients and not staged
        packed = self._packed(trained)
        dealt = [item for members in packed for item in members]
        self._shares = updated_shares(dealt, optimizer, config)
        self._buckets = [self._bucket(members) for members in packed]
        self._bucket_of = {
            member.name: bucket for bucket in self._buckets for member in bucket.members
        }
        self.made: dict[object, int] = {}
        self.reduces = False
        self._next = 0  # the first bucket whose sum has not begun
        self._begun: list[_Bucket] = []  # the buckets whose sum has begun and is not complete
        self._mine: dict[_Bucket, int] = {}  # the storages of this rank's slices of sums
        self._exchanges: list[int] = []  # the room of reduce-scatters under way, oldest first
        exchanged = [item for item in trained if item.cut and self._shares.get(item.name, 1)]
        self._wholes = WholeTensors(ledger, exchanged, config)
        local = [item for item in trained if item.name not in self._bucket_of]
        ledger.hold(
            ledger.new(round(most_state_bytes([*dealt, *local], optimizer, config)), "optimizer")
        )
        for bucket in self._buckets:
            if not bucket.is_split or (
                self._settings.contiguous_gradients and not self._settings.frees_gradients
            ):
                self._allocate(bucket)

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order in which a backward fills
        them.
        """
        return [[member.name for member in bucket.members] for bucket in self._buckets]

    def arrive(self, name: str, storage: int) -> None:
        """Take the complete gradient of a parameter: it moves into its bucket, or becomes the
        parameter's own.
        """
        bucket = self._bucket_of.get(name)
        if bucket is None:
            self._keep(name, storage)
            return
        moves = not bucket.is_split or self._settings.contiguous_gradients
        if moves:
            self._allocate(bucket)
        else:
            self._keep(name, storage)
        bucket.arrived.add(name)
        self._begin_complete()
        # Autograd holds what it has made while its hook begins the sum of a bucket.
        if moves:
            self._ledger.release(storage)

    def standing(self, name: str) -> object:
        """What a backward finds for the gradient of a parameter: parameters of equal standing are
        treated alike. Of a bucket that is yet to be made every parameter stands for itself, as the
        bucket may be made for another one's gradient.
        """
        bucket = self._bucket_of.get(name)
        if name not in self._trained:
            return None
        if bucket is None or (bucket.is_split and not self._settings.contiguous_gradients):
            return "own", name in self.made
        return "bucket" if bucket in self.made else ("no bucket yet", name)

    def end_backward(self) -> None:
        """End a backward. The last one of a step ends with all gradients summed."""
        if self.reduces or self._frees:
            # Buckets that are not full: some parameter had no gradient in this backward.
            for bucket in self._buckets[self._next :]:
                self._begin(bucket)
            self._complete(len(self._begun))
        if self.reduces:
            self._publish()
        self._next = 0
        for bucket in self._buckets:
            bucket.arrived.clear()

    def step(self) -> None:
        """The optimizer's step. It updates one parameter after the other, then what each rank
        updated goes to all ranks.
        """
        ledger, settings = self._ledger, self._settings
        self._wholes.gather()
        # Masters that are stored as a bfloat16 parameter and a 16-bit remainder are float32 tensors
        # while the optimizer steps.
        halved = [
            item
            for item in self._trained.values()
            if settings.stores_remainders and item.dtype == torch.bfloat16
        ]
        masters = (
            sum(int(item.num_elements * self._shares.get(item.name, 1)) for item in halved)
            * REMAINDERS_SEEN_BYTES
        )
        seen = ledger.hold(ledger.new(masters, TEMPORARY))
        updated = [
            (self._updated_shape(item), settings.state_dtype(item.dtype))
            for item in self._trained.values()
        ]
        # Torch's optimizers go over parameters one by one: what one makes is gone before the next.
        made = max(
            (
                self._optimizer.temporary_bytes(shape, dtype)
                for shape, dtype in dict.fromkeys(updated)
            ),
            default=0,
        )
        ledger.use(made, "optimizer step")
        self._wholes.scatter()
        gathered = [
            bucket.length * bucket.members[0].dtype.itemsize
            for bucket in self._buckets
            if bucket.members[0].shards > 1 and not settings.contiguous_parameters
        ]
        at_a_time = len(gathered) if settings.overlaps_parameters else EXCHANGES_UNDER_WAY
        most = max((sum(gathered[i : i + at_a_time]) for i in range(len(gathered))), default=0)
        split = max((self._updated_bytes(item) for item in halved), default=0) * REMAINDERS_SPLIT
        ledger.use(most + round(split), "gathering of parameters")
        ledger.release(seen)

    def forget(self, made: Iterable[object]) -> None:
        """Release gradients, as if they had not been made."""
        for key in list(made):
            self._ledger.release(self.made.pop(key))

    # ---------------------------------------------------------------------------------------------
    # buckets

    def _packed(self, trained: Sequence[Trained]) -> list[list[Trained]]:
        """The buckets of the parameters that are summed or split. They are filled from the last
        parameter on, as backward makes the gradients of those first.
        """
        settings = self._settings
        # Others keep a gradient of their own: nobody else has a copy, and nobody shares the update.
        items = [item for item in reversed(trained) if item.copies > 1 or self._is_split(item)]
        entries = []
        for item in items:
            num_bytes = item.num_elements * settings.gradient_dtype(item.dtype).itemsize
            entries.append(Entry(item.group, item.dtype, num_bytes, bool(item.cut)))
        return [
            [items[index] for index in members]
            for members in deal_buckets(entries, settings.bucket_cap_bytes)
        ]

    def _bucket(self, members: Sequence[Trained]) -> _Bucket:
        first, length = members[0], sum(member.num_elements for member in members)
        slices = even_sizes(length, first.shards)
        mine = slices[0]
        # An elementwise optimizer updates an equal slice, so the bucket is padded to such slices.
        # Any other one updates the whole parameters that this rank was dealt.
        if self._optimizer.is_elementwise:
            length = sum(slices)
        else:
            mine = sum(member.num_elements for member in members if self._shares[member.name])
        return _Bucket(members, self._is_split(first), self._element_bytes(first), mine, length)

    def _is_split(self, item: Trained) -> bool:
        return self._settings.updates_shards(item.dtype, item.shards)

    def _element_bytes(self, item: Trained) -> float:
        if self._optimizer.grad_bytes_per_element is None and self._is_split(item):
            return self._settings.gradient_dtype(item.dtype).itemsize
        return gradient_bytes(self._optimizer, item.dtype, self._config)

    def _allocate(self, bucket: _Bucket) -> None:
        if bucket not in self.made:
            self.made[bucket] = self._ledger.hold(self._ledger.new(bucket.buffer_bytes, GRADIENT))
            self._ledger.use(0, f"gradient of {bucket.members[0].name}")

    def _keep(self, name: str, storage: int) -> None:
        """The gradient stays a tensor of the parameter's own."""
        # It was made by an earlier microbatch: this one is added to it, and goes.
        if name in self.made:
            self._ledger.release(storage)
            return
        ledger, item = self._ledger, self._trained[name]
        num_bytes = round(
            item.num_elements * gradient_bytes(self._optimizer, item.dtype, self._config)
        )
        self.made[name] = ledger.new(num_bytes, GRADIENT)
        # Torch takes over a gradient that nobody else holds, and copies any other.
        if ledger.holders(storage) > 1:  # else taken as it is
            ledger.hold(self.made[name])
            ledger.use(0, f"gradient of {name}")
            ledger.release(storage)
        else:
            ledger.release(storage)
            ledger.hold(self.made[name])

    # ---------------------------------------------------------------------------------------------
    # sums

    def _begin_complete(self) -> None:
        """Begin the sums of buckets that are complete, in a backward that reduces.

        All ranks begin them in the order of the buckets, as collectives must come in one order: a
        bucket that is complete waits for those before it.
        """
        if not (self._frees or (self.reduces and self._settings.asynchronous)):
            return
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if len(bucket.arrived) < len(bucket.members):
                return
            self._begin(bucket)
            self._next += 1
            if self._frees:  # one may be under way while the next one fills
                self._complete(len(self._begun) - self._settings.asynchronous)

    def _begin(self, bucket: _Bucket) -> None:
        ledger = self._ledger
        self._allocate(bucket)
        if bucket.is_split and self._settings.scatters and bucket.members[0].shards > 1:
            # A rank receives its slice from every rank.
            received = bucket.slice_elements * bucket.members[0].shards
            num_bytes = reduce_scatter_bytes(
                [round(received * bucket.element_bytes)],
                bucket.members[0].shards,
                self._backend,
                evenly=received == bucket.length,
            )
            self._exchanges.append(ledger.hold(ledger.new(num_bytes, TEMPORARY)))
            ledger.use(0, "sum of gradients")
            # The reducer waits for the oldest sum before it begins another one.
            if len(self._exchanges) > EXCHANGES_UNDER_WAY:
                ledger.release(self._exchanges.pop(0))
        self._begun.append(bucket)

    def _complete(self, count: int) -> None:
        """Complete the first ``count`` of the sums that have begun."""
        for bucket in self._begun[:count]:
            if self._exchanges:
                self._ledger.release(self._exchanges.pop(0))
            # A bucket whose buffer stays has the sum in it. Of any other one, only this rank's
            # slice remains.
            is_scattered = bucket.is_split and self._settings.scatters
            if not is_scattered or (
                self._settings.contiguous_gradients and not self._settings.frees_gradients
            ):
                continue
            self.forget(member.name for member in bucket.members if member.name in self.made)
            if bucket not in self._mine:
                num_bytes = round(bucket.slice_elements * bucket.element_bytes)
                self._mine[bucket] = self._ledger.hold(self._ledger.new(num_bytes, GRADIENT))
                self._ledger.use(0, "sum of gradients")
            self.forget([bucket])
        self._begun = self._begun[count:]

    def _publish(self) -> None:
        """Hand the sums to the optimizer: as a copy of this rank's slice, if the optimizer updates
        in another dtype than gradients are summed in.
        """
        settings = self._settings
        for bucket in self._buckets:
            first = bucket.members[0]
            dtype = settings.state_dtype(first.dtype)
            # Optimizer and sums in two dtypes: each slice is there twice for a moment.
            if bucket.is_split and not first.cut and dtype != settings.gradient_dtype(first.dtype):
                copy = self._ledger.new(bucket.slice_elements * dtype.itemsize, GRADIENT)
                self._mine[bucket], old = self._ledger.hold(copy), self._mine.get(bucket)
                self._ledger.use(0, "sum of gradients")
                if old is not None:
                    self._ledger.release(old)
            if bucket.is_split and not settings.scatters and not settings.contiguous_gradients:
                self.forget([bucket])

    def _updated_bytes(self, item: Trained) -> int:
        """The largest part of a parameter that this rank updates at a time."""
        return (
            math.prod(self._updated_shape(item)) * self._settings.state_dtype(item.dtype).itemsize
        )

    def _updated_shape(self, item: Trained) -> tuple[int, ...]:
        """The shape of the largest part of a parameter that this rank updates at a time; ``(0,)``
        if it updates none.
        """
        bucket = self._bucket_of.get(item.name)
        if item.cut:
            return item.whole if item.name in self._wholes.owned else (0,)
        if bucket is None or not bucket.is_split:
            return item.shape
        if self._optimizer.is_elementwise:
            return (min(item.num_elements, bucket.slice_elements),)
        return item.shape if self._shares[item.name] else (0,)


REMAINDERS_SEEN_BYTES = 4
"""The bytes of an element of a master in float32, which is kept as a remainder between steps."""

REMAINDERS_SPLIT = 5 / 4
"""The room that taking such a master apart needs, relative to the master: a copy of its bits (1),
and a flag per element for what is no number (1/4).
"""
