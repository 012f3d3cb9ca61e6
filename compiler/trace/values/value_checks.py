"""Checks of values in the user's code: branches on a tensor of which one does nothing but raise.

``if labels.max() >= n: raise ValueError(...)`` and ``assert lengths.max() <= n`` need values, but
what ``forward`` computes does not depend on them: whoever passes what the check lets through gets
the branch that does not raise. So the tracer takes that branch and says that the compiled module
checks nothing.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType
from typing import Any

from shardwright.compiler.trace.context.byte_code import (
    disassemble,
    is_branch,
    makes_bool,
    position_after,
)

_EFFECTS = (
    "STORE_",
    "DELETE_",
    "RETURN_",
    "YIELD_",
    "IMPORT_",
    "FOR_ITER",
    "GET_",
    "BEFORE_",
    "SETUP_",
    "SEND",
    "POP_TOP",
)
"""Instructions, by the start of their names, that do more than prepare an exception."""

_MOVES = ("SWAP", "COPY")


def passing(frame: FrameType | None) -> bool | None:
    """The truth value that passes the check which ``frame`` is about to branch on; ``None`` where
    that is no check.
    """
    return _passing_at(frame.f_code, frame.f_lasti) if frame else None


class Unread:
    """A number nobody has read, of which a check compares the size: any comparison gives what
    passes the check.
    """

    def __init__(self, passes: bool) -> None:
        self._passes = passes

    def _compared(self, other: Any) -> bool:
        return self._passes

    __lt__ = __le__ = __gt__ = __ge__ = _compared
    __eq__ = __ne__ = _compared
    __hash__ = None  # type: ignore[assignment]


def unread(frame: FrameType | None) -> Unread | None:
    """What stands for the number that the call ``frame`` is in returns, if a check compares it at
    once.
    """
    if frame is None:
        return None
    instructions = disassemble(frame.f_code)[0]
    position = position_after(frame.f_code, frame.f_lasti)
    depth = 1  # of the stack, from the number on: what it is compared with may be computed above it
    while instructions[position].opname != "COMPARE_OP":
        instruction = instructions[position]
        if instruction.opname.startswith((*_EFFECTS, *_MOVES)) or "JUMP" in instruction.opname:
            return None
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        if depth < 2:
            return None
        position += 1
    passes = _passing_at(frame.f_code, instructions[position + 1].offset)
    return Unread(passes) if passes is not None and depth <= 2 else None


@functools.lru_cache(maxsize=4096)
def _passing_at(code: CodeType, offset: int) -> bool | None:
    instructions, offsets = disassemble(code)
    position = position_after(code, offset) - 1
    if instructions[position].opname.startswith("CALL"):  # bool(x), x.item(), any([x, y])
        position += 1
    if makes_bool(instructions[position]):
        position += 1
    branch = instructions[position]
    if not is_branch(branch) or "_NONE" in branch.opname or branch.argval not in offsets:
        return None
    follows, jumps = position + 1, offsets.index(branch.argval)
    for_jump = "IF_TRUE" in branch.opname
    if _only_raises(code, follows, jumps):
        return for_jump
    return not for_jump if _only_raises(code, jumps, follows) else None


def _only_raises(code: CodeType, start: int, other: int) -> bool:
    """Whether all that begins at ``start`` is to raise, or to find by further conditions that there
    is no reason to and go on at ``other``, the branch not taken. An exception that the same
    function may catch is control flow, not a check.
    """
    instructions, offsets = disassemble(code)
    handled = [range(entry.start, entry.end) for entry in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]
    # Every way through the byte code, each instruction once.
    raises, seen, ways = False, set(), [start]
    while ways:
        position = ways.pop()
        while position not in seen:
            seen.add(position)
            instruction = instructions[position]
            if instruction.opname == "RAISE_VARARGS":
                if any(instruction.offset in covered for covered in handled):
                    return False
                raises = True
                break
            if instruction.opname == "JUMP_FORWARD":
                position = offsets.index(instruction.argval)
                if position == other:
                    return False
                continue
            if instruction.opname.startswith(_EFFECTS) or (
                "JUMP" in instruction.opname and not is_branch(instruction)
            ):
                return False
            if is_branch(instruction):
                target = (
                    offsets.index(instruction.argval)
                    if instruction.argval in offsets
                    else len(instructions)
                )
                # A jump back is a loop: it may run for ever, and do anything.
                if target < position:
                    return False
                ways += [target] if target != other else []
                if position + 1 == other:
                    break
            position += 1
            if position >= len(instructions):
                return False
    return raises
