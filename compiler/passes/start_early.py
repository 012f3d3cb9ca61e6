"""Compute while messages are under way: ``ComputeConfig(overlap_communication=True)``.

Two things are put beside messages. What a layer computes beside its experts goes behind the
messages of their tokens (``meanwhile.py``). The other one is here.

Where tensor-parallel layers read a value as G, backward sums its gradient over the ranks.
Everything in front of the layer waits for this sum, but the gradients of the layer's own weights do
not. So the sum is started, these gradients are computed, and then the sum is waited for. The same
is done for the reduce-scatter of sequence parallelism.

Example: ``q``, ``k`` and ``v`` read ``x_tp_in``. The program

    x_tp_in = grad_all_reduce(x, tp)
    q = linear(x_tp_in, q_weight)
    k = linear(x_tp_in, k_weight)

becomes

    x_tp_in = grad_all_reduce(x, tp)  beside q_weight, k_weight
    q = linear_beside(x_tp_in, q_weight)
    k = linear_beside(x_tp_in, k_weight)

No number changes: the products are the same, and none is added to another in a new order. A weight
that several operators read is left alone, and so is one that is gathered for a moment only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from shardwright.compiler.cost.time.operator_traffic import VIEWS
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.passes.meanwhile import with_work_behind_messages
from shardwright.compiler.passes.proved_schedule import schedule_of
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program
from shardwright.compiler.plan.repeated_blocks import reads, region_of
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.schedule_actions import ActionKind

Form = TypeVar("Form", Program, PipelineProgram)

OPS = "shardwright.runtime.ops"

BESIDE = {"linear": f"{OPS}.linear_beside", "addmm": f"{OPS}.addmm_beside"}
"""The products that can leave the gradient of their weight to an adapter, and how they are then
called.
"""

_FACTORS = {"linear": ("input", "weight"), "addmm": ("mat1", "mat2")}
"""The arguments of these products: what comes in, and the weight."""

SUMS = (("grad_all_reduce", None), ("all_gather", "reduce_scatter"))
"""The adapters whose backward sums a gradient over ranks, with their backwards."""

_MOST_VIEWS = 3
"""How many views there may be between an adapter and a product. The runtime looks as far."""


@dataclass(frozen=True)
class Overlap:
    """The pass: see the top of the file."""

    config: ComputeConfig
    name = "overlap"

    def __call__(self, program: Form) -> Form:
        """The program with products beside sums, or itself without any.

        Raises :class:`PlanError` for a schedule that puts off the gradients of weights by itself.
        """
        if not self.config.overlap_communication:
            return program
        if isinstance(program, Program):
            return with_work_behind_messages(_beside(program))
        schedule = schedule_of(program)
        if any(a.kind is ActionKind.WEIGHT_GRADIENT for row in schedule.actions for a in row):
            raise PlanError(
                f"overlap_communication does not go with the schedule {program.plan.schedule!r}",
                why="the schedule computes gradients of weights in actions of their own, apart "
                "from the backward in which messages are under way",
                hint="leave out overlap_communication, or take another schedule, such as 1f1b",
            )
        stages = tuple(with_work_behind_messages(_beside(p)) for p in program.programs)
        return program if stages == program.programs else replace(program, programs=stages)


def _beside(program: Program) -> Program:
    """One program with products beside the sums of its body."""
    readers = _Readers(program)
    weights: dict[int, list[IRValue]] = {}
    products: set[int] = set()
    for instruction in program.body:
        if not isinstance(instruction, Adapt) or not _sums(instruction):
            continue
        for product in readers.products_of(instruction):
            weight = product.op.arg(_FACTORS[product.op.target][1])
            weights.setdefault(id(instruction), []).append(weight)
            products.add(id(product))
    if not products:
        return program

    def rewritten(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Adapt) and id(instruction) in weights:
            return replace(instruction, beside=tuple(weights[id(instruction)]))
        if isinstance(instruction, Compute) and id(instruction) in products:
            op = instruction.op
            return replace(instruction, op=op.retarget(BESIDE[op.target]))
        return instruction

    return replace(program, body=tuple(map(rewritten, program.body)))


def _sums(adapter: Adapt) -> bool:
    """Whether the backward of an adapter sums the gradient of an activation over ranks."""
    step = adapter.step
    is_sum = (step.kind, step.backward) in SUMS
    held_on = not (adapter.gathers_weight or adapter.gathers_again)
    return is_sum and held_on and adapter.value.takes_gradient


class _Readers:
    """Who reads what in a program."""

    def __init__(self, program: Program) -> None:
        self._by_name: dict[str, list[Instruction]] = {}
        for instruction in program.body:
            for value in reads(instruction):
                self._by_name.setdefault(value.name, []).append(instruction)
        everything = [*program.body, *program.tail]
        self._counts = Counter(value.name for i in everything for value in reads(i))
        self._counts.update(value.name for value in program.results())

    def products_of(self, adapter: Adapt) -> Iterator[Compute]:
        """The products that read what an adapter makes, or a view of it, with a weight of their
        own.
        """
        names = [adapter.result.name]
        for _ in range(_MOST_VIEWS + 1):
            below = []
            for reader in (reader for name in names for reader in self._by_name.get(name, ())):
                # What is computed again in backward stays with its like.
                if not isinstance(reader, Compute) or region_of(reader) != region_of(adapter):
                    continue
                if self._is_product(reader, names):
                    yield reader
                elif reader.op.target in VIEWS and len(reader.op.operands) == 1:
                    below += [value.name for value in reader.op.results]
            names = below

    def _is_product(self, reader: Compute, names: list[str]) -> bool:
        op = reader.op
        if op.target not in BESIDE or not op.grad_enabled:
            return False
        coming, weight = (op.arg(name) for name in _FACTORS[op.target])
        return (
            isinstance(coming, IRValue)
            and coming.name in names
            and isinstance(weight, IRValue)
            and weight.kind is ValueKind.PARAMETER
            and weight.takes_gradient
            and self._counts[weight.name] == 1
            and not (op.has_arg("beta") or op.has_arg("alpha"))
        )
