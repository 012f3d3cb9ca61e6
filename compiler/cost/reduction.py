"""The reduction of gradients and the optimizer's pass: how long, and beside what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.cost.adapters import DEFAULT_BUCKET_BYTES, reduction_s
from shardwright.compiler.cost.body_time import BodyTime
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.local import local_bytes, local_shape
from shardwright.compiler.cost.operators import optimizer_s
from shardwright.compiler.cost.optimizer_memory import OptimizerMemory, num_shards, state_bytes
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.blocks import reads
from shardwright.compiler.plan.program import Adapt, Declaration, Program
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import ZERO, Mesh

UNITS, STAGES = "units", "stages"

GRADIENTS = "gradients"
"""What the exchange of gradients is called, after what they are summed over."""

ADDITION_PASSES = 3
"""Adding to a gradient reads it and what is added, and writes it."""


@dataclass(frozen=True)
class Reduction:
    """``seconds``: of the gradient of each trained parameter by value name, with the gathering of what ZeRO updated elsewhere.
    ``num_bytes``, ``axes``: of its gradient, and what it is summed over. ``accumulation_s``: of adding up the gradients of all
    microbatches, in place. ``num_exchanges``: the collectives that a gradient goes through, one after the other.
    """

    seconds: Mapping[str, float]
    num_bytes: Mapping[str, int]
    axes: Mapping[str, tuple[str, ...]]
    optimizer_s: float
    bucket_bytes: float
    accumulation_s: float = 0.0
    num_exchanges: int = 1

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def total_bytes(self) -> int:
        """Of all that is summed or gathered, each time counted."""
        return self.num_exchanges * sum(size for name, size in self.num_bytes.items() if self.seconds[name])

    @property
    def name(self) -> str:
        """``"dp+units gradients"``: everything that gradients are summed over."""
        axes = {axis for name, over in self.axes.items() if self.seconds[name] for axis in over}
        return f"{'+'.join(sorted(axes, key=lambda axis: (axis == UNITS, axis)))} {GRADIENTS}"

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
    ) -> Reduction:
        """``mesh``: on which tensors are stored. ``ranks``: the unit ranks of the mesh of operators (default: all of the
        unit). ``shared``: by FQN of a parameter that other stages hold too, their ranks. ``num_microbatches``: backwards of a
        step; with ZeRO-2 each of them is reduced.
        """
        on = tuple(range(config.plan_ngpus)) if ranks is None else ranks
        cap = config.reducer_bucket_cap_mb
        bucket_bytes = DEFAULT_BUCKET_BYTES if cap is None else cap * 2**20
        collectives = _collectives(config, num_microbatches)
        seconds: dict[str, float] = {}
        sizes: dict[str, int] = {}
        axes: dict[str, tuple[str, ...]] = {}
        step_s = 0.0
        for declaration in declarations:
            value, layout = declaration.value, declaration.layout
            if value.kind is not ValueKind.PARAMETER or not value.requires_grad or config.inference_only:
                continue
            sizes[value.name] = local_bytes(layout, value.dtype, mesh)
            pieces = mesh.axis_size(ZERO) if ZERO in layout.cut_axes else 1  # of units that hold different pieces
            elsewhere = (shared or {}).get(value.fqn or "", ())
            axes[value.name] = (*layout.grad_partial, *((STAGES,) if elsewhere else ()))
            axes[value.name] += (UNITS,) if config.num_units > pieces else ()
            held = mesh if pieces > 1 else Mesh(tuple(item for item in mesh.axes if item[0] != ZERO))
            places, *others = (
                tuple(unit * config.plan_ngpus + rank for unit in range(pieces) for rank in ranks_of_one)
                for ranks_of_one in (on, *elsewhere)
            )
            seconds[value.name] = sum(
                reduction_s(
                    layout, value.dtype, held, places, hardware, num_units=config.num_units // pieces,
                    unit_size=config.plan_ngpus * pieces,
                    bucket_bytes=bucket_bytes, collective=collective, elsewhere=others,
                )
                for collective in collectives
            )  # fmt: skip
            step_s += update_s(declaration, mesh, config, hardware, optimizer)
        added_s = 0.0 if config.use_zero == 2 else accumulation_s(sizes.values(), num_microbatches, hardware)
        return cls(seconds, sizes, axes, step_s, bucket_bytes, added_s, len(collectives))


def accumulation_s(sizes: Iterable[int], num_microbatches: int, hardware: Hardware) -> float:
    """Seconds per step of adding to gradients of these sizes, in bytes: each microbatch but the first does."""
    return (num_microbatches - 1) * sum(hardware.device.memory_s(ADDITION_PASSES * size) for size in sizes)


def parameter_s(
    declaration: Declaration,
    mesh: Mesh,
    config: ComputeConfig,
    hardware: Hardware,
    optimizer: OptimizerMemory,
    ranks: tuple[int, ...],
    num_microbatches: int,
) -> tuple[float, float]:
    """What the gradient and the update of one parameter take: seconds of each microbatch, and of the end of the step.

    ``ranks``: of the unit; fewer than the unit has are those of a pipeline stage, which adds up gradients whatever ZeRO does
    with them at the end.
    """
    staged = len(ranks) < config.plan_ngpus
    found = Reduction.of(
        [declaration], mesh, config, hardware, optimizer, ranks, num_microbatches=1 if staged else num_microbatches
    )
    added_s = found.accumulation_s
    if staged:
        added_s = accumulation_s(found.num_bytes.values(), num_microbatches, hardware)
    return added_s / num_microbatches, found.total_s + found.optimizer_s


def update_s(
    declaration: Declaration, mesh: Mesh, config: ComputeConfig, hardware: Hardware, optimizer: OptimizerMemory
) -> float:
    """Seconds of the optimizer's pass over one parameter, or over this rank's share of it with ZeRO."""
    value, layout = declaration.value, declaration.layout
    shards = num_shards(layout, mesh, config)
    kept = state_bytes(optimizer, local_shape(layout, mesh), value.dtype, config) / shards
    return optimizer_s(local_bytes(layout, value.dtype, mesh) / shards, kept, hardware)


def _collectives(config: ComputeConfig, num_microbatches: int) -> tuple[str, ...]:
    """What a gradient goes through in a step, one after the other."""
    if config.use_zero not in (1, 2):  # stage 3 is adapters
        return ("all_reduce",)
    if config.use_zero == 2:
        return (*["reduce_scatter"] * num_microbatches, "all_gather")
    return ("reduce_scatter" if config.zero_use_reduce_scatter else "all_reduce", "all_gather")


def overlapped(program: Program, body: BodyTime, reduction: Reduction, start_s: float) -> list[tuple[str, float, float]]:
    """The last backward, from ``start_s`` on, and the reductions beside it: ``(name, start, end)``, the backward first.

    One stream computes, adapters included; the other sums buckets in order, each as soon as its gradients are there. What uses
    the axes of a reduction under way waits for it, and the other way round: one message at a time on a link.
    """
    first_reader = _first_readers(program)
    buckets = _buckets(program, reduction)
    complete = {name: first_reader.get(name, len(body.instructions)) for names in buckets for name in names}
    waiting = list(buckets)
    now = start_s
    again = body.recomputed_s / max(1, len(body.instructions))
    free = now
    spans: list[tuple[str, float, float]] = []
    under_way: list[tuple[set[str], float]] = []

    def begin(ready: float) -> None:
        nonlocal free
        names = waiting.pop(0)
        begins = max(ready, free)
        seconds = sum(reduction.seconds[name] for name in names)
        free = begins + seconds
        if seconds:
            spans.append((f"reduce bucket {len(buckets) - len(waiting) - 1}", begins, free))
            under_way.append(({axis for name in names for axis in reduction.axes[name]}, free))

    for index in range(len(body.instructions) - 1, -1, -1):
        instruction, time = body.instructions[index]
        if isinstance(instruction, Adapt) and time.backward_s:
            now = max([now, *(end for axes, end in under_way if instruction.step.axis in axes)])
        now += time.backward_s + again
        while waiting and all(complete[name] >= index for name in waiting[0]):
            begin(now)
    backward_end = now
    while waiting:
        begin(now)
    return [("backward", start_s, backward_end), *spans]


def _first_readers(program: Program) -> dict[str, int]:
    """By source, the first instruction that needs it: its gradient is complete when the backward of that one is done."""
    first: dict[str, int] = {}
    source: dict[str, str] = {}
    for index, instruction in enumerate(program.body):
        for value in reads(instruction):
            first.setdefault(source.get(value.name, value.name), index)
        if isinstance(instruction, Adapt):
            source[instruction.result.name] = source.get(instruction.value.name, instruction.value.name)
    return first


def _buckets(program: Program, reduction: Reduction) -> list[list[str]]:
    """As the reducer packs them: from the last parameter on, by what they are summed over and their dtype."""
    packed: list[list[str]] = []
    filling: dict[tuple[object, ...], tuple[list[str], float]] = {}
    for declaration in reversed(program.declarations):
        name = declaration.value.name
        if not reduction.seconds.get(name):
            continue
        key = (reduction.axes[name], declaration.value.dtype)
        members, filled = filling.get(key, ([], 0.0))
        if not members or filled + reduction.num_bytes[name] > reduction.bucket_bytes:
            members, filled = [], 0.0
            packed.append(members)
        members.append(name)
        filling[key] = (members, filled + reduction.num_bytes[name])
    return packed
