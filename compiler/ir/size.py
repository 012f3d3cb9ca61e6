"""Sizes known while compiling: an ``int``, or a sympy expression over the names of dynamic input
dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import sympy

from shardwright.compiler.ir.identifier import axis_variable
from shardwright.runtime.errors import TraceError

Size: TypeAlias = int | sympy.Expr


class DynamicSize(sympy.Symbol):  # type: ignore[misc]
    """The size of a dynamic input dim: a positive integer. ``example``: what it is in the dummy
    arguments.
    """

    __slots__ = ("example",)

    example: int

    def __new__(cls, name: str, example: int) -> DynamicSize:
        made: DynamicSize = sympy.Symbol.__xnew__(cls, name, positive=True, integer=True)
        made.example = example
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[str, int], dict[str, bool]]:
        return (self.name, self.example), {}

    def _hashable_content(self) -> tuple[object, ...]:
        # Two models may both call a size "batch" and mean other numbers. sympy caches expressions
        # by what is hashed, so without the example one model would get the other's.
        return (*super()._hashable_content(), self.example)


def dynamic_sizes(size: object) -> set[DynamicSize]:
    """The sizes of dynamic input dims in an expression; none in anything else."""
    return size.atoms(DynamicSize) if isinstance(size, sympy.Basic) else set()


def in_example(size: sympy.Basic) -> int | float | bool:
    """What an expression over dynamic sizes is for the sizes of the dummy arguments."""
    value = size.xreplace({name: sympy.Integer(name.example) for name in dynamic_sizes(size)})
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_Integer else float(value)


def simplify(size: Size) -> Size:
    """An ``int`` where the expression is a number."""
    return int(size) if getattr(size, "is_Integer", False) else size


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes, as simple as it gets; 1 for none."""
    return simplify(math.prod(sizes))


def is_static(size: Size) -> bool:
    """Whether the size is a number."""
    return isinstance(size, int)


def divides(divisor: Size, size: Size) -> bool:
    """Whether ``size`` is a multiple of ``divisor`` for every value of its symbols, as far as can
    be told.
    """
    if isinstance(divisor, int) and isinstance(size, int):
        return divisor != 0 and size % divisor == 0
    if divisor == 1 or divisor == size:
        return True
    # After common factors are cancelled, a symbol that is left in the denominator means that some
    # value of it does not divide. A polynomial has none, but it may have fractions (n/2).
    quotient = sympy.cancel(sympy.sympify(size) / sympy.sympify(divisor))
    return bool(quotient.is_polynomial(*quotient.free_symbols)) and bool(quotient.is_integer)


def quotient(size: Size, divisor: Size) -> Size:
    """``size / divisor``, which must divide."""
    if isinstance(divisor, int) and isinstance(size, int):
        return size // divisor
    return simplify(sympy.cancel(sympy.sympify(size) / sympy.sympify(divisor)))


class LocalSize(sympy.Function):  # type: ignore[misc]
    """``LocalSize(n, axis)``: how many of ``n`` things this rank holds when the axis cuts them
    (uneven, or ``n`` dynamic).
    """

    is_integer = True
    is_nonnegative = True


class Offset(sympy.Function):  # type: ignore[misc]
    """``Offset(n, axis)``: the index of the first of ``n`` things this rank holds when the axis
    cuts them.
    """

    is_integer = True
    is_nonnegative = True


class Holds(sympy.Function):  # type: ignore[misc]
    """``Holds(i, n, axis)``: 1 if this rank has thing ``i`` of ``n`` when the axis cuts them, else
    0.
    """

    is_integer = True
    is_nonnegative = True


class PlaceOf(sympy.Function):  # type: ignore[misc]
    """``PlaceOf(i, n, axis)``: where thing ``i`` of ``n`` is among those that this rank holds when
    the axis cuts them; no place of theirs if it is none of them.
    """

    is_integer = True


class AxisVariable(sympy.Symbol):  # type: ignore[misc]
    """A mesh axis by the variable that stands for its group in generated code."""

    __slots__ = ()


def with_axis_variables(size: Size, variables: Mapping[str, str]) -> Size:
    """The size with axes replaced by variables, for source in which their usual ones mean something
    else.
    """
    if isinstance(size, int):
        return size
    return size.xreplace(
        {sympy.Symbol(axis): AxisVariable(variable) for axis, variable in variables.items()}
    )


def _axis_text(axis: sympy.Symbol) -> str:
    return str(axis.name if isinstance(axis, AxisVariable) else axis_variable(axis.name))


def local_size(size: Size, axis: str, axis_size: int) -> Size:
    """The size of a rank's piece: a number where it is the same on all ranks."""
    if isinstance(size, int) and size % axis_size == 0:
        return size // axis_size
    return LocalSize(size, sympy.Symbol(axis))


