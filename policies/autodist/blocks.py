"""What each block of a chain takes in seconds and bytes, read off the program of the whole model on the mesh of a stage."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.cost.adapters import reduction_s, step_time
from shardwright.compiler.cost.collectives import collective_s
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.local import local_bytes
from shardwright.compiler.cost.memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.operators import OperatorTimes, OpTime, op_time, optimizer_s
from shardwright.compiler.cost.saved import saved_for_backward
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program
from shardwright.policies.autodist.stages import Block
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True)
class Setting:
    """What costs depend on besides the program. ``ranks``: the unit's ranks that the mesh lies on."""

    hardware: Hardware
    config: ComputeConfig
    ranks: tuple[int, ...]
    optimizer: OptimizerMemory = ADAM
    times: OperatorTimes | None = None


def block_costs(program: Program, starts: Sequence[int], layers: Mapping[int, str], setting: Setting) -> list[Block]:
    """The blocks that begin at the positions ``starts`` of the graph's operators; those in ``layers`` may be computed again.

    Adapters count to the block that needs them; a parameter, its gradient, optimizer state, reduction and update to the first
    block that uses it.
    """
    walk = _Walk(program, starts, setting)
    forward, backward = [0.0] * len(starts), [0.0] * len(starts)
    for block, instruction in walk.by_block():
        time = walk.time_of(instruction)
        forward[block] += time.forward_s
        backward[block] += time.backward_s
    held, once = walk.parameters()
    kept, entering = walk.activations()
    return [
        Block(
            forward[block],
            backward[block],
            once[block],
            held[block],
            kept[block],
            min(entering[block], kept[block]) if block in layers else None,
            walk.transfer_s(entering[block]) if block else 0.0,
        )
        for block in range(len(starts))
    ]


def operator_times(program: Program, setting: Setting) -> dict[str, float]:
    """Seconds of every operator of the graph, forward and backward, with the adapters in front of it; 0 for those that every
    stage makes for itself.
    """
    free = from_nothing(program.graph)
    walk = _Walk(program, range(len(program.graph.ops)), setting)
    times = dict.fromkeys((op.name for op in program.graph.ops), 0.0)
    for block, instruction in walk.by_block():
        name = program.graph.ops[block].name
        if name not in free:
            times[name] += walk.time_of(instruction).total_s
    return times


