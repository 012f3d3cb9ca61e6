"""The gradients of a rank's parameters in the books, as ``runtime.training.reducer`` and
``runtime.zero`` hold them.

Gradients that are summed over ranks move into buckets. A bucket's buffer stays from step to step;
with stage 2 of ZeRO it is made when the first gradient comes, and is this rank's slice of the sum
once it is complete. Where gradients are tensors of their own (``contiguous_grad_buffer=False``),
there is a buffer while they are summed only. Where they are scattered, a sum takes as much again as
its bucket, for two buckets at most: gloo needs that room, so with other transports this is the
most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from shardwright.compiler.cost.memory.ledger import Ledger
from shardwright.compiler.cost.memory.trained import Trained, most_state_bytes, updated_shares
from shardwright.compiler.cost.memory.whole_memory import WholeTensors
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory, gradient_bytes
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.dealing import EXCHANGES_UNDER_WAY, Entry, deal_buckets, even_sizes
from shardwright.runtime.zero.settings import ReductionSettings

GRADIENT, TEMPORARY = "gradient", "temporary"


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """``is_split``: its optimizer updates shards. ``element_bytes``: of a gradient in it.
    ``slice_elements``: that this rank updates, of ``length`` elements.
    """

    members: Sequence[Trained]
    is_split: bool
    element_bytes: float
    slice_elements: int
    length: int
    arrived: set[str] = field(default_factory=set)

    @property
    def buffer_bytes(self) -> int:
        return round(
            (self.length + len(self.members)) * self.element_bytes
        )  # with a flag for each member


class GradientBooks:
    """Gradients and optimizer state of ``trained``, which come in the order in which forward first
    uses them.

    ``made``: the storages of gradients that backward has made and that stay, by parameter or
    bucket. ``reduces``: this backward is the last one of the step.
    """

    def __init__(
        self,
        ledger: Ledger,
        trained: Sequence[Trained],
        config: ComputeConfig,
        optimizer: OptimizerMemory,
        *,
        staged: bool,
    ) -> None:
        self._ledger, self._config, self._optimizer = ledger, config, optimizer
        self._trained = {item.name: item for item in trained}
        self._settings = ReductionSettings.of(config, config.num_units)
        self._frees = (
            self._settings.frees_gradients and not staged
        )  # a pipeline accumulates up to the end
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
        self._begun: list[
            _Bucket
        ] = []  # those whose sum is not complete, of buckets that are freed
        self._mine: dict[_Bucket, int] = {}
        self._exchanges: list[int] = []
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
        """The gradient of a parameter is complete: it moves into its bucket, or becomes the
        parameter's own.
        """
        bucket = self._bucket_of.get(name)
        if bucket is None or (bucket.is_split and not self._settings.contiguous_gradients):
            self._keep(name, storage)
        else:
            self._allocate(bucket)
            self._ledger.release(storage)
        if bucket is not None:
            bucket.arrived.add(name)
            self._begin_complete()

    def end_backward(self) -> None:
        """After the last gradient of a backward; after the last one of a step they are all
        summed.
        """
        if self.reduces or self._frees:
            for bucket in self._buckets[self._next :]:
                self._begin(bucket)
            self._complete(len(self._begun))
        if self.reduces:
            self._publish()
        self._next = 0
        for bucket in self._buckets:
            bucket.arrived.clear()

    def step(self) -> None:
        """The optimizer's step: one parameter after the other, then what was updated goes to all
        ranks.
        """
        ledger, settings = self._ledger, self._settings
        self._wholes.gather()
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
        """These gradients have not been made."""
        for key in list(made):
            self._ledger.release(self.made.pop(key))

    # ---------------------------------------------------------------------------------------------
    # buckets

    def _packed(self, trained: Sequence[Trained]) -> list[list[Trained]]:
        """The buckets of those that are summed or split, filled from the last parameter on."""
        settings = self._settings
        items = [item for item in reversed(trained) if item.copies > 1 or self._is_split(item)]
        entries = [
            Entry(
                item.group,
                item.dtype,
                item.num_elements * settings.gradient_dtype(item.dtype).itemsize,
                bool(item.cut),
            )
            for item in items
        ]
        return [
            [items[index] for index in members]
            for members in deal_buckets(entries, settings.bucket_cap_bytes)
        ]

    def _bucket(self, members: Sequence[Trained]) -> _Bucket:
        first, length = members[0], sum(member.num_elements for member in members)
        slices = even_sizes(length, first.shards)
        mine = slices[0]
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
        if name in self.made:
            self._ledger.release(storage)
            return
        ledger, item = self._ledger, self._trained[name]
        num_bytes = round(
            item.num_elements * gradient_bytes(self._optimizer, item.dtype, self._config)
        )
        self.made[name] = ledger.new(num_bytes, GRADIENT)
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
        """In a backward that reduces, begin the sums of buckets that are complete, in their
        order.
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
            rows = ledger.new(round(bucket.length * bucket.element_bytes), TEMPORARY)
            self._exchanges.append(ledger.hold(rows))
            ledger.use(0, "sum of gradients")
            if len(self._exchanges) > EXCHANGES_UNDER_WAY:
                ledger.release(self._exchanges.pop(0))
        self._begun.append(bucket)

    def _complete(self, count: int) -> None:
        """The first ``count`` of the sums that have begun are there."""
        for bucket in self._begun[:count]:
            if self._exchanges:
                self._ledger.release(self._exchanges.pop(0))
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
        """Hand out the sums: a copy of this rank's slice, where the optimizer sees another
        dtype.
        """
        settings = self._settings
        for bucket in self._buckets:
            first = bucket.members[0]
            dtype = settings.state_dtype(first.dtype)
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
        """Of the largest part of a parameter that this rank updates at a time; ``(0,)`` if it
        updates none.
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
"""Of an element of a master that is kept as a remainder, while the optimizer steps."""

REMAINDERS_SPLIT = 5 / 4
"""What taking such a master apart needs, of its own size: its bits, and where it is no number."""