def element_in(element: tuple[Size, ...], axes: Iterable[str]) -> tuple[Size, Size]:
    """Where ``(index, count)`` is among the things that ``axes`` leave to this rank, if it is one
    of them.
    """
    index, count = element
    for axis in axes:
        symbol = sympy.Symbol(axis)
        index, count = PlaceOf(index, count, symbol), LocalSize(count, symbol)
    return index, count


def num_held(element: tuple[Size, ...], axes: Iterable[str]) -> Size:
    """1 if this rank holds thing ``index`` of ``count`` when ``axes`` cut them, else 0."""
    *outer, axis = axes
    return Holds(*element_in(element, outer), sympy.Symbol(axis))


def offset(size: Size, axis: str) -> Size:
    """The index at which a rank's piece begins, where the axis cuts ``size`` things."""
    return Offset(size, sympy.Symbol(axis))


def to_python(size: Size) -> str:
    """The size as Python source over the names of symbols and axis groups
    (``tp.local_size(batch)``).
    """
    if isinstance(size, int):
        return str(size)
    if isinstance(size, Holds | PlaceOf):
        method = "holds" if isinstance(size, Holds) else "place_of"
        index, count = (to_python(simplify(arg)) for arg in size.args[:2])
        return f"{_axis_text(size.args[2])}.{method}({index}, {count})"
    if isinstance(size, LocalSize | Offset):
        method = "local_size" if isinstance(size, LocalSize) else "offset"
        return f"{_axis_text(size.args[1])}.{method}({to_python(simplify(size.args[0]))})"
    if size.is_Integer or size.is_Symbol:
        return str(size)
    kind = type(size).__name__
    if size.is_Float:
        return repr(float(size))
    # Simplified part by part, so that ``(b*8)/8`` is ``b`` in the file.
    parts = [to_python(simplify(part)) for part in size.args]
    if size.is_Add:
        return " + ".join(
            # ``n - 1``, not ``-1 + n``: numbers stand last in a sum.
            sorted(parts, key=lambda text: (text.lstrip("-").isdigit(), text))
        ).replace("+ -", "- ")
    if size.is_Relational:
        return f"{parts[0]} {size.rel_op} {parts[1]}"
    parts = [
        text if _is_atom(part) else f"({text})" for text, part in zip(parts, size.args, strict=True)
    ]
    if size.is_Mul:
        # sympy keeps the terms in an order that depends on hashes. Generated files must not.
        return " * ".join(sorted(parts, key=lambda text: (not text.isdigit(), text))).replace(
            "-1 * ", "-"
        )
    if size.is_Pow and size.args[1].is_Integer and size.args[1] > 0:
        return " * ".join([parts[0]] * int(size.args[1]))
    if kind in _INFIX:
        return f" {_INFIX[kind]} ".join(parts)
    function = _function_of(size)
    if function is not None:
        return f"{function}({', '.join(sorted(to_python(simplify(part)) for part in size.args))})"
    raise TraceError(
        f"a dynamic size is computed in a way that cannot be written: {size}",
        why=f"no source form of {kind} is known",
        hint="compute it with +, -, *, /, //, %, **, min, max, abs and functions of math, "
        "or leave the dim out of dynamic_dims",
    )


_INFIX = {
    "And": "and",
    "CleanDiv": "//",
    "FloatPow": "**",
    "FloatTrueDiv": "/",
    "FloorDiv": "//",
    "IntTrueDiv": "/",
    "Mod": "%",
    "Or": "or",
    "PowByNatural": "**",
    "PythonMod": "%",
}
_CALLS = {
    "Abs": "abs",
    "CeilToInt": "math.ceil",
    "FloorToInt": "math.floor",
    "Max": "max",
    "Min": "min",
    "Not": "not ",
    "RoundToInt": "round",
    "ToFloat": "float",
    "TruncToFloat": "math.trunc",
    "TruncToInt": "math.trunc",
}
_OPAQUE = "OpaqueUnaryFn_"
"""How torch calls functions of ``math`` that it knows no more of."""


def _function_of(size: sympy.Basic) -> str | None:
    """The function that an expression is a call of."""
    kind = type(size).__name__
    return f"math.{kind.removeprefix(_OPAQUE)}" if kind.startswith(_OPAQUE) else _CALLS.get(kind)


def _is_atom(size: sympy.Basic) -> bool:
    """Whether the source of ``size`` binds tightly: a name, a number or a call."""
    number = size.is_Number and not size.is_negative
    return bool(
        number
        or size.is_Symbol
        or isinstance(size, LocalSize | Offset | Holds | PlaceOf)
        or _function_of(size)
    )
