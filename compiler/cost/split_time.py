"""The time of a backward in two parts, as ``runtime.pipeline.backward`` runs it.

What depends on an input of the stage whose gradient goes on to another rank is *inner*. The first part computes the gradients
of inner operands; an operator that has others too (a weight) runs once more in the second part, for these. Everything else
waits for the second part: in the first stage of a pipeline, whose inputs take no gradient, that is all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwright.compiler.cost.body_time import BodyTime
from shardwright.compiler.cost.device import Device
from shardwright.compiler.cost.local import LocalCall, local_call
from shardwright.compiler.cost.operators import OpTime, roofline
from shardwright.compiler.plan.blocks import reads, writes
from shardwright.compiler.plan.program import Adapt, Compute, Program


def parts_of_backward(
    program: Program, body: BodyTime, inputs: Collection[str], device: Device, added_s: float = 0.0
) -> tuple[float, float]:
    """Seconds of the input gradients of one microbatch, and of the weight gradients.

    ``body``: the times of ``program``. ``inputs``: the names of values whose gradients go on. ``added_s``: of adding to the
    gradients of parameters. A backward that recomputes is not split: all of it is in the first part.
    """
    if body.recomputes:
        return body.backward_s + added_s, 0.0
    inner = set(inputs)
    gathered_s = body.recomputed_s  # weights, for the gradients of what they were multiplied with
    input_s, weight_s = (gathered_s, added_s) if inner else (0.0, added_s + gathered_s)
    for instruction, time in body.instructions:
        if inner.isdisjoint(value.name for value in reads(instruction)):
            weight_s += time.backward_s
            continue
        inner.update(value.name for value in writes(instruction) if value.requires_grad)
        if isinstance(instruction, Adapt):
            input_s += time.backward_s
        else:
            first_s, second_s = _parts(instruction, time, inner, program, device)
            input_s += first_s
            weight_s += second_s
    return input_s, weight_s


def _parts(instruction: Compute, time: OpTime, inner: Collection[str], program: Program, device: Device) -> tuple[float, float]:
    """Of an inner operator: the gradients of its inner operands, and of the others."""
    call = local_call(instruction.original, instruction.assignment, program.plan.mesh)
    inside = {index for index, value in enumerate(instruction.op.operands) if value.name in inner}
    outside = set(call.differentiated) - inside
    if not outside:
        return time.backward_s, 0.0
    alone_s = roofline(call, device).backward_s
    host_s = min(device.host_s[1], time.backward_s)
    shares = [roofline(_wanting(call, wanted), device).backward_s / alone_s if alone_s else 0.0 for wanted in (inside, outside)]
    first_s, second_s = (share * (time.backward_s - host_s) + host_s for share in shares)
    return first_s, second_s


def _wanting(call: LocalCall, wanted: Collection[int]) -> LocalCall:
    """The call if only these operands took a gradient."""
    operands = tuple(replace(x, requires_grad=x.requires_grad and i in wanted) for i, x in enumerate(call.operands))
    return replace(call, operands=operands)
