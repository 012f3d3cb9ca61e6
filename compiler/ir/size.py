"""Sizes known while compiling: an ``int``, or a sympy expression over the names of dynamic input dims."""

from __future__ import annotations

import math
from collections.abc import Iterable

import sympy

Size = int | sympy.Expr


def symbol(name: str) -> sympy.Symbol:
    """The size of a dynamic input dim: a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)


def simplify(size: Size) -> Size:
    """An ``int`` where the expression is a number."""
    return int(size) if getattr(size, "is_Integer", False) else size


def product(sizes: Iterable[Size]) -> Size:
    return simplify(math.prod(sizes))


def is_static(size: Size) -> bool:
    return isinstance(size, int)


def divides(divisor: Size, size: Size) -> bool:
    """Whether ``size`` is a multiple of ``divisor`` for every value of its symbols, as far as can be told."""
    if isinstance(divisor, int) and isinstance(size, int):
        return divisor != 0 and size % divisor == 0
    quotient = sympy.cancel(sympy.sympify(size) / sympy.sympify(divisor))
    return bool(quotient.is_polynomial(*quotient.free_symbols)) and bool(quotient.is_integer)


def quotient(size: Size, divisor: Size) -> Size:
    """``size / divisor``, which must divide."""
    if isinstance(divisor, int) and isinstance(size, int):
        return size // divisor
    return simplify(sympy.cancel(sympy.sympify(size) / sympy.sympify(divisor)))
