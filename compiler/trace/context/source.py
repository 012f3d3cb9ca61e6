"""Where in the user's code an operator was called, and what the result was assigned to."""

from __future__ import annotations

import dis
import functools
import os
import sys
from types import CodeType, FrameType

import torch

from shardwright.compiler.ir.value import SourceLocation
from shardwright.compiler.ops import known_loops, register, stand_ins
from shardwright.compiler.trace.calls import expert_loops, routed_experts
from shardwright.compiler.trace.context.byte_code import disassemble, position_after
from shardwright.runtime import arguments

_TRACER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_RUN = f"{_TRACER}run.py"
"""The file that calls ``forward``."""
_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    _TRACER,
    register.__file__,
    known_loops.__file__,
    stand_ins.__file__,
    # stands in front of torch.autograd.grad
    os.path.join(os.path.dirname(arguments.__file__), "training", "asked_gradients.py"),
    arguments.__file__,  # checks what the functions of ``shardwright.experts`` are given
    os.path.join(os.path.dirname(os.path.dirname(_TRACER[:-1])), "experts") + os.sep,
    "<",
)
_NAMES_VALUES = (routed_experts.__file__, expert_loops.__file__)
"""Files of the tracer that stand for code of models: their variables name values."""


def user_frame(*, naming: bool = False) -> FrameType | None:
    """The innermost frame of ``forward`` that belongs neither to torch nor to the tracer; ``None``
    where torch's own modules are all there is. ``naming``: that whose variables name values.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        # Who called for the trace is no part of the model.
        if frame.f_code.co_filename == _RUN:
            return None
        if naming and frame.f_code.co_filename in _NAMES_VALUES:
            return frame
        frame = frame.f_back
    return frame


def called_by_user() -> bool:
    """Whether what the tracer handles now was called by a line that belongs to neither torch nor
    the tracer.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_TRACER):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_SKIPPED)


def location_of(frame: FrameType | None) -> SourceLocation | None:
    """The line that a frame is at."""
    return (
        SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if frame
        else None
    )


def user_location() -> SourceLocation | None:
    """The line of user code that runs now."""
    return location_of(user_frame())


def location_of_error(error: BaseException) -> SourceLocation | None:
    """The innermost line of user code that ``error`` came through."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_SKIPPED):
            found = SourceLocation(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found


def assigned_names(frame: FrameType | None) -> tuple[str, ...]:
    """The local variables that receive the result of the call ``frame`` is in, as far as the next
    instruction tells.

    ``q, k, v = x.split(n)`` gives all three; anything but a plain assignment gives none.
    """
    return _assigned_names(frame.f_code, frame.f_lasti) if frame else ()


@functools.lru_cache(maxsize=65536)
def _assigned_names(code: CodeType, offset: int) -> tuple[str, ...]:
    following = _instructions_after(code, offset)
    if not following:
        return ()
    wanted = 1
    if following[0].opname == "UNPACK_SEQUENCE":
        wanted, following = int(following[0].arg or 0), following[1:]
    names: list[str] = []
    for instruction in following:
        if len(names) >= wanted or not instruction.opname.startswith("STORE_FAST"):
            break
        value = instruction.argval  # a pair for the joined instructions of Python 3.13
        stores = value if isinstance(value, tuple) else (value,)
        names += stores[:1] if "LOAD" in instruction.opname else stores
    return tuple(names[:wanted]) if len(names) >= wanted else ()


def _instructions_after(code: CodeType, offset: int) -> list[dis.Instruction]:
    """The instructions behind the one at ``offset``."""
    position = position_after(code, offset)
    return list(disassemble(code)[0][position : position + 10])
