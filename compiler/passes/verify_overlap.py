"""Check what runs while messages are under way, and the order of operators that this changes."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.passes.meanwhile import stays_in_order, written_buffers
from shardwright.compiler.plan.program import (
    Adapt,
    Compute,
    Instruction,
    Program,
    joins,
    steps,
)
from shardwright.compiler.plan.repeated_blocks import reads, stretches, writes
from shardwright.runtime.errors import InternalError

SUMS = (("grad_all_reduce", None), ("all_gather", "reduce_scatter"))
"""The adapters beside whose backward gradients of weights may be computed."""

LEAVE_WEIGHTS = tuple(f"shardwright.runtime.ops.{name}_beside" for name in ("linear", "addmm"))
"""The products that leave the gradient of their weight to a sum."""

CAN_START = ("dispatch", "combine", "all_gather", "all_reduce", "reduce_scatter")
"""What the runtime can start and wait for later: operators, and kinds of adapters."""


def check_overlap(program: Program) -> None:
    """Raise :class:`InternalError` where work is put beside a message and cannot be there."""
    check_beside(program)
    check_meanwhile(program)
    check_order(program)


def check_beside(program: Program) -> None:
    """Check that each weight whose gradient is left to a sum is read once, by a product that leaves
    it, and that such products leave their weights to a sum.
    """
    left: set[str] = set()
    for adapter in (i for i in program.body if isinstance(i, Adapt)):
        is_sum = (adapter.step.kind, adapter.step.backward) in SUMS
        for weight in adapter.beside:
            if weight.kind is not ValueKind.PARAMETER or weight.name in left or not is_sum:
                raise InternalError(
                    f"{weight.name} cannot get its gradient beside {adapter.result.name}"
                )
            left.add(weight.name)
    read: set[str] = set()
    for call in (i for i in steps(program.instructions) if isinstance(i, Compute)):
        found = left & {value.name for value in call.op.operands}
        if call.op.target not in LEAVE_WEIGHTS:
            if found:
                raise InternalError(
                    f"{min(found)} has its gradient beside a sum, and other readers"
                )
        elif len(found) != 1 or found & read:
            raise InternalError(f"{call.original.name} leaves the gradient of its weight to no sum")
        else:
            read |= found
    if left - read:
        raise InternalError(f"{', '.join(sorted(left - read))} has no product beside its sum")


def check_meanwhile(program: Program) -> None:
    """Check that what runs while a message is under way stands in its stretch of the program, does
    not need it, and starts none of its own.
    """
    started = sum(i.meanwhile > 0 for i in steps(program.instructions))
    placed = 0
    for _, instructions in stretches(program.body):
        for position, message in enumerate(instructions):
            if not isinstance(message, Adapt | Compute) or not message.meanwhile:
                continue
            placed += 1
            what = _name(message)
            kind = message.step.kind if isinstance(message, Adapt) else message.op.target
            if kind not in CAN_START or joins(message):
                raise InternalError(f"{what} cannot be started early")
            inside = instructions[position + 1 : position + 1 + message.meanwhile]
            behind = instructions[position + 1 + message.meanwhile :]
            if len(inside) < message.meanwhile:
                raise InternalError(f"{what} is under way when its layer ends")
            if any(map(joins, (*inside[:1], *behind[:1]))):
                raise InternalError(f"{what} parts gathers that go in one collective")
            made = {value.name for value in writes(message)}
            for other in inside:
                if made & {value.name for value in reads(other)}:
                    raise InternalError(f"{_name(other)} needs {what}, which is under way")
                if isinstance(other, Adapt | Compute) and other.meanwhile:
                    raise InternalError(f"{_name(other)} is started while {what} is under way")
    if placed != started:
        raise InternalError("a message is under way inside of a loop, or behind the outputs")


def check_order(program: Program) -> None:
    """Check that every operator of the graph runs once, in the graph's order. Where messages are
    under way, only operators keep it that draw numbers, or write to buffers or read such buffers.
    """
    instructions = list(steps(program.instructions))
    computed = [i.original for i in instructions if isinstance(i, Compute)]
    ops = list(program.graph.ops)
    if any(i.meanwhile for i in instructions):
        buffers = written_buffers(instructions)
        kept, known = _in_order(computed, buffers), _in_order(ops, buffers)
        numbers = {op.name: number for number, op in enumerate(ops)}
        computed.sort(key=lambda op: numbers.get(op.name, len(ops)))
        computed = computed if kept == known else []
    if computed != ops:
        raise InternalError(
            "the program does not compute every operator of the graph once, in its order"
        )


def _in_order(ops: Iterable[IROp], buffers: frozenset[str]) -> list[str]:
    return [op.name for op in ops if stays_in_order(op, buffers)]


def _name(instruction: Instruction) -> str:
    return ", ".join(value.name for value in writes(instruction))
