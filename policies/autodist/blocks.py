"""What each block of a chain takes in seconds and bytes, read off the program of the whole model on the mesh of a stage."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.cost.adapters import step_time
from shardwright.compiler.cost.collectives import collective_s
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.local import local_bytes
from shardwright.compiler.cost.operators import OperatorTimes, OpTime, op_time
from shardwright.compiler.cost.optimizer_memory import ADAM, OptimizerMemory, num_shards
from shardwright.compiler.cost.reduction import parameter_s
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program
from shardwright.policies.autodist.chain import Part
from shardwright.policies.autodist.kept import Kept
from shardwright.policies.autodist.stages import Again, Block
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True)
class Setting:
    """What costs depend on besides the program. ``ranks``: the unit's ranks that the mesh lies on. ``num_microbatches``: of a
    step.
    """

    hardware: Hardware
    config: ComputeConfig
    ranks: tuple[int, ...]
    optimizer: OptimizerMemory = ADAM
    times: OperatorTimes | None = None
    num_microbatches: int = 1


MAX_WAYS = 8
"""The most ways to compute a block again that are told apart, the ones that save most in their time first."""


@dataclass(frozen=True)
class Way:
    """Modules of a block that are computed again, and what that takes and saves."""

    parts: tuple[Part, ...]
    again: Again


@dataclass(frozen=True)
class Costs:
    """The blocks without anything computed again; ``ways[block]``: the ways to do so, none better than another in both."""

    blocks: list[Block]
    ways: list[tuple[Way, ...]]

    def free(self) -> list[Block]:
        """The blocks with all their ways."""
        found = zip(self.blocks, self.ways, strict=True)
        return [replace(block, again=tuple(way.again for way in ways)) for block, ways in found]


def block_costs(
    program: Program,
    starts: Sequence[int],
    parts: Mapping[int, Sequence[Part]],
    setting: Setting,
    only: Callable[[Part], bool] | None = None,
) -> Costs:
    """The blocks that begin at the positions ``starts`` of the graph's operators. ``parts``: by block, what may be computed
    again; with ``only``, what it names is, and nothing else may be.

    Adapters count to the block that needs them; a parameter, its gradient, optimizer state, reduction and update to the first
    block that uses it.
    """
    walk = _Walk(program, starts, setting)
    forward, backward = [0.0] * len(program.graph.ops), [0.0] * len(program.graph.ops)
    for place, instruction in walk.by_place():
        time = walk.time_of(instruction)
        forward[place] += time.forward_s
        backward[place] += time.backward_s
    held, added, once = walk.parameters()
    kept = walk.kept()

    def again(chosen: Iterable[Part]) -> Again:
        listed = list(chosen)
        return Again(
            sum(sum(forward[part.start : part.stop]) for part in listed),
            float(sum(kept.saved(part.start, part.stop) for part in listed)),
        )

    blocks, ways = [], []
    for block, (start, stop) in enumerate(zip(starts, [*starts[1:], len(forward)], strict=True)):
        own = parts.get(block, ())
        entering = kept.entering(start, stop)
        fixed = again(_outermost(part for part in own if only(part))) if only else Again(0.0, 0.0)
        blocks.append(
            Block(
                sum(forward[start:stop]),
                sum(backward[start:stop]) + fixed.time_s + added[block],
                once[block],
                held[block],
                kept.first(start, stop) - fixed.saved_bytes,
                transfer_s=walk.transfer_s(entering) if block else 0.0,
            )
        )
        ways.append(() if only else useful_ways([Way((part,), again((part,))) for part in own]))
    return Costs(blocks, ways)


def _outermost(parts: Iterable[Part]) -> list[Part]:
    """Those that are not inside another."""
    listed = sorted(parts, key=lambda part: (part.start, -part.stop))
    found: list[Part] = []
    for part in listed:
        if not found or part.start >= found[-1].stop:
            found.append(part)
    return found


def useful_ways(single: Sequence[Way]) -> tuple[Way, ...]:
    """Each module by itself; and together, the one that saves most in its time first, as far as they do not overlap."""
    useful = [way for way in single if way.again.saved_bytes > 0]
    useful.sort(key=lambda way: (way.again.time_s / way.again.saved_bytes, way.parts[0].start))
    found, joined = list(useful), Way((), Again(0.0, 0.0))
    for way in useful:
        (part,) = way.parts
        if all(part.stop <= other.start or other.stop <= part.start for other in joined.parts):
            time, saved = joined.again.time_s + way.again.time_s, joined.again.saved_bytes + way.again.saved_bytes
            joined = Way((*joined.parts, part), Again(time, saved))
            found.append(joined)
    found.sort(key=lambda way: (way.again.time_s, -way.again.saved_bytes, len(way.parts)))
    best: list[Way] = []
    for way in found:
        if not best or way.again.saved_bytes > best[-1].again.saved_bytes:
            best.append(way)
    if len(best) > MAX_WAYS:
        kept = {id(way) for way in sorted(best[:-1], key=lambda way: way.again.time_s / way.again.saved_bytes)[: MAX_WAYS - 1]}
        best = [way for way in best if id(way) in kept or way is best[-1]]
    return tuple(best)


def operator_times(program: Program, setting: Setting) -> dict[str, float]:
    """Seconds of every operator of the graph, forward and backward, with the adapters in front of it; 0 for those that every
    stage makes for itself.
    """
    free = from_nothing(program.graph)
    walk = _Walk(program, [0], setting)
    times = dict.fromkeys((op.name for op in program.graph.ops), 0.0)
    for place, instruction in walk.by_place():
        name = program.graph.ops[place].name
        if name not in free:
            times[name] += walk.time_of(instruction).total_s
    return times


class _Walk:
    """The instructions of a program by block, and by place: the position of an operator in those of the graph."""

    def __init__(self, program: Program, starts: Sequence[int], setting: Setting) -> None:
        self.program, self.starts, self.setting = program, starts, setting
        self.mesh: Mesh = program.plan.mesh
        self.storage_mesh: Mesh = program.plan.storage_mesh
        units = range(max(1, program.plan.zero))
        self.storage_ranks = tuple(unit * setting.config.plan_ngpus + rank for unit in units for rank in setting.ranks)
        self.positions = {op.name: index for index, op in enumerate(program.graph.ops)}
        self.layouts: dict[str, Layout] = {d.value.name: d.layout for d in program.declarations}
        self.layouts.update(program.input_layouts)
        for instruction in program.body:
            if isinstance(instruction, Adapt):
                self.layouts[instruction.result.name] = instruction.step.after
            else:
                results = zip(instruction.op.results, instruction.layouts, strict=True)
                self.layouts.update({value.name: layout for value, layout in results})

    def by_place(self) -> list[tuple[int, Instruction]]:
        """Every instruction with its place; an adapter has that of the next operator."""
        found: list[tuple[int, Instruction]] = []
        place = len(self.positions) - 1
        for instruction in reversed(self.program.body):
            if isinstance(instruction, Compute):
                place = self.positions[instruction.original.name]
            found.append((place, instruction))
        return found[::-1]

    def kept(self) -> Kept:
        """What operators keep for the backward."""
        own = {declaration.value.name for declaration in self.program.declarations}
        return Kept(self.by_place(), own, self.mesh, self.layouts)

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
        time = step_time(
            instruction.step,
            value.dtype,
            self.storage_mesh,
            self.storage_ranks,
            setting.hardware,
            differentiable=value.requires_grad,
        )
        again = instruction.gathers_weight and value.requires_grad  # gathered once more in the backward
        return replace(time, backward_s=time.backward_s + time.forward_s) if again else time

    def parameters(self) -> tuple[list[float], list[float], list[float]]:
        """By block: bytes of parameters, gradients and optimizer state; seconds of adding to gradients, by microbatch; and of
        reductions and updates, once per step.
        """
        setting, config = self.setting, self.setting.config
        held, added, once = ([0.0] * len(self.starts) for _ in range(3))
        home = self._first_uses()
        for declaration in self.program.declarations:
            value, layout, block = declaration.value, declaration.layout, home.get(declaration.value.name, 0)
            num_bytes = local_bytes(layout, value.dtype, self.storage_mesh)
            held[block] += num_bytes
            if value.requires_grad and value.kind is ValueKind.PARAMETER:
                num_elements = num_bytes / value.dtype.itemsize
                held[block] += num_elements * setting.optimizer.gradient_bytes(value.dtype.itemsize)
                held[block] += num_elements * setting.optimizer.kept_bytes / num_shards(layout, self.storage_mesh, config)
                each_s, once_s = parameter_s(
                    declaration, self.storage_mesh, config, setting.hardware, setting.optimizer, setting.ranks,
                    setting.num_microbatches,
                )  # fmt: skip
                added[block] += each_s
                once[block] += once_s
        return held, added, once

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds of a message between neighbouring stages, there and back."""
        hardware, size = self.setting.hardware, self.mesh.size
        if num_bytes == 0 or hardware.num_devices < 2 * size:
            return 0.0
        return 2 * collective_s(hardware, "send", num_bytes, (self.setting.ranks[0], self.setting.ranks[0] + size))

    def _first_uses(self) -> dict[str, int]:
        """Parameter or buffer to the first block that reads it."""
        home: dict[str, int] = {}
        for place, instruction in self.by_place():
            block = bisect.bisect_right(self.starts, place) - 1
            reads = instruction.op.operands if isinstance(instruction, Compute) else (instruction.value,)
            for value in reads:
                home.setdefault(value.name, block)
        return home
