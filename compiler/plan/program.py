"""The program of one stage: the operators and adapters its ranks execute, in order.

One program serves all ranks of the stage: what differs between them are expressions over their axis
groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from shardwright.compiler.ir.graph import IRGraph, Tree
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.strategy import Assignment
from shardwright.compiler.plan.conversion import AdapterStep
from shardwright.compiler.plan.plan import AGAIN, Plan
from shardwright.runtime.layout import Layout


@dataclass(frozen=True)
class Compute:
    """An operator on local tensors.

    ``op``: the local call, whose operands are the adapted values. ``original``: the operator as
    traced. ``layouts``: those of its results. ``meanwhile``: how many of the instructions behind it
    run while its message is under way (``passes/meanwhile.py``).
    """

    op: IROp
    original: IROp
    assignment: Assignment
    layouts: tuple[Layout, ...]
    meanwhile: int = 0


@dataclass(frozen=True)
class Adapt:
    """One adapter step: ``result`` is ``value`` in another layout. Both are versions of the traced
    value ``of``. ``choice``: what the plan says of its gathers (:attr:`Plan.gathers`). ``joins``:
    it gathers a value in one collective with the gather right before it. ``in_loop``: it runs once
    for every piece of a loop. ``beside``: weights whose gradients are computed while its backward
    communicates (``passes/start_early.py``). ``meanwhile``: as in :class:`Compute`.
    """

    value: IRValue
    result: IRValue
    of: IRValue
    step: AdapterStep
    region: str | None = None
    module_path: str = ""
    choice: str | None = None
    joins: bool = False
    in_loop: bool = False
    beside: tuple[IRValue, ...] = ()
    meanwhile: int = 0

    @property
    def gathers_weight(self) -> bool:
        """Whether the step makes a parameter whole that is stored in pieces. What a loop gathers is
        a piece, which no other step holds.
        """
        is_parameter = self.of.kind is ValueKind.PARAMETER
        return self.step.kind == "all_gather" and is_parameter and not self.in_loop

    @property
    def gathers_again(self) -> bool:
        """Whether what the step makes whole is held for its uses only, and gathered again for the
        backward of an operator that keeps it. A weight is unless the plan has it kept
        (:attr:`Plan.gathers`), an activation if the plan says so.
        """
        again = self.gathers_weight if self.choice is None else self.choice == AGAIN
        return again and self.step.kind == "all_gather"


@dataclass(frozen=True)
class Loop:
    """Instructions that run in ``count`` pieces, one after the other. In backward each piece runs
    again, so that none of its values is ever whole.

    The loop is an axis called ``axis``, of time and without ranks. Along it ``takes`` turn values
    from outside into those of a piece: R into S, or into G where pieces share a value and their
    gradients are summed, or into P where a value is added once. ``gives`` turn values of a piece
    into those outside: S into R, or P into R. In between, no layout changes along the axis.
    ``late``: the names of results that training steps leave out.
    """

    axis: str
    count: int
    takes: tuple[Adapt, ...]
    body: tuple[Compute | Adapt, ...]
    gives: tuple[Adapt, ...]
    late: frozenset[str] = frozenset()

    @functools.cached_property
    def operands(self) -> tuple[IRValue, ...]:
        """The values that it reads, in the order of their first use."""
        made = {take.result.name for take in self.takes}
        found = {take.value.name: take.value for take in self.takes}
        for step in self.body:
            values, results = (
                ((step.value,), (step.result,))
                if isinstance(step, Adapt)
                else (step.op.operands, step.op.results)
            )
            # What the body makes itself is no operand.
            found |= {v.name: v for v in values if v.name not in made | found.keys()}
            made |= {result.name for result in results}
        return tuple(found.values())

    @functools.cached_property
    def ahead(self) -> Mapping[str, Adapt]:
        """The gathers that travel while the piece before theirs is computed, by the name of what
        the loop takes and they gather. They do not depend on which piece it is.
        """
        readers: dict[str, list[Step]] = {}
        for step in self.body:
            for value in (step.value,) if isinstance(step, Adapt) else step.op.operands:
                readers.setdefault(value.name, []).append(step)
        found = {}
        for take in self.takes:
            name = take.result.name
            step, *others = readers.get(name, [take])
            if others or not isinstance(step, Adapt) or step.step.kind != "all_gather":
                continue
            if not _speaks_of(step.step, self.axis):
                found[name] = step
        return found

    @property
    def results(self) -> tuple[IRValue, ...]:
        """The values that it makes."""
        return tuple(give.result for give in self.gives)

    @property
    def calls(self) -> tuple[Compute, ...]:
        """Its operators."""
        return tuple(step for step in self.body if isinstance(step, Compute))

    @property
    def region(self) -> str | None:
        """The recompute region that it stands in."""
        return self.calls[0].op.region

    @property
    def module_path(self) -> str:
        """The path of the innermost module that all of its operators belong to."""
        paths = [call.original.module_path.split(".") for call in self.calls]
        # Level by level from the root: the names that all paths have in common.
        shared = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
        return ".".join(names[0] for names in shared)


Step = Compute | Adapt


def _speaks_of(step: AdapterStep, axis: str) -> bool:
    """Whether the sizes of a gather differ along an axis. Of even pieces, end to end, none need be
    told.
    """
    cut = step.cut
    assert cut is not None
    names = {str(name) for size in cut.sizes for name in getattr(size, "free_symbols", ())}
    return axis in names


Instruction = Step | Loop


def steps(instructions: Iterable[Instruction]) -> Iterator[Step]:
    """Operators and adapters, those of loops among them; without what loops take and give."""
    for instruction in instructions:
        if isinstance(instruction, Loop):
            yield from instruction.body
        else:
            yield instruction


def joins(item: object) -> bool:
    """Whether this part of a program goes in one collective with the part before it."""
    return isinstance(item, Adapt) and item.joins


def gathers_at(items: Sequence[object], position: int) -> tuple[Adapt, ...]:
    """The gathers that go in one collective, of which the item at ``position`` is the first."""
    found = [items[position], *takewhile(joins, islice(items, position + 1, None))]
    return tuple(item for item in found if isinstance(item, Adapt))


@dataclass(frozen=True)
class Declaration:
    """A parameter, buffer or constant as the rank holds it."""

    value: IRValue
    layout: Layout


@dataclass(frozen=True)
class Program:
    """What the ranks of one stage execute.

    - ``declarations``: the tensors that a rank holds, and ``input_layouts`` the layouts of the
      inputs, by name of the value.
    - ``body``: the instructions in order.
    - ``output``: the structure of the result, over the program's values.
    - ``buffer_updates``: pairs of a buffer and its new value.
    - ``eval_program``: the program of evaluation, if the model runs other operators there.

    Outputs may be left out of training steps. Then ``output`` has :class:`LeftOut` in their places,
    ``tail`` makes them after the body, and ``whole_output`` is the result with all of them. A step
    of training runs the body alone.
    """

    graph: IRGraph
    plan: Plan
    declarations: tuple[Declaration, ...]
    input_layouts: dict[str, Layout]
    body: tuple[Instruction, ...]
    output: Tree
    buffer_updates: tuple[tuple[IRValue, IRValue], ...] = ()
    eval_program: Program | None = None
    tail: tuple[Instruction, ...] = ()
    whole_output: Tree | None = None

    @functools.cached_property
    def known(self) -> dict[Callable[[Program], Any], Any]:
        """What functions have answered that are asked again and again: programs are immutable."""
        return {}

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The body and the tail."""
        return (*self.body, *self.tail)

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The operators and adapters of the body, those of loops among them."""
        return tuple(steps(self.body))

    def results(self) -> list[IRValue]:
        """The values that a call returns, in training or else."""
        trees = [self.output] if self.whole_output is None else [self.output, self.whole_output]
        return [value for tree in trees for _, value in tree.leaves() if isinstance(value, IRValue)]

    def adapters(self) -> list[Adapt]:
        """The adapters among the instructions, in order, those inside of loops included."""
        return [step for step in steps(self.instructions) if isinstance(step, Adapt)]

    @functools.cached_property
    def joined_axes(self) -> tuple[tuple[str, ...], ...]:
        """The sets of several axes that one adapter goes over, in the order of the program, that of
        evaluation included.
        """
        found = [adapter.step.axes for adapter in self.adapters() if len(adapter.step.axes) > 1]
        found += self.eval_program.joined_axes if self.eval_program is not None else ()
        return tuple(dict.fromkeys(found))

    def layout_of(self, fqn: str) -> Layout:
        """The stored layout of a parameter or buffer."""
        return next(d.layout for d in self.declarations if d.value.fqn == fqn)
