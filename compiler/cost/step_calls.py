"""The calls of one step of a loop over time steps, as the busiest rank makes them, and what such a
loop does to memory, from two short runs of it.

Time and memory of a loop grow with its steps, so no more than a few are ever run. Example: 512
steps of a cell that keeps 4 MB in each keep 2,048 MB, as loops of 4 and of 6 steps say.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.cost.local_calls import LocalCall, LocalTensor, estimated_size
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.time_steps import TIME_STEPS, TimeSteps
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import TensorRefs
from shardwright.compiler.ops.tables.stepped import step_dims, step_sizes, steps_of

SHORT = (4, 6)
"""The steps of the two short runs from which longer ones follow."""


def is_long(op: IROp) -> bool:
    """Whether an operator is a loop that is known by short runs of it."""
    return op.target == TIME_STEPS and steps_of(op).count > SHORT[1]


def shortened(op: IROp, count: int) -> IROp:
    """The loop with fewer steps, from its first one on."""
    steps = op.arg("steps")
    assert isinstance(steps, TimeSteps)
    return op.with_args(steps=replace(steps, count=count))


def extrapolated(of_short: tuple[int, int], count: int) -> int:
    """What grows evenly with the steps, for ``count`` of them, from the short runs."""
    few, more = of_short
    return max(0, round(more + (more - few) * (count - SHORT[1]) / (SHORT[1] - SHORT[0])))


def stacked_shape(op: IROp, index: int, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape of a result of a short run, or of its gradient, for ``count`` steps."""
    steps = op.arg("steps")
    assert isinstance(steps, TimeSteps)
    if index >= len(steps.stacked):
        return shape
    dim = steps.stacked[index].dim
    size = shape[dim] // steps.count * count
    return (*shape[:dim], size, *shape[dim + 1 :])


def calls_of_step(call: LocalCall) -> list[LocalCall]:
    """The calls of one step on the rank of ``call``, which is a loop."""
    dims = step_dims(call.op)
    found = []
    for op, rule, sizes in zip(
        dims.steps.in_step(0), dims.rules, step_sizes(call.op, call.factors), strict=True
    ):
        op = replace(op, rule=rule, autocast=call.op.autocast, grad_enabled=call.op.grad_enabled)

        def local(value: IRValue, refs: TensorRefs, sizes: dict[str, int] = sizes) -> LocalTensor:
            shape = []
            for size, dim in zip(value.shape, refs, strict=True):
                # A part of a factor is never cut.
                is_part = any(ref.segment is not None or ref.element is not None for ref in dim)
                length = estimated_size(size)
                if not is_part:
                    length = 1
                    for ref in dim:
                        length *= sizes[ref.factor]
                shape.append(length)
            return LocalTensor(tuple(shape), value.dtype, value.takes_gradient)

        found.append(
            LocalCall(
                op,
                tuple(map(local, op.operands, rule.operands)),
                tuple(map(local, op.results, rule.results)),
                sizes,
            )
        )
    return found
