"""Which times rest on sizes that a calibration did not measure: beyond its tables the nearest measured size counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from shardwright.compiler.cost.device import Device
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.operators import OperatorTimes, op_time
from shardwright.compiler.plan.program import Compute, Program


def extrapolated(programs: Iterable[Program], hardware: Hardware, times: OperatorTimes | None = None) -> tuple[str, ...]:
    """The products and memory passes of the programs' operators outside the tables of a measured device, each once.

    Empty for a device without tables: there everything is an assumption, which its file says. Operators with measured
    ``times`` of their own do not count.
    """
    if not hardware.device.has_tables:
        return ()
    watched = _Watched.of(hardware.device)
    machine = replace(hardware, device=watched)
    for program in programs:
        for instruction in program.body:
            if isinstance(instruction, Compute):
                op_time(instruction.original, instruction.assignment, program.plan.mesh, machine, times)
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
        if self.streams is not None and num_bytes > self.streams.num_bytes[-1]:  # below the least size a launch counts
            self.passes.append(num_bytes)
        return super().memory_s(num_bytes)

    def outside(self) -> tuple[str, ...]:
        """Every product, and the largest memory pass."""
        if not self.passes:
            return tuple(self.products)
        assert self.streams is not None
        most, measured = max(self.passes), self.streams.num_bytes[-1]
        return (*self.products, f"{_megabytes(most)} read and written at once (measured: {_megabytes(measured)})")


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
