"""Start messages early, and compute meanwhile what neither makes them nor needs them.

Tokens travel to their experts and back. What a layer computes beside its experts, such as shared
experts, can run while they are under way, but it rarely stands there: a model computes its shared
experts in front of the router, or behind the experts. So operators are moved. The program

    up = linear(x, up_weight)
    down = linear(up, down_weight)
    rows, routing = dispatch(x, chosen)       # tokens go to their experts
    made = grouped_linear(rows, ...)
    y = combine(made, routing)                # sums come back
    out = y + down

becomes

    rows, routing = dispatch(x, chosen)       meanwhile: up
    made = grouped_linear(rows, ...)
    y = combine(made, routing)                meanwhile: down
    out = y + down

In backward everything runs the other way, so that the same work lies behind the messages that go
back. Collectives of adapters are treated alike where a stretch of the program has no experts.

No number changes: each operator reads what it read before. What draws random numbers or writes to
buffers stays where it is. Operators move within a layer, or a recompute region, alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardwright.compiler.cost.time.arithmetic import may_multiply
from shardwright.compiler.cost.work_share import operations_of
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.ops.strategy import exchange
from shardwright.compiler.plan.program import (
    Adapt,
    Compute,
    Instruction,
    Loop,
    Program,
    joins,
    steps,
)
from shardwright.compiler.plan.repeated_blocks import reads, stretches, writes
from shardwright.runtime.layout import Mesh

EXCHANGES = ("dispatch", "combine")
"""The operators that send rows of experts."""

SENDING = ("all_gather", "all_reduce", "reduce_scatter")
"""The adapters that can be started and send something on the way forward."""


def with_work_behind_messages(program: Program) -> Program:
    """The program with work behind its messages, or itself if there is none."""
    mesh, buffers = program.plan.computing_mesh, written_buffers(program.body)
    body: list[Instruction] = []
    for _, instructions in stretches(program.body):
        body += _Timeline(instructions, mesh, buffers).ordered()
    found = any(isinstance(i, Adapt | Compute) and i.meanwhile for i in body)
    return replace(program, body=tuple(body)) if found else program


def sends_rows(call: Compute, mesh: Mesh) -> bool:
    """Whether an operator sends rows of experts to other ranks."""
    exchanging = (axis for axis, strategy in call.assignment.items() if exchange(strategy))
    return call.op.target in EXCHANGES and any(mesh.axis_size(axis) > 1 for axis in exchanging)


@dataclass
class _Unit:
    """Instructions that stay together: one, or gathers that go in one collective. ``slot``: how
    many messages are in front of them. ``window``: the message behind which they run, counted from
    1, if they are free to, and ``work`` the operations of their products then.
    """

    instructions: list[Instruction]
    slot: int
    is_free: bool
    work: float = 0.0
    parents: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    window: int = 0


class _Timeline:
    """The instructions of a stretch around its messages, in order: what stands in front of the
    first message, the window of the first, what stands behind it, the window of the second, ...

    A message and what is not free stay in their order. All else goes into the windows where it may
    be, in equal parts by work.
    """

    def __init__(
        self, instructions: Sequence[Instruction], mesh: Mesh, buffers: frozenset[str]
    ) -> None:
        self.instructions, self.mesh = instructions, mesh
        calls = (i for i in instructions if isinstance(i, Compute))
        messages: list[Instruction] = [call for call in calls if sends_rows(call, mesh)]
        if not messages:
            messages = [i for i in instructions if isinstance(i, Adapt) and _sends(i)]
        # A gather that others join is none that can be started.
        joined = {id(a) for a, b in pairwise(instructions) if joins(b)}
        starts = {id(message) for message in messages} - joined
        self.units: list[_Unit] = []
        self.messages: list[int] = []  # the units of the messages
        made: dict[str, int] = {}
        for instruction in instructions:
            if joins(instruction):
                self.units[-1].instructions.append(instruction)
            else:
                is_message = id(instruction) in starts
                if is_message:
                    self.messages.append(len(self.units))
                is_free = not is_message and _is_movable(instruction, buffers)
                self.units.append(_Unit([instruction], len(self.messages), is_free))
            number = len(self.units) - 1
            unit = self.units[number]
            for parent in {made[v.name] for v in reads(instruction) if v.name in made} - {number}:
                unit.parents.append(parent)
                self.units[parent].children.append(number)
            made |= {value.name: number for value in writes(instruction)}

    def ordered(self) -> list[Instruction]:
        """The instructions in their new order."""
        if not self.messages:
            return list(self.instructions)
        self._settle()
        free = [unit for unit in self.units if unit.is_free]
        for unit in free:
            unit.work = sum(_work(instruction, self.mesh) for instruction in unit.instructions)
        if not any(unit.work for unit in free):
            return list(self.instructions)
        self._share()
        order: list[Instruction] = []
        for number, unit in enumerate(self.units):
            if unit.is_free:
                continue
            if number not in self.messages:
                order += unit.instructions
                continue
            behind = [other for other in free if other.window == unit.slot]
            (message,) = unit.instructions
            inside = [instruction for other in behind for instruction in other.instructions]
            assert isinstance(message, Adapt | Compute)
            if any(other.work for other in behind):
                message = replace(message, meanwhile=len(inside))
            order += [message, *inside]
        return order

    def _settle(self) -> None:
        """Find out what is free to move: whatever has a window behind all that it reads and in
        front of all that reads it.
        """
        self.first, self.last = [0] * len(self.units), [0] * len(self.units)
        bound = True
        while bound:
            bound = False
            for number, unit in enumerate(self.units):
                self.first[number] = max((self._after(p) for p in unit.parents), default=1)
            for number in reversed(range(len(self.units))):
                children = (self._before(c) for c in self.units[number].children)
                self.last[number] = min(children, default=len(self.messages))
            for number, unit in enumerate(self.units):
                if unit.is_free and self.first[number] > self.last[number]:
                    unit.is_free, bound = False, True

    def _after(self, parent: int) -> int:
        """The first window in which a reader of a unit may be."""
        unit = self.units[parent]
        return self.first[parent] if unit.is_free else unit.slot + 1

    def _before(self, child: int) -> int:
        """The last window in which what a unit reads may be made."""
        unit = self.units[child]
        # A message leaves in front of its own window.
        return self.last[child] if unit.is_free else unit.slot - (child in self.messages)

    def _share(self) -> None:
        """Deal what is free to the windows, in order, until each has its part of the work."""
        free = [number for number, unit in enumerate(self.units) if unit.is_free]
        windows = {w for n in free for w in range(self.first[n], self.last[n] + 1)}
        part = sum(self.units[number].work for number in free) / max(1, len(windows))
        dealt = dict.fromkeys(windows, 0.0)
        for number in free:
            unit = self.units[number]
            made_in = (self.units[p].window for p in unit.parents if self.units[p].is_free)
            window = max(self.first[number], *made_in, 1)
            while window < self.last[number] and dealt[window] + unit.work / 2 > part:
                window += 1
            dealt[window] += unit.work
            unit.window = window


def _sends(adapter: Adapt) -> bool:
    """Whether an adapter can be started, and sends an activation."""
    held_on = not (adapter.gathers_weight or adapter.gathers_again or adapter.joins)
    return adapter.step.kind in SENDING and held_on


def _is_movable(instruction: Instruction, buffers: frozenset[str]) -> bool:
    """Whether nothing but its operands says when an instruction runs."""
    if isinstance(instruction, Loop):
        return False
    if isinstance(instruction, Adapt):
        return instruction.of.name not in buffers
    return not stays_in_order(instruction.original, buffers)


def stays_in_order(op: IROp, buffers: frozenset[str]) -> bool:
    """Whether an operator depends on when it runs: it draws numbers, writes to buffers, or reads
    ``buffers`` that others write to.
    """
    assert op.rule is not None
    reads_written = any(value.name in buffers for value in op.operands)
    return op.rule.random or op.updates_buffers or op.only_in is not None or reads_written


def written_buffers(instructions: Iterable[Instruction]) -> frozenset[str]:
    """The names of the buffers to which operators write while they run."""
    writing = (
        instruction.original
        for instruction in steps(instructions)
        if isinstance(instruction, Compute) and instruction.original.updates_buffers
    )
    return frozenset(
        value.name for op in writing for value in op.operands if value.kind is ValueKind.BUFFER
    )


def _work(instruction: Instruction, mesh: Mesh) -> float:
    """The operations of the products of an instruction."""
    if not isinstance(instruction, Compute) or not may_multiply(instruction.original):
        return 0.0
    return operations_of(instruction.original, instruction.assignment, mesh)
