"""Python source of operator calls: what the code generator writes, one expression per call.

The text is what a person would write (``a + b``, ``x[:, None]``, ``torch.cat((a, b), dim=-1)``) and
evaluates to exactly the call it stands for. Tensors that a signature allows by position stay
positional; other optional arguments are written with their names.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from typing import Any

import sympy
import torch

from shardwright.compiler.ir.identifier import axis_variable, is_name
from shardwright.compiler.ir.op import (
    Arg,
    AxisRef,
    IROp,
    LeftOut,
    RankDevice,
    RankDraw,
    WhenTraining,
    leaves,
)
from shardwright.compiler.ir.quote import quoted
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.time_steps import StepIndex, TimeSteps
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.opdef import REQUIRED, OpDef, is_simple
from shardwright.compiler.ops.step_source import StepFunction, function_name, step_function
from shardwright.runtime.errors import InternalError, TraceError

NameOf = Callable[[IRValue], str]
"""The source of a value: a local variable, ``self.transformer.wte.weight``."""

SizeText = Callable[[sympy.Expr], str]
"""The source of a symbolic size."""

_TORCH_LITERALS = torch.dtype | torch.memory_format | torch.layout
_MAX_DECIMAL = 10**4000
"""Python neither writes nor reads decimal numbers of more digits than about this."""
_SHORT_MODULES = {
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "math": "import math",
}


class Source(str):
    """Source text that stands in an argument as it is."""

    __slots__ = ()


def call_source(op: IROp, name_of: NameOf, size_text: SizeText) -> str:
    """The expression that makes the call's result (a tuple or list if it has several).

    Raises :class:`InternalError` for an argument that has no source form.
    """

    def text(arg: Arg) -> str:
        return argument_source(arg, name_of, size_text)

    # ``time_steps(h, x)``: the steps are the function itself.
    if isinstance(steps := op.arg("steps"), TimeSteps | Source):
        return f"{text(steps)}({', '.join(map(text, op.arg('operands')))})"
    opdef = registry.get(op.target)
    # No operator of the tables: the call is written with the names that it was recorded with.
    if opdef is None:
        function = op.target
        words = [
            text(arg) if name.isdigit() else _keyword(name, text(arg)) for name, arg in op.args
        ]
        # The parallel form of a registered operator: arguments have its names.
        if _is_runtime_function(function):
            function = function.rpartition(".")[2]
            words[0] = text(op.args[0][1])
        return f"{function}({', '.join(words)})"
    texts: dict[str, str | tuple[str, ...]] = {}
    # ``x.view(2, 3)``: an argument that stands for several.
    star = {parameter.name for parameter in opdef.parameters if parameter.star}
    for name, arg in op.args:
        if opdef.code == "[]" and name == "index":
            texts[name] = index_source(arg, name_of, size_text)
        else:
            texts[name] = tuple(map(text, arg)) if name in star else text(arg)
    # What has a default is written by keyword, unless it is a tensor.
    optional = {
        parameter.name for parameter in opdef.parameters if parameter.default is not REQUIRED
    }
    named = {name for name, arg in op.args if name in optional and not isinstance(arg, IRValue)}
    if _is_runtime_function(opdef.code):
        opdef = replace(opdef, code=opdef.code.rpartition(".")[2])
    return opdef.write(texts, by_keyword=named)


def argument_source(arg: Arg, name_of: NameOf, size_text: SizeText) -> str:
    """The source of one argument. Raises :class:`InternalError` for an argument that has no source
    form.
    """

    def text(arg: Arg) -> str:
        # Arguments may hold others.
        return argument_source(arg, name_of, size_text)

    match arg:
        # What the graph stands for: values, sizes, and what only the rank knows.
        case IRValue():
            return name_of(arg)
        case sympy.Expr():
            return size_text(arg)
        case StepIndex():
            return arg.source
        case TimeSteps():
            return function_name(arg)
        case RankDevice():
            return "self.device"
        case LeftOut():
            return f"self.left_out({quoted(arg.path)})"
        case RankDraw():
            return _draw_source(arg, size_text)
        case AxisRef():
            return axis_variable(arg.name)
        # A value that follows the mode of the module.
        case WhenTraining(train=True, eval=False):
            return "self.training"
        case WhenTraining(train=False, eval=True):
            return "not self.training"
        case WhenTraining():
            return f"{text(arg.train)} if self.training else {text(arg.eval)}"
        case tuple():
            return f"({', '.join(map(text, arg))}{',' if len(arg) == 1 else ''})"
        case list():
            return f"[{', '.join(map(text, arg))}]"
        case dict():
            return f"{{{', '.join(f'{text(key)}: {text(item)}' for key, item in arg.items())}}}"
        case slice():
            return f"slice({text(arg.start)}, {text(arg.stop)}, {text(arg.step)})"
    return literal_source(arg)


def _draw_source(draw: RankDraw, size_text: SizeText) -> str:
    """``self.draw("up_dropout", "tp")``, or with the layout of the whole."""
    words = [literal_source(draw.name)]
    if draw.layout is None:
        words += map(quoted, draw.axes)
    else:
        words.append(f"layout={quoted(draw.layout)}")
    if draw.sizes:
        pairs = (f"{quoted(name)}: {size_text(size)}" for name, size in draw.sizes)
        words.append(f"sizes={{{', '.join(pairs)}}}")
    return f"self.draw({', '.join(words)})"


def literal_source(arg: Any) -> str:
    """The source of a constant: one that evaluates to the same type and value, to the sign of a
    zero and to NaN.

    Raises :class:`InternalError` for what has no source form.
    """
    match arg:
        case Source():
            return str(arg)
        case Enum():
            return _member_source(arg)
        case str():
            return quoted(str(arg))
        case None | bool() | bytes():
            return repr(arg)
        case int():  # the methods of the type: subclasses such as numpy's have a repr of their own
            return int.__repr__(arg) if abs(arg) < _MAX_DECIMAL else hex(arg)
        case float():
            return _float_source(float(arg))
        case complex():
            return _complex_source(complex(arg))
        case torch.device():
            return f"torch.device({quoted(str(arg))})"
        case range():
            return repr(arg)
    if arg is Ellipsis:
        return "..."
    if isinstance(arg, _TORCH_LITERALS):
        return str(arg)
    raise InternalError(
        f"an argument of type {type(arg).__name__} has no source form",
        why=f"the argument is {arg!r}",
    )


def _float_source(number: float) -> str:
    # As formatters write it.
    return repr(number).replace("e+", "e") if math.isfinite(number) else f'float("{number}")'


def _complex_source(number: complex) -> str:
    """What ``repr`` gives loses the sign of a zero and has no NaN: ``-0+1j`` is a sum."""
    parts = (number.real, number.imag)
    if all(math.isfinite(part) and (part or math.copysign(1, part) > 0) for part in parts):
        return repr(number).replace("e+", "e")
    return f"complex({', '.join(map(_float_source, parts))})"


def _member_source(member: Enum) -> str:
    """A member by its name, or by its value where it has no name that can be written: a combination
    of flags.
    """
    cls = type(member)
    path = f"{cls.__module__}.{cls.__qualname__}"
    if not all(map(is_name, path.split("."))):
        raise TraceError(
            f"generated code cannot import {path}, the class of {member}",
            why="it is local to a function, or its module has a name that no import statement "
            "can say",
            hint="define it at the top level of a module",
        )
    if member.name is not None and is_name(member.name):
        return f"{path}.{member.name}"
    return f"{path}({literal_source(member.value)})"


def _keyword(name: str, text: str) -> str:
    """An argument by keyword; functions that take any keywords may get some that are no names."""
    return f"{name}={text}" if is_name(name) else f"**{{{quoted(name)}: {text}}}"


def index_source(index: Arg, name_of: NameOf, size_text: SizeText) -> str:
    """What stands between the brackets of ``x[...]``; ``index`` is a tuple with one item per dim,
    or one item.

    A tuple within the tuple is a list of positions.
    """

    # One item between the brackets: ``1:n``, ``[0, 2]``, ``None``, a name.
    def text(item: Arg) -> str:
        if isinstance(item, slice):
            start, stop, step = (
                "" if bound is None else text(bound) for bound in (item.start, item.stop, item.step)
            )
            gap = "" if all(is_simple(bound) for bound in (start, stop, step) if bound) else " "
            return f"{gap}:{gap}".join([start, stop, *([step] if step else [])]).strip()
        if isinstance(item, tuple | list):
            return f"[{', '.join(map(text, item))}]"
        return argument_source(item, name_of, size_text)

    items = index if isinstance(index, tuple) else (index,)
    if not items:
        return "()"
    return ", ".join(map(text, items))


def step_source(
    steps: TimeSteps, size_text: SizeText = to_python, taken: Iterable[str] = ()
) -> StepFunction:
    """The function that runs steps, with no variable of a name in ``taken`` or that it imports."""
    imported = names_bound(imports_of_steps(steps)) | {"F", "math"}
    return step_function(
        steps, lambda op, name_of: call_source(op, name_of, size_text), {*imported, *taken}
    )


def imports_of_steps(steps: TimeSteps) -> set[str]:
    """The import statements that the operators of steps need."""
    return {"import torch"}.union(*map(imports_of, steps.ops))


def imports_of(op: IROp) -> set[str]:
    """The import statements that the call's source needs. Steps are a function, whose definition is
    among the statements.
    """
    if isinstance(steps := op.arg("steps"), TimeSteps):
        return {*imports_of_steps(steps), step_source(steps).source(function_name(steps))}
    if isinstance(steps, Source):  # the function stands in the file
        return set()
    statements: set[str] = set()
    opdef = registry.get(op.target)
    code = op.target if opdef is None else _code(opdef, op)
    if opdef is not None and opdef.imports is not None:
        statements.update(opdef.imports)
    # By where the call's function comes from: the tables, the runtime, the user's module, torch.
    elif _is_runtime_function(code):
        module, _, function = code.rpartition(".")
        statements.add(f"from {module} import {function}")
    elif opdef is None:
        statements.add(f"import {_module_of(code)}")
    elif code[0].isalpha():
        statements.add(_SHORT_MODULES[code.partition(".")[0]])
    for _, arg in op.args:
        if type(arg) not in _NEED_NO_IMPORT:
            for leaf in leaves(arg):
                statements |= imports_of_literal(leaf)
    return statements


_NEED_NO_IMPORT = frozenset((IRValue, bool, int, float, str, type(None)))
"""The types of most arguments."""


def imports_of_literal(arg: Any) -> set[str]:
    """The import statements that the source of a constant needs."""
    if isinstance(arg, _TORCH_LITERALS | torch.device):
        return {"import torch"}
    if isinstance(arg, sympy.Basic):  # a size: ``math.sqrt(seq)``
        return {"import math"} if "math." in to_python(arg) else set()
    return {f"import {type(arg).__module__}"} if isinstance(arg, Enum) else set()


def names_bound(statements: Iterable[str]) -> set[str]:
    """The names under which generated code reads what it imports; for ``import a.b.c`` the last
    part, too.
    """
    words = (re.split(r"[ .]", statement) for statement in set(statements))
    return {name for found in words for name in (found[1], found[-1])}


def _code(opdef: OpDef, op: IROp) -> str:
    """How this call is written: an operator sign has a function for calls with options."""
    return (
        opdef.code
        if not opdef.is_sign or opdef.fits_sign([name for name, _ in op.args])
        else opdef.function_code
    )


def _is_runtime_function(code: str) -> bool:
    return code.startswith("shardwright.runtime.")


@functools.cache
def _module_of(path: str) -> str:
    """The longest part of an import path that is a module."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return ".".join(parts[:length])
    raise InternalError(f"{path} is not an import path")
