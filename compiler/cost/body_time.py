"""The seconds of the instructions of one program on its slowest rank, by what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.compiler.cost.adapters import step_time
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.operators import CONVOLUTIONS, PRODUCTS, OperatorTimes, OpTime, op_time
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.blocks import Run, group_blocks, region_of
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program

_FORWARD = {kind: kind for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")}
_BACKWARD = {
    ("all_gather", "reduce_scatter"): "reduce_scatter",
    ("narrow", "all_gather"): "all_gather",
    ("reduce_scatter", None): "all_gather",
    ("all_reduce", "all_reduce"): "all_reduce",
    ("grad_all_reduce", None): "all_reduce",
    ("all_to_all", None): "all_to_all",
}


@dataclass(frozen=True)
class BodyTime:
    """``instructions``: each one with its time, in the order of the program. ``compute_s`` and ``comm_s`` split the sum of all
    (``"tp all_reduce"``); ``weight_s``: the part of the backward that makes gradients of parameters. ``recomputed_s``: the
    forwards that the backward runs again.
    """

    instructions: tuple[tuple[Instruction, OpTime], ...]
    compute_s: float
    comm_s: dict[str, float]
    weight_s: float
    recomputed_s: float

    @property
    def forward_s(self) -> float:
        return sum(time.forward_s for _, time in self.instructions)

    @property
    def backward_s(self) -> float:
        """With what is computed again."""
        return sum(time.backward_s for _, time in self.instructions) + self.recomputed_s


def body_time(
    program: Program,
    hardware: Hardware,
    ranks: Sequence[int],
    times: OperatorTimes | None = None,
    *,
    trains: bool = True,
    unit_size: int | None = None,
) -> BodyTime:
    """The times of a program whose mesh lies on ``ranks`` of units of ``unit_size`` (default: as many as there are)."""
    mesh, storage_mesh = program.plan.mesh, program.plan.storage_mesh
    size = len(ranks) if unit_size is None else unit_size
    storage_ranks = tuple(unit * size + rank for unit in range(max(1, program.plan.zero)) for rank in ranks)
    again = _recomputed(program) if trains else set()
    instructions: list[tuple[Instruction, OpTime]] = []
    comm: dict[str, float] = {}
    compute_s = weight_s = recomputed_s = 0.0
    from_parameters = _from_parameters(program)
    for instruction in program.body:
        runs = 2 if id(instruction) in again else 1
        if isinstance(instruction, Adapt):
            differentiable = trains and instruction.of.requires_grad
            time = step_time(
                instruction.step, instruction.of.dtype, storage_mesh, storage_ranks, hardware, differentiable=differentiable
            )
            step = instruction.step
            parts = [
                (_FORWARD.get(step.kind), runs * time.forward_s),
                (_BACKWARD.get((step.kind, step.backward)), time.backward_s),
            ]
            if instruction.gathers_weight and differentiable:  # gathered again in the backward
                recomputed_s += time.forward_s
                parts.append((step.kind, time.forward_s))
            for kind, seconds in parts:
                if kind is None:
                    compute_s += seconds
                elif seconds:
                    comm[f"{step.axis} {kind}"] = comm.get(f"{step.axis} {kind}", 0.0) + seconds
        else:
            time = op_time(instruction.original, instruction.assignment, mesh, hardware, times, ranks=ranks)
            time = time if trains else OpTime(time.forward_s)
            compute_s += runs * time.forward_s + time.backward_s
            weight_s += _weight_share(instruction, from_parameters) * time.backward_s
        recomputed_s += (runs - 1) * time.forward_s
        instructions.append((instruction, time))
    return BodyTime(tuple(instructions), compute_s, dict(sorted(comm.items())), weight_s, recomputed_s)


def _recomputed(program: Program) -> set[int]:
    """The instructions that the backward runs again, by identity."""
    if not any(region_of(instruction) is not None for instruction in program.body):
        return set()
    runs = (item for item in group_blocks(program) if isinstance(item, Run) and item.recompute)
    return {id(instruction) for run in runs for instruction in run.instructions}


def _from_parameters(program: Program) -> set[str]:
    """The values that are parameters, or adapted ones."""
    names = {d.value.name for d in program.declarations if d.value.kind is ValueKind.PARAMETER}
    for instruction in program.body:
        if isinstance(instruction, Adapt) and instruction.value.name in names:
            names.add(instruction.result.name)
    return names


def _weight_share(instruction: Compute, from_parameters: set[str]) -> float:
    """How much of an operator's backward may wait until the gradients of activations are on their way."""
    wanted = [value for value in instruction.op.operands if value.requires_grad]
    weights = [value for value in wanted if value.name in from_parameters]
    if not weights:
        return 0.0
    if len(weights) == len(wanted):
        return 1.0
    return 0.5 if instruction.original.target in PRODUCTS or instruction.original.target in CONVOLUTIONS else 0.0
