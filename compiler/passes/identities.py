"""Leave out operators that give back what they are given: ``arange + 0``, ``cos * 1.0``, a second
``contiguous()``.

Library code is full of them: an offset that is 0 without a cache, a scaling that is 1.0 for most
models. What is left out changes neither the values, to the sign of a zero, nor the dtype, nor where
gradients flow.

``contiguous`` goes where its operand lies in the order of its dims by the operators that made it,
on every device. Nothing here trusts the strides that the trace has seen: kernels of other devices
choose others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.value import IRValue, ValueKind

_KEEPS_ORDER = frozenset(("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"))
"""Operators whose result lies in the order of its dims if their operand does: they only group
dims.
"""


def without_identities(graph: IRGraph) -> IRGraph:
    """``graph`` without operators that give back their operand; what read their results reads the
    operand.
    """
    given_back: dict[str, IRValue] = {}
    in_order: set[str] = set()
    returned = {value.name for value in graph.outputs} | {
        after.name for _, after in graph.buffer_updates
    }
    state = {before.name for before, _ in graph.buffer_updates}

    def new(arg: Arg) -> Arg:
        return given_back.get(arg.name, arg) if isinstance(arg, IRValue) else arg

    kept: list[IROp] = []
    for op in graph.ops:
        op = op.map_args(new)
        results = {value.name for value in op.results}
        if any(value.name in state for value in op.operands):
            # May share memory with a buffer, which gets its new value before others have read the
            # old one
            state |= results
        operand = _operand_given_back(op, in_order)
        if operand is not None and not results & (returned | state):
            given_back |= dict.fromkeys(results, operand)
            continue
        if _lies_in_order(op, in_order):
            in_order |= results
        kept.append(op)
    return replace(graph, ops=tuple(kept)) if given_back else graph


def _operand_given_back(op: IROp, in_order: set[str]) -> IRValue | None:
    """The operand that the result equals; ``None`` if it is something else."""
    rule = _IDENTITIES.get(op.target)
    operand = rule(op, in_order) if rule is not None and op.only_in is None else None
    # A buffer may be written to later, and whoever has a copy of it keeps the old values.
    if operand is None or operand.kind is ValueKind.BUFFER:
        return None
    (result,) = op.results
    alike = (result.dtype, result.shape, result.requires_grad) == (
        operand.dtype,
        operand.shape,
        operand.requires_grad,
    )
    return operand if alike else None


def _added(op: IROp, in_order: set[str]) -> IRValue | None:
    """``x + 0``. The sum of -0.0 and 0.0 is 0.0, so that floating numbers are only the same with
    -0.0 added.
    """
    value, number = _value_and_number(op)
    if value is None or number != 0 or op.has_arg("alpha"):
        return None
    return value if not _has_signed_zero(value) or _is_minus_zero(number) else None


def _subtracted(op: IROp, in_order: set[str]) -> IRValue | None:
    """``x - 0``."""
    value, number = _value_and_number(op)
    if value is None or value is not op.arg("input") or number != 0 or op.has_arg("alpha"):
        return None
    return value if not _is_minus_zero(number) else None


def _multiplied(op: IROp, in_order: set[str]) -> IRValue | None:
    """``x * 1``. A complex product adds products with 0, which are NaN for what is not finite."""
    value, number = _value_and_number(op)
    return value if value is not None and number == 1 and not value.dtype.is_complex else None


def _divided(op: IROp, in_order: set[str]) -> IRValue | None:
    """``x / 1``."""
    value, number = _value_and_number(op)
    is_plain = value is not None and value is op.arg("input") and not op.has_arg("rounding_mode")
    return (
        value
        if is_plain and number == 1 and value is not None and not value.dtype.is_complex
        else None
    )


def _sliced(op: IROp, in_order: set[str]) -> IRValue | None:
    """``x[:, 0:]``."""
    index = op.arg("index")
    items = index if isinstance(index, tuple) else (index,)
    return op.arg("input") if items and all(map(_is_everything, items)) else None


def _laid_in_order(op: IROp, in_order: set[str]) -> IRValue | None:
    """``x.contiguous()`` of what is contiguous."""
    value: IRValue = op.arg("input")
    return value if value.name in in_order else None


_IDENTITIES: dict[str, Callable[[IROp, set[str]], IRValue | None]] = {
    "add": _added,
    "sub": _subtracted,
    "mul": _multiplied,
    "div": _divided,
    "getitem": _sliced,
    "contiguous": _laid_in_order,
}


def _lies_in_order(op: IROp, in_order: set[str]) -> bool:
    return op.target == "contiguous" or (
        op.target in _KEEPS_ORDER and op.operands[0].name in in_order
    )


def _value_and_number(op: IROp) -> tuple[IRValue | None, int | float]:
    """The tensor and the number that an operator of two has, in whichever order."""
    pair = op.arg("input"), op.arg("other")
    values = [arg for arg in pair if isinstance(arg, IRValue)]
    numbers = [arg for arg in pair if type(arg) in (int, float)]
    return (values[0], numbers[0]) if len(values) == len(numbers) == 1 else (None, math.nan)


def _has_signed_zero(value: IRValue) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _is_minus_zero(number: int | float) -> bool:
    return isinstance(number, float) and number == 0 and math.copysign(1, number) < 0


def _is_everything(item: Arg) -> bool:
    """Whether an item of an index takes all of its dim."""
    if not isinstance(item, slice):
        return item is Ellipsis
    return item.start in (None, 0) and item.stop is None and item.step in (None, 1)
