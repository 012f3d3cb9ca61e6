"""Which times of a plan rest on sizes that the hardware's calibration did not measure.

Outside of a table the nearest measured size counts. The optimizer's pass has the rate of memory at
any size. Example: a table that ends at products of 4096 x 4096 x 4096, and a plan with one of
``8192 x 4096 x 4096``: the text names this product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from shardwright.compiler.cost.communication import step_elements
from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import (
    ADAM,
    OptimizerMemory,
    num_pieces,
    num_shards,
    summed_dtype,
)
from shardwright.compiler.cost.time.after_backward import update_s
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.cost.time.exchange_time import message_bytes
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Adapt, Compute, Declaration, Program, steps
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.zero.settings import ReductionSettings


def largest_message(
    program: Program | PipelineProgram, config: ComputeConfig, optimizer: OptimizerMemory = ADAM
) -> int:
    """The bytes of the largest message of a step.

    It may be that of an adapter (as collectives count bytes), a value that crosses to another
    stage, a bucket of gradients, or an exchange of whole tensors that the optimizer needs.
    """
    # A pipeline: of each crossing the smaller end, as that is what goes over the link.
    if isinstance(program, PipelineProgram):
        crossed = []
        for crossing in program.crossings:
            dtype, holdings = crossing.value.dtype, (crossing.sent, crossing.received)
            crossed.append(min(local_bytes(held.layout, dtype, held.mesh) for held in holdings))
        return max(
            [*crossed, *(largest_message(stage, config, optimizer) for stage in program.programs)],
            default=0,
        )
    mesh, largest = program.plan.with_loops(program.plan.storage_mesh), 0
    for instruction in steps(program.body):
        if isinstance(instruction, Adapt) and sum(step_elements(instruction.step, mesh)) > 0:
            ends = instruction.step.before, instruction.step.after
            largest = max(
                largest, *(local_bytes(layout, instruction.of.dtype, mesh) for layout in ends)
            )
    # A bucket is no larger than all gradients together.
    settings = ReductionSettings.of(config, config.num_units)
    summed = sum(
        local_bytes(declaration.layout, settings.gradient_dtype(declaration.value.dtype), mesh)
        for declaration in _trained(program)
        if not config.inference_only and (config.num_units > 1 or declaration.layout.grad_partial)
    )  # fmt: skip
    # The three kinds of messages of a body.
    return max(
        largest,
        min(summed, round(settings.bucket_cap_bytes)),
        _largest_exchanged(program, config, optimizer),
    )


def _largest_exchanged(program: Program, config: ComputeConfig, optimizer: OptimizerMemory) -> int:
    """The bytes of the largest message that brings whole tensors together."""
    mesh, settings = program.plan.storage_mesh, ReductionSettings.of(config, config.num_units)
    largest = total = 0
    for declaration in () if config.inference_only else _trained(program):
        layout, dtype = declaration.layout, declaration.value.dtype
        # Cut, with an optimizer that needs it whole.
        pieces = num_pieces(layout, mesh, optimizer)
        if pieces > 1:
            summed = summed_dtype(settings, dtype, num_shards(layout, mesh, config))
            largest = max(
                largest, message_bytes(layout, summed, dtype, pieces, settings.bucket_cap_bytes)
            )
            total += message_bytes(layout, summed, dtype, pieces, 0)
    return min(largest, total)


def extrapolated(
    program: Program | PipelineProgram,
    config: ComputeConfig,
    hardware: Hardware,
    times: OperatorTimes | None = None,
    optimizer: OptimizerMemory = ADAM,
) -> tuple[str, ...]:
    """What lies outside the sizes that were measured on a machine, in words: products and memory
    passes of operators, each once, the products of the optimizer and its pass, the largest message.

    It is empty for hardware that nobody measured. There everything is an assumption, as its file
    says. Operators with measured ``times`` of their own do not count.
    """
    programs = program.programs if isinstance(program, PipelineProgram) else (program,)
    found = _outside_tables(programs, config, hardware, times, optimizer)
    updates = (
        hardware.device.has_tables and not config.inference_only and any(map(_trained, programs))
    )
    passes = (OPTIMIZER_PASS,) if updates else ()
    return (*found, *passes, *_outside_links(largest_message(program, config, optimizer), hardware))


OPTIMIZER_PASS = "the optimizer's pass, whatever its size (by the rate of memory)"
"""The words for the optimizer's pass, which no calibration measures (``optimizer_s``)."""


def _trained(program: Program) -> list[Declaration]:
    """The parameters that are updated."""
    return [
        d
        for d in program.declarations
        if d.value.kind is ValueKind.PARAMETER and d.value.requires_grad
    ]


def _outside_links(num_bytes: int, hardware: Hardware) -> tuple[str, ...]:
    measured = max(
        (point.get("bytes", 0) for point in hardware.measurements.get("links", ())),
        default=num_bytes,
    )
    return (
        (f"a message of {amount(num_bytes, 'B')} (measured: {amount(measured, 'B')})",)
        if num_bytes > measured
        else ()
    )


def _outside_tables(
    programs: Iterable[Program],
    config: ComputeConfig,
    hardware: Hardware,
    times: OperatorTimes | None,
    optimizer: OptimizerMemory,
) -> tuple[str, ...]:
    if not hardware.device.has_tables:
        return ()
    # Ask for all times once more, of a device that writes down what it is asked.
    watched = _Watched.of(hardware.device)
    machine = replace(hardware, device=watched)
    for program in programs:
        mesh = program.plan.computing_mesh
        for instruction in steps(program.body):
            if isinstance(instruction, Compute):
                op_time(instruction.original, instruction.assignment, mesh, machine, times)
        for declaration in () if config.inference_only else _trained(program):
            update_s(declaration, program.plan.storage_mesh, config, machine, optimizer)
    return watched.outside()


@dataclass(frozen=True)
class _Watched(Device):
    """A device that writes down what it is asked outside its tables."""

    products: dict[str, None] = field(default_factory=dict, compare=False)
    passes: list[float] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, device: Device) -> _Watched:
        return cls(**{f.name: getattr(device, f.name) for f in fields(Device)})

    def matmul_s(self, m: float, n: float, k: float, dtype: str, batch: float = 1) -> float:
        seconds = super().matmul_s(m, n, k, dtype, batch)
        if seconds and not self.measured(m, n, k, dtype, batch):
            times = f"{batch:.0f} of " if batch != 1 else ""
            self.products[f"product {times}{m:.0f} x {k:.0f} x {n:.0f} in {dtype}"] = None
        return seconds

    def memory_s(self, num_bytes: float) -> float:
        # Only sizes above the table count: below it, the time of a launch does.
        if self.streams is not None and num_bytes > self.streams.num_bytes[-1]:
            self.passes.append(num_bytes)
        return super().memory_s(num_bytes)

    def outside(self) -> tuple[str, ...]:
        """Every product, and the largest memory pass."""
        if not self.passes:
            return tuple(self.products)
        assert self.streams is not None
        most, measured = max(self.passes), self.streams.num_bytes[-1]
        return (
            *self.products,
            f"{amount(most, 'B')} read and written at once (measured: {amount(measured, 'B')})",
        )
