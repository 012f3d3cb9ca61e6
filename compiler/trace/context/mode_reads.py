"""Reads of ``self.training`` after which both modes do the same.

``dropout=0.0 if not self.training else self.attention_dropout`` stands in nearly every attention of
transformers, and most models have no dropout: both modes give 0.0. A model that reads its mode only
so needs one trace, not one for each mode. To find out, the byte code behind the read is followed
twice, once for each mode, as long as it does nothing but load numbers, compare them and branch. If
both ways come to the same instruction with the same numbers, the mode has decided nothing.

    dropout=0.0 if not self.training else self.p    p is 0.0: nothing is decided; 0.1: it is
    if self.training and self.jitter > 0: ...       jitter is 0: nothing is decided
"""

from __future__ import annotations

import dis
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from shardwright.compiler.trace.context.byte_code import (
    disassemble,
    is_branch,
    makes_bool,
    position_after,
    position_of,
)

_NUMBERS = (bool, int, float, type(None))
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}

_MISSING = object()
_END = -1
"""The position behind every return: each way may have a return of its own."""

_State = tuple[int, tuple[Any, ...]]
"""The position of an instruction that comes next, and what lies on the stack above all that was
there before the read.
"""


class _Unknown(Exception):
    """An instruction may do more than load numbers, compare them and branch."""


def is_same_in_both_modes(frame: FrameType) -> bool:
    """Whether ``frame``, which reads ``training`` of a module now, does the same for both values.

    ``False`` where that is not known.
    """
    position = position_after(frame.f_code, frame.f_lasti)
    read = disassemble(frame.f_code)[0][position - 1]
    if read.opname != "LOAD_ATTR" or read.argval != "training":
        return False
    training = {_key(state) for state in _states(frame, position, True)}
    return any(_key(state) in training for state in _states(frame, position, False))


def _states(frame: FrameType, position: int, mode: bool) -> Iterator[_State]:
    """The states that ``frame`` comes to after a read that gives ``mode``."""
    stack: list[Any] = [mode]
    # Branches jump forward only, so this ends.
    while position != _END:
        try:
            position = _step(frame, position, stack)
        except _Unknown:
            return
        yield position, tuple(stack)


def _key(state: _State) -> tuple[Any, ...]:
    """What two equal states have in common: numbers of one type that read alike, and objects by
    what they are. ``0.0`` and ``-0.0`` are told apart, and ``1`` and ``True``.
    """

    def known(x: Any) -> Any:
        if type(x) is float:
            return repr(x)
        return x if type(x) in _NUMBERS else id(x)  # ids: all live as long

    position, stack = state
    return position, *((type(x), known(x)) for x in stack)


def _step(frame: FrameType, position: int, stack: list[Any]) -> int:
    """Do one instruction on the stack; the position of the next."""
    instruction = disassemble(frame.f_code)[0][position]
    name = instruction.opname
    if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
        stack.append(instruction.argval)
    elif name == "RETURN_CONST":
        stack.append(instruction.argval)
        return _END
    elif name in ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"):
        stack.append(_local(frame, instruction.argval))
    elif name == "LOAD_ATTR" and stack and not _loads_method(instruction):
        stack.append(_attribute(stack.pop(), instruction.argval))
    elif name == "COMPARE_OP" and len(stack) > 1:
        right, left = stack.pop(), stack.pop()
        stack.append(_compared(left, right, instruction))
    elif name == "UNARY_NOT" and stack:
        stack.append(not _number(stack.pop()))
    elif makes_bool(instruction) and stack:
        stack.append(bool(_number(stack.pop())))
    elif name == "RETURN_VALUE":
        return _END
    elif name == "JUMP_FORWARD":
        return position_of(frame.f_code, instruction.argval)
    elif is_branch(instruction) and stack:
        if _jumps(name, stack.pop()):
            target = position_of(frame.f_code, instruction.argval)
            if target <= position:  # a loop
                raise _Unknown
            return target
    elif name not in ("NOP", "NOT_TAKEN"):
        raise _Unknown
    return position + 1


def _local(frame: FrameType, name: str) -> Any:
    values = frame.f_locals
    if name not in values:
        raise _Unknown
    return values[name]


def _loads_method(instruction: dis.Instruction) -> bool:
    """Whether an attribute is loaded to be called, with its object beside it on the stack."""
    return sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)


def _attribute(holder: Any, name: str) -> Any:
    """A number, or an object that has some, among the attributes of ``holder``; to read it runs no
    code of the model.
    """
    kind: Any = type(holder)
    if kind.__getattribute__ is not object.__getattribute__:
        raise _Unknown
    found = inspect.getattr_static(holder, name, _MISSING)
    if type(found) in _NUMBERS:
        return found
    own: dict[str, Any] = getattr(holder, "__dict__", {})
    if found is _MISSING and getattr(kind, "__getattr__", None) is nn.Module.__getattr__:
        own = own["_modules"]
        found = own.get(name)
    # Else it is a property or a function of the class.
    if found is None or own.get(name) is not found:
        raise _Unknown
    return found


def _number(value: Any) -> Any:
    if type(value) not in _NUMBERS:
        raise _Unknown
    return value


def _compared(left: Any, right: Any, instruction: dis.Instruction) -> bool:
    compare = _COMPARISONS.get(instruction.argval.removeprefix("bool(").removesuffix(")"))
    if compare is None or None in (left, right):
        raise _Unknown
    return compare(_number(left), _number(right))


def _jumps(name: str, value: Any) -> bool:
    """Whether a branch is taken for what lies on the stack."""
    if "IF_NOT_NONE" in name:
        return value is not None
    if "IF_NONE" in name:
        return value is None
    return bool(_number(value)) == ("IF_TRUE" in name)
