"""The byte code of a function: what comes after a call, and which instructions branch."""

from __future__ import annotations

import bisect
import dis
import functools
import sys
from types import CodeType

_COMPARED_AS_BOOL = 16
"""The bit of the argument of a comparison that gives a truth value, from Python 3.13 on."""


def position_of(code: CodeType, offset: int) -> int:
    """The position of the instruction that a jump to ``offset`` comes to."""
    # The offset may be that of the prefix of a long argument, which is left out.
    return bisect.bisect_left(disassemble(code)[1], offset)


def position_after(code: CodeType, offset: int) -> int:
    """The position, among the instructions of ``code``, behind the one at ``offset``."""
    # The offset of a running call may lie inside its inline cache.
    return bisect.bisect_right(disassemble(code)[1], offset)


@functools.lru_cache(maxsize=4096)
def disassemble(code: CodeType) -> tuple[tuple[dis.Instruction, ...], tuple[int, ...]]:
    """The instructions of ``code`` that do something, and their offsets."""
    instructions = tuple(
        i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")
    )
    return instructions, tuple(instruction.offset for instruction in instructions)


def makes_bool(instruction: dis.Instruction) -> bool:
    """Whether an instruction in front of a branch asks for the truth value; until Python 3.12
    branches do that themselves.
    """
    compares = sys.version_info >= (3, 13) and instruction.opname == "COMPARE_OP"
    return instruction.opname == "TO_BOOL" or (
        compares and bool((instruction.arg or 0) & _COMPARED_AS_BOOL)
    )


def is_branch(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("POP_JUMP_") and "_IF_" in instruction.opname
