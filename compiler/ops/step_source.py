"""The function that runs the steps of an operator ``time_steps``, as Python source:

def time_steps(h, x):
    h_steps = []
    for t in range(512):
        x_t = x[:, t]
        add = x_t + h
        h = torch.tanh(add)
        h_steps.append(h)
    return torch.stack(h_steps, 1)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import sympy

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.time_steps import TimeSteps
from shardwright.compiler.ir.value import IRValue

Written = Callable[[IROp, Callable[[IRValue], str]], str]
"""Writes the call of an operator, from the names of values."""


@dataclass(frozen=True)
class StepFunction:
    """The parts of the function. ``body``: the statements of one step, each with the operator that
    it is the call of, ``None`` for those that keep what a step made.
    """

    parameters: tuple[str, ...]
    before: tuple[str, ...]
    loop: str
    body: tuple[tuple[str, IROp | None], ...]
    returned: str

    def source(self, name: str) -> str:
        """The whole function, not formatted."""
        lines = [
            f"def {name}({', '.join(self.parameters)}):",
            *(f"    {line}" for line in self.before),
            f"    {self.loop}:",
            *(f"        {line}" for line, _ in self.body),
            f"    return {self.returned}",
        ]
        return "\n".join(lines)


def step_function(steps: TimeSteps, write: Written, taken: Collection[str] = ()) -> StepFunction:
    """The function of ``steps``. No variable of it has one of the names ``taken``."""
    names = _Names({"t", "self", "range", "torch", *taken, *_axes(steps)})
    last_read = _last_reads(steps)
    for value in steps.inputs:
        names.define(value, value.name)
    parameters = tuple(names.of(value) for value in steps.inputs)
    next_of = {value.name: number for number, value in enumerate(steps.carried)}
    # The list of each stacked value.
    lists = [names.unused(f"{made.value.name}_steps") for made in steps.stacked]
    body: list[tuple[str, IROp | None]] = []
    for position, op in enumerate(steps.ops):
        call = write(op, names.of)
        for value in op.results:
            number = next_of.get(value.name)
            carried = None if number is None else steps.inputs[number]
            # ``h = torch.tanh(h + x_t)``: the new value may take the name of the old one once
            # nothing reads that any more.
            if (
                carried is not None
                and steps.carried.count(value) == 1
                and last_read.get(carried.name, -1) <= position
            ):
                names.again(value, names.of(carried))
            else:
                names.define(value, value.name)
        body.append((f"{', '.join(map(names.of, op.results))} = {call}", op))
    for made, kept in zip(steps.stacked, lists, strict=True):
        body.append((f"{kept}.append({names.of(made.value)})", None))
    pairs = [
        (names.of(old), names.of(new))
        for old, new in zip(steps.inputs, steps.carried, strict=False)
        if names.of(old) != names.of(new)
    ]
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        body.append((f"{', '.join(targets)} = {', '.join(sources)}", None))
    words = [
        f"torch.{'stack' if made.is_new else 'cat'}({kept}, {made.dim})"
        for made, kept in zip(steps.stacked, lists, strict=True)
    ]
    words += [names.of(value) for value in steps.last]
    return StepFunction(
        parameters,
        tuple(f"{kept} = []" for kept in lists),
        f"for t in range({steps.count})",
        tuple(body),
        ", ".join(words),
    )


def function_name(steps: TimeSteps) -> str:
    """A name that no other steps have, where a call is written outside of a generated file."""
    return f"time_steps_{hashlib.sha256(steps.text.encode()).hexdigest()[:16]}"


def _last_reads(steps: TimeSteps) -> dict[str, int]:
    """The position of the last operator that reads each value; behind all of them for what is
    kept, or is the next value of something.
    """
    last = {value.name: position for position, op in enumerate(steps.ops) for value in op.operands}
    kept = (*steps.carried, *steps.last, *(made.value for made in steps.stacked))
    return last | {value.name: len(steps.ops) for value in kept}


def _axes(steps: TimeSteps) -> set[str]:
    """The names of axes and of dynamic sizes in the arguments of operators."""
    found: set[str] = set()
    for leaf in steps.literals():
        if isinstance(leaf, sympy.Basic):
            found |= {str(symbol) for symbol in leaf.free_symbols}
    return found


class _Names:
    """The variables of the function, by the names of values."""

    def __init__(self, taken: set[str]) -> None:
        self._taken, self._names = set(taken), dict[str, str]()

    def unused(self, wish: str) -> str:
        name, count = wish, 0
        while name in self._taken:
            count += 1
            name = f"{wish}_{count}"
        self._taken.add(name)
        return name

    def define(self, value: IRValue, wish: str) -> None:
        self._names[value.name] = self.unused(wish)

    def again(self, value: IRValue, name: str) -> None:
        self._names[value.name] = name

    def of(self, value: Any) -> str:
        return self._names[value.name]
