"""The time of a backward in two parts, as ``runtime.pipeline.backward`` runs it.

A value is *inner* if it depends on an input of the stage whose gradient goes on to another rank.
The first part computes the gradients of inner operands. An operator that has other operands too (a
weight) runs once more in the second part, for these. Everything else waits for the second part. In
the first stage of a pipeline, whose inputs take no gradient, that is everything.

Example: a linear layer of 2 ms backward. Its input's gradient takes 1 ms in the first part, its
weight's gradient 1 ms in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.backward_parts import parts_of_operator
from shardwright.compiler.cost.time.body_time import BodyTime
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.plan.program import Compute, Instruction, Program
from shardwright.compiler.plan.repeated_blocks import reads, writes

PartsOf = Callable[[Compute, OpTime, frozenset[int]], tuple[float, float]]
"""A function ``(operator, its time, its inner operands by number)`` that gives the seconds of the
gradients of the inner operands, and of the others.
"""


def parts_of_backward(
    program: Program, body: BodyTime, inputs: Collection[str], device: Device, added_s: float = 0.0
) -> tuple[float, float]:
    """Seconds of the input gradients of one microbatch, and of the weight gradients.

    ``body``: the times of ``program``. ``inputs``: the names of values whose gradients go on.
    ``added_s``: seconds of adding to the gradients of parameters. A backward that recomputes is not
    split: all of it is in the first part.
    """
    if body.recomputes:
        return body.backward_s + added_s, 0.0
    # Weights are gathered again for the gradients of what they were multiplied with, so that time
    # belongs to the first part, if there is one. It is priced as if none of them was begun ahead:
    # the products of the first part are half of what would hide it.
    gathered_s = body.recomputed_s + body.ahead_s
    input_s, weight_s = (gathered_s, added_s) if inputs else (0.0, added_s + gathered_s)

    def parts(instruction: Compute, time: OpTime, inside: frozenset[int]) -> tuple[float, float]:
        return parts_of_operator(instruction, time, inside, program.plan.mesh, device)

    for first_s, second_s in parts_of_instructions(body.instructions, inputs, parts):
        input_s += first_s
        weight_s += second_s
    return input_s, weight_s


def parts_of_instructions(
    instructions: Iterable[tuple[Instruction, OpTime]], inputs: Iterable[str], parts: PartsOf
) -> Iterator[tuple[float, float]]:
    """The two parts of each instruction's backward."""
    inner = set(inputs)
    for instruction, time in instructions:
        if inner.isdisjoint(value.name for value in reads(instruction)):
            yield 0.0, time.backward_s
            continue
        inner.update(value.name for value in writes(instruction) if value.takes_gradient)
        if not isinstance(instruction, Compute):
            yield time.backward_s, 0.0  # all its gradients come at once
        else:
            inside = frozenset(
                i for i, value in enumerate(instruction.op.operands) if value.name in inner
            )
            yield parts(instruction, time, inside)