class _Walk:
    """The instructions of a program by block."""

    def __init__(self, program: Program, starts: Sequence[int], setting: Setting) -> None:
        self.program, self.starts, self.setting = program, starts, setting
        self.mesh: Mesh = program.plan.mesh
        self.positions = {op.name: index for index, op in enumerate(program.graph.ops)}
        self.layouts: dict[str, Layout] = {d.value.name: d.layout for d in program.declarations}
        self.layouts.update(program.input_layouts)
        for instruction in program.body:
            if isinstance(instruction, Adapt):
                self.layouts[instruction.result.name] = instruction.step.after
            else:
                results = zip(instruction.op.results, instruction.layouts, strict=True)
                self.layouts.update({value.name: layout for value, layout in results})

    def by_block(self) -> list[tuple[int, Instruction]]:
        """Every instruction with its block; an adapter has that of the next operator."""
        found: list[tuple[int, Instruction]] = []
        block = len(self.starts) - 1
        for instruction in reversed(self.program.body):
            if isinstance(instruction, Compute):
                block = bisect.bisect_right(self.starts, self.positions[instruction.original.name]) - 1
            found.append((block, instruction))
        return found[::-1]

    def time_of(self, instruction: Instruction) -> OpTime:
        """Seconds of an operator or an adapter."""
        setting = self.setting
        if isinstance(instruction, Compute):
            return op_time(
                instruction.original,
                instruction.assignment,
                self.mesh,
                setting.hardware,
                setting.times,
                ranks=setting.ranks,
            )
        value = instruction.of
        return step_time(
            instruction.step, value.dtype, self.mesh, setting.ranks, setting.hardware, differentiable=value.requires_grad
        )

    def parameters(self) -> tuple[list[float], list[float]]:
        """By block: bytes of parameters, gradients and optimizer state; seconds of reductions and updates, once per step."""
        setting, config = self.setting, self.setting.config
        held, once = [0.0] * len(self.starts), [0.0] * len(self.starts)
        home = self._first_uses()
        sharded = max(1, config.num_units // config.zero_ngroups) if config.use_zero else 1
        for declaration in self.program.declarations:
            value, block = declaration.value, home.get(declaration.value.name, 0)
            num_bytes = local_bytes(declaration.layout, value.dtype, self.mesh)
            held[block] += num_bytes
            if not value.requires_grad:
                continue
            num_elements = num_bytes / value.dtype.itemsize
            held[block] += num_elements * setting.optimizer.gradient_bytes(value.dtype.itemsize)
            held[block] += num_elements * setting.optimizer.kept_bytes / sharded
            once[block] += optimizer_s(
                num_elements / sharded, value.dtype.itemsize, setting.optimizer.state_bytes_per_element, setting.hardware
            )
            once[block] += reduction_s(
                declaration.layout,
                value.dtype,
                self.mesh,
                setting.ranks,
                setting.hardware,
                num_units=config.num_units,
                unit_size=config.plan_ngpus,
            )
        return held, once

    def activations(self) -> tuple[list[float], list[float]]:
        """By block: bytes that autograd keeps of one microbatch, each storage where it is kept first; and bytes that come in
        from the blocks before.
        """
        kept, entering = [0.0] * len(self.starts), [0.0] * len(self.starts)
        own = {declaration.value.name for declaration in self.program.declarations}
        roots: dict[str, str] = {}
        made_in: dict[str, int] = {}
        seen: set[str] = set()
        entered: set[tuple[str, int]] = set()

        def root_of(value: IRValue) -> str:
            return roots.get(value.name, value.name)

        for block, instruction in self.by_block():
            reads = instruction.op.operands if isinstance(instruction, Compute) else (instruction.value,)
            for value in reads:
                root = root_of(value)
                if root not in own and made_in.get(root, block) != block and (root, block) not in entered:
                    entered.add((root, block))
                    entering[block] += self._bytes(value)
            if isinstance(instruction, Adapt):
                if instruction.step.kind in _VIEWS:
                    roots[instruction.result.name] = root_of(instruction.value)
                else:
                    made_in[instruction.result.name] = block
                continue
            saved = saved_for_backward(instruction.original, instruction.assignment, self.mesh)
            for result, position in zip(instruction.op.results, saved.views, strict=False):
                if position is None:
                    made_in[result.name] = block
                else:
                    roots[result.name] = root_of(instruction.op.operands[position])
            kept[block] += saved.internal_bytes
            values = [instruction.op.operands[i] for i in saved.operands] + [instruction.op.results[i] for i in saved.results]
            for value in values:
                root = root_of(value)
                if root not in own and root not in seen:
                    seen.add(root)
                    kept[block] += self._bytes(value)
        return kept, entering

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds of a message between neighbouring stages, there and back."""
        hardware, size = self.setting.hardware, self.mesh.size
        if num_bytes == 0 or hardware.num_devices < 2 * size:
            return 0.0
        return 2 * collective_s(hardware, "send", num_bytes, (self.setting.ranks[0], self.setting.ranks[0] + size))

    def _bytes(self, value: IRValue) -> float:
        layout = self.layouts.get(value.name)
        return float(local_bytes(layout, value.dtype, self.mesh)) if layout is not None else 0.0

    def _first_uses(self) -> dict[str, int]:
        """Parameter or buffer to the first block that reads it."""
        home: dict[str, int] = {}
        for block, instruction in self.by_block():
            reads = instruction.op.operands if isinstance(instruction, Compute) else (instruction.value,)
            for value in reads:
                home.setdefault(value.name, block)
        return home


_VIEWS = frozenset(("grad_all_reduce", "grad_keep_one"))
"""Adapters that change nothing in the forward."""
