"""How long everything takes that follows the backwards of a step: sums of gradients, the exchange
of whole tensors, the optimizer's pass, and the gathering of what ZeRO updated on other ranks.

Example: 100 MB of float32 parameters, data-parallel over 4 units at 10 GB/s. A ring all-reduce
sends 2 * 3/4 * 100 MB, which takes 15 ms. With ZeRO-1 a reduce-scatter of gradients takes half of
that, the optimizer updates a quarter of the parameters, and an all-gather takes the other half.

Gradients that are summed over the same ranks lie in buckets together, and each bucket is a message.
What a message waits for, its latency, is shared out among its parameters:

- Of a whole program it is known what lies in a bucket. If all gradients of a kind are less than a
  bucket, they pay for one message of their size; otherwise each pays its share of a full bucket.
- A search knows a parameter, its layout, and the bytes of all gradients of the model. If these are
  less than a bucket, each parameter pays as large a part of the latency as it is of the model,
  however it is cut: together they pay for one message. Otherwise it pays its share of a full
  bucket. A program has a message or more of each kind, so that it never takes less.

Example: a model of two weights of 10 MB on ``tp=2``, which cuts both, and 4 units. A rank sums 10
MB in one message. Each weight pays for 5 MB and half of the latency, in the audit and in the
search. Were one of the weights not cut but computed with pieces of a batch, its gradient would be
summed over all 8 ranks, in a message of its own: the audit counts two latencies, a search one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwright.compiler.cost.local_calls import estimated_size, local_bytes
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import (
    OptimizerMemory,
    SumGroup,
    Updated,
    gradient_bytes,
    kept_bytes,
    num_pieces,
    num_shards,
    sum_group,
    summed_dtype,
)
from shardwright.compiler.cost.time.adapter_time import reduction_s
from shardwright.compiler.cost.time.exchange_time import NO_EXCHANGE, WHOLES, Exchange, exchange_of
from shardwright.compiler.cost.time.operator_time import optimizer_s
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.program import Declaration
from shardwright.compiler.plan.zero import ranks_of_units
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.zero.settings import ReductionSettings

UNITS, STAGES = "units", "stages"

GRADIENTS = "gradients"
"""The last word in the name of a sum of gradients: ``"dp+units gradients"``."""

OPTIMIZER_STEP = "optimizer step"

ADDITION_PASSES = 3
"""Adding to a gradient reads it and what is added, and writes it."""


@dataclass(frozen=True, slots=True)
class ParameterSync:
    """What the gradient and the update of one parameter send.

    - ``sum_s``: the seconds of one sum of its gradient.
    - ``across_s``: the seconds, once per step, of adding up what groups of ZeRO have summed.
    - ``gather_s``: the seconds of gathering what other ranks updated.
    - ``axes``: what its gradient is summed over; ``group`` says the same as a key.
    - ``bucket_bytes``: the bytes that it takes in a bucket.
    - ``num_bytes``: the bytes that go through the collectives of a step.
    - ``is_apart``: whether its pieces go to an owner, so that it shares no bucket with parameters
      that the optimizer takes as they lie.
    - ``exchange``: the exchange of its whole tensor in that case. It comes on top of all this.
    """

    sum_s: float
    across_s: float
    gather_s: float
    axes: tuple[str, ...]
    bucket_bytes: int
    num_bytes: float
    group: SumGroup
    is_apart: bool = False
    exchange: Exchange = NO_EXCHANGE

    @property
    def communicates(self) -> bool:
        return self.sum_s > 0 or self.gather_s > 0


@dataclass(frozen=True)
class Reduction:
    """What follows the backwards of a step, for all parameters of a rank.

    - ``parameters``: every trained parameter, by name of the value.
    - ``num_sums``: how often each gradient is summed over ranks in a step.
    - ``bucket_bytes``: the most that a bucket holds.
    - ``optimizer_s``: the seconds of the optimizer's pass.
    - ``accumulation_s``: the seconds of adding up the gradients of all microbatches, in place.
    """

    parameters: Mapping[str, ParameterSync]
    num_sums: int
    bucket_bytes: float
    optimizer_s: float
    accumulation_s: float = 0.0

    @property
    def sum_s(self) -> float:
        """The seconds of summing every gradient once."""
        return sum(found.sum_s for found in self.parameters.values())

    @property
    def across_s(self) -> float:
        """The seconds of adding up what groups of ZeRO have summed."""
        return sum(found.across_s for found in self.parameters.values())

    @property
    def gathered_s(self) -> float:
        """The seconds of gathering everything that other ranks updated."""
        return sum(found.gather_s for found in self.parameters.values())

    @property
    def total_s(self) -> float:
        """The seconds of all sums and gatherings of a step."""
        return self.num_sums * self.sum_s + self.across_s + self.gathered_s

    @property
    def exchange(self) -> Exchange:
        """The exchange of all whole tensors together."""
        return sum((found.exchange for found in self.parameters.values()), NO_EXCHANGE)

    @property
    def end_s(self) -> float:
        """The seconds that a step takes after its microbatches, if nothing overlaps."""
        return self.total_s + self.exchange.total_s + self.optimizer_s

    @property
    def total_bytes(self) -> float:
        """The bytes of everything that is summed or gathered, as often as that happens."""
        return sum(found.num_bytes for found in self.parameters.values())

    @property
    def name(self) -> str:
        """Everything that gradients are summed over, as a name: ``"dp+units gradients"``."""
        axes = {
            axis for found in self.parameters.values() if found.communicates for axis in found.axes
        }
        return f"{'+'.join(sorted(axes, key=lambda axis: (axis == UNITS, axis)))} {GRADIENTS}"

    @property
    def messages(self) -> dict[str, tuple[float, float]]:
        """The seconds and bytes of everything that communicates, by its name."""
        found = {self.name: (self.total_s, self.total_bytes)} if self.total_s else {}
        exchange = self.exchange
        return found | (
            {WHOLES: (exchange.total_s, exchange.num_bytes)} if exchange.num_bytes else {}
        )

    def after_sums(self, *, gathers_ahead: bool) -> list[tuple[str, float]]:
        """The parts of a step after the sums, in order, with their seconds. ``gathers_ahead``:
        parameters are gathered beside the next forward, so they are not among these.
        """
        exchange = self.exchange
        parts = [
            ("gather whole tensors", exchange.gather_s),
            (OPTIMIZER_STEP, self.optimizer_s),
            ("scatter whole tensors", exchange.scatter_s),
            ("gather parameters", 0.0 if gathers_ahead else self.gathered_s),
        ]
        return [(name, seconds) for name, seconds in parts if seconds or name == OPTIMIZER_STEP]

    @classmethod
    def of(
        cls,
        declarations: Iterable[Declaration],
        mesh: Mesh,
        config: ComputeConfig,
        hardware: Hardware,
        optimizer: OptimizerMemory,
        ranks: tuple[int, ...] | None = None,
        shared: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
        *,
        num_microbatches: int = 1,
        model_bytes: float | None = None,
        alone: bool = False,
    ) -> Reduction:
        """What follows the backwards of the parameters in ``declarations``.

        - ``mesh``: the mesh on which tensors are stored.
        - ``ranks``: the unit ranks of the mesh of operators (default: all ranks of the unit).
        - ``shared``: the ranks of other stages that hold a parameter too, by its FQN.
        - ``num_microbatches``: the backwards of a step. With ZeRO-2 each of them ends with sums.
        - ``model_bytes``: :func:`all_gradients_bytes` of the model (default: these are all of its
          parameters).
        - ``alone``: it is not known how other parameters of these ranks lie, so that each pays its
          share of the model's message.
        """
        on = tuple(range(config.plan_ngpus)) if ranks is None else ranks
        settings = ReductionSettings.of(config, config.num_units)
        # ZeRO-2 frees whole gradients after each backward, so each ends with sums.
        num_sums = num_microbatches if settings.frees_gradients else 1
        trained = [
            (declaration, tuple((shared or {}).get(declaration.value.fqn or "", ())))
            for declaration in declarations
            if declaration.value.kind is ValueKind.PARAMETER
            and declaration.value.requires_grad
            and not config.inference_only
        ]
        if model_bytes is None:
            model_bytes = all_gradients_bytes(config, (held.value for held, _ in trained))
        where = _Where(mesh, config, settings, hardware, on, num_sums, optimizer, model_bytes)
        counts = Counter(_held(*item) for item in trained)
        messages = {} if alone else where.messages(counts)
        found: dict[str, ParameterSync] = {}
        sizes, step_s = [], 0.0
        # Layers are alike, so most parameters are as one before.
        known: dict[object, tuple[ParameterSync, float, float]] = {}
        # Each trained parameter: its sum, its update, and adding up microbatches.
        for declaration, elsewhere in trained:
            value = declaration.value
            alike = _held(declaration, elsewhere)
            if alike not in known:
                message = where.message_of_model(value) if alone else messages[alike]
                num_stages = 1 + len(elsewhere)
                # With ZeRO-2 a rank adds to its slice of a gradient only, as nothing else stays.
                share = (
                    num_shards(declaration.layout, mesh, config, num_stages)
                    if settings.frees_gradients
                    else 1
                )
                known[alike] = (
                    where.sync(declaration, elsewhere, message),
                    update_s(declaration, mesh, config, hardware, optimizer, num_stages),
                    accumulated_bytes(declaration, mesh, config, optimizer) / share,
                )
            found[value.name], updated_s, size = known[alike]
            step_s += updated_s
            sizes.append(size)
        added_s = accumulation_s(sizes, num_microbatches, hardware)
        return cls(found, num_sums, settings.bucket_cap_bytes, step_s, added_s)


_Held = tuple[Layout, torch.dtype, tuple[tuple[int, ...], ...]]
"""How a parameter is held: its layout, its dtype, and the unit ranks of other stages that hold it.
"""


def _held(declaration: Declaration, elsewhere: tuple[tuple[int, ...], ...]) -> _Held:
    return declaration.layout, declaration.value.dtype, elsewhere


@dataclass(frozen=True, slots=True)
class _Message:
    """A message that the gradient of a parameter is a part of: the bytes of all of it, and the part
    of its latency that the parameter pays (``None``: as large a part as of its bytes).
    """

    num_bytes: float
    latency_share: float | None = None


@dataclass(frozen=True, slots=True)
class _Where:
    """Where gradients are summed, and how. ``ranks``: the ranks of the unit that hold them."""

    mesh: Mesh
    config: ComputeConfig
    settings: ReductionSettings
    hardware: Hardware
    ranks: tuple[int, ...]
    num_sums: int
    optimizer: OptimizerMemory
    model_bytes: float

    def messages(self, counts: Mapping[_Held, int]) -> dict[_Held, _Message]:
        """The messages of all parameters of a rank. ``counts``: how many are held in each way."""
        kinds: dict[_Held, Hashable] = {}
        sizes = Counter[Hashable]()
        for held, count in counts.items():
            layout, dtype, elsewhere = held
            # What gradients agree in that share buckets (``dealing.Entry``).
            group = sum_group(layout, self.mesh, self.config, elsewhere)
            kinds[held] = group, dtype, num_pieces(layout, self.mesh, self.optimizer) > 1
            wide = self.settings.gradient_dtype(dtype)
            sizes[kinds[held]] += count * local_bytes(layout, wide, self.mesh)
        cap = self.settings.bucket_cap_bytes
        return {held: _Message(min(sizes[kind], cap)) for held, kind in kinds.items()}

    def message_of_model(self, value: IRValue) -> _Message:
        """The message of a parameter, where it is not known how others of the model lie."""
        if self.bucket_bytes < self.model_bytes or not self.model_bytes:
            return _Message(self.bucket_bytes)
        whole = all_gradients_bytes(self.config, [value])
        return _Message(self.model_bytes, whole / self.model_bytes)

    @property
    def bucket_bytes(self) -> float:
        """The most bytes in a bucket, if the whole model lay in buckets together."""
        return min(self.settings.bucket_cap_bytes, self.model_bytes)

    def sync(
        self,
        declaration: Declaration,
        elsewhere: Sequence[tuple[int, ...]],
        message: _Message,
    ) -> ParameterSync:
        """What one parameter sends. ``elsewhere``: the unit ranks of other stages that hold it."""
        value, layout, config, settings = (
            declaration.value,
            declaration.layout,
            self.config,
            self.settings,
        )
        # With ZeRO-3 so many units hold different pieces of the parameter. Then its mesh goes over
        # these units, and the sum only over the others.
        pieces = self.mesh.axis_size(ZERO) if ZERO in layout.cut_axes else 1
        held = (
            self.mesh
            if pieces > 1
            else self.mesh.of_axes(item for item in self.mesh.axes if item[0] != ZERO)
        )
        places, *others = (
            ranks_of_units(ranks, pieces, config.plan_ngpus) for ranks in (self.ranks, *elsewhere)
        )
        wide, narrow = settings.gradient_dtype(value.dtype), value.dtype
        cap, groups = message.num_bytes, settings.num_groups if settings.stage else 1
        seconds = partial(
            reduction_s, layout, mesh=held, ranks=places, hardware=self.hardware,
            num_units=config.num_units // pieces,
            unit_size=config.plan_ngpus * pieces, elsewhere=others,
            latency_share=message.latency_share,
        )  # fmt: skip
        across_s = gather_s = 0.0
        if settings.scatters:
            sum_s = seconds(wide, bucket_bytes=cap, collective="reduce_scatter", num_groups=groups)
            if groups > 1:
                across_s = seconds(
                    wide, bucket_bytes=cap, collective="all_reduce", num_groups=groups, across=True
                )
        else:
            sum_s = seconds(wide, bucket_bytes=cap, collective="all_reduce")
        if settings.stage:
            filled = cap * narrow.itemsize / wide.itemsize  # buckets are counted in gradients
            gather_s = seconds(
                narrow, bucket_bytes=filled, collective="all_gather", num_groups=groups
            )
        axes = (
            *layout.grad_partial,
            *((STAGES,) if elsewhere else ()),
            *((UNITS,) if config.num_units > pieces else ()),
        )
        size = local_bytes(layout, wide, self.mesh)
        shards = num_shards(layout, self.mesh, config, 1 + len(elsewhere))
        slice_bytes = size / shards if across_s else 0.0
        sent = (self.num_sums * size if sum_s else 0) + slice_bytes
        sent += local_bytes(layout, narrow, self.mesh) if gather_s else 0
        exchange = self._exchange(declaration, held, places, pieces, shards)
        group = sum_group(layout, self.mesh, config, elsewhere)
        is_apart = num_pieces(layout, self.mesh, self.optimizer) > 1
        return ParameterSync(sum_s, across_s, gather_s, axes, size, sent, group, is_apart, exchange)

    def _exchange(
        self,
        declaration: Declaration,
        mesh: Mesh,
        ranks: tuple[int, ...],
        units: int,
        shards: int,
    ) -> Exchange:
        """The exchange of one parameter, which lies on ``mesh`` over ``units`` units at a time.

        ``ranks``: the global ranks of the first of these. ``shards``: into how many parts its state
        is split.
        """
        dtype, layout, config, settings = (
            declaration.value.dtype,
            declaration.layout,
            self.config,
            self.settings,
        )
        if num_pieces(layout, mesh, self.optimizer) == 1:
            return NO_EXCHANGE
        summed = summed_dtype(settings, dtype, shards)
        return exchange_of(
            layout, summed, dtype, mesh, ranks, self.hardware, num_units=config.num_units // units,
            unit_size=config.plan_ngpus * units, bucket_bytes=self.bucket_bytes,
            num_shards=shards,
        )  # fmt: skip


def all_gradients_bytes(config: ComputeConfig, parameters: Iterable[IRValue]) -> float:
    """The bytes of the gradients of these parameters, whole, as they are summed."""
    settings = ReductionSettings.of(config, config.num_units)
    sizes = {
        value.fqn: math.prod(estimated_size(size) for size in value.shape)
        * settings.gradient_dtype(value.dtype).itemsize
        for value in parameters
        if value.requires_grad
    }
    return sum(sizes.values())


def accumulated_bytes(
    declaration: Declaration, mesh: Mesh, config: ComputeConfig, optimizer: OptimizerMemory
) -> float:
    """The bytes of the gradient to which the gradients of further microbatches are added, by a
    kernel of its own: none where the product that makes a gradient adds it.
    """
    dtype = declaration.value.dtype
    if optimizer.products_add and len(declaration.value.shape) > 1:
        return 0.0
    return (
        local_bytes(declaration.layout, dtype, mesh)
        / dtype.itemsize
        * gradient_bytes(optimizer, dtype, config)
    )


def accumulation_s(sizes: Iterable[float], num_microbatches: int, hardware: Hardware) -> float:
    """Seconds per step of adding to gradients of these sizes, in bytes. Each microbatch but the
    first adds to them.
    """
    return (num_microbatches - 1) * sum(
        hardware.device.memory_s(ADDITION_PASSES * size) for size in sizes
    )


def parameter_s(
    declaration: Declaration,
    mesh: Mesh,
    config: ComputeConfig,
    hardware: Hardware,
    optimizer: OptimizerMemory,
    ranks: tuple[int, ...],
    num_microbatches: int,
    model_bytes: float,
) -> tuple[float, float]:
    """The seconds that the gradient and the update of one parameter take, per microbatch and at the
    end of the step.

    ``ranks``: ranks of the unit. If they are fewer than the unit has, they are those of a pipeline
    stage, which adds up whole gradients whatever ZeRO does with them at the end. ``model_bytes``:
    :func:`all_gradients_bytes` of the model that it is a part of.
    """
    # A stage adds to its gradients in every backward action, which a schedule places itself. So the
    # reduction is asked about one microbatch, and the additions are counted apart.
    staged = len(ranks) < config.plan_ngpus
    found = Reduction.of(
        [declaration],
        mesh,
        config,
        hardware,
        optimizer,
        ranks,
        num_microbatches=1 if staged else num_microbatches,
        model_bytes=model_bytes,
        alone=True,
    )
    added_s = found.accumulation_s
    if staged and found.parameters:
        size = accumulated_bytes(declaration, mesh, config, optimizer)
        added_s = accumulation_s([size], num_microbatches, hardware)
    return added_s / num_microbatches, found.end_s


def update_s(
    declaration: Declaration,
    mesh: Mesh,
    config: ComputeConfig,
    hardware: Hardware,
    optimizer: OptimizerMemory,
    num_stages: int = 1,
) -> float:
    """Seconds of the optimizer's pass over this rank's share of one parameter, the matrix products
    of the optimizer included. ``num_stages``: how many stages of a pipeline hold the parameter.
    """
    dtype = declaration.value.dtype
    # With ZeRO a share of the elements; of optimizers such as Muon, whole matrices of some ranks.
    updated = Updated.of(declaration.layout, mesh, config, optimizer, num_stages)
    kept = kept_bytes(optimizer, declaration.layout, dtype, mesh, config, num_stages)
    state_dtype = ReductionSettings(table=config.optimizer_table).state_dtype(dtype)
    products = optimizer.products(updated.shape, state_dtype)
    products_s = sum(hardware.device.matmul_s(p.m, p.n, p.k, p.dtype, p.batch) for p in products)
    num_bytes = updated.num_elements * dtype.itemsize
    return (
        optimizer_s(num_bytes, kept, hardware, fused=optimizer.fused) + updated.share * products_s
    )
