"""The backward of one operator in two parts: the gradients of some operands, and of the others.

Example: a linear layer of 2 ms backward. Its input's gradient takes 1 ms, its weight's 1 ms.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwright.compiler.cost.local_calls import LocalCall, local_call
from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.operator_time import roofline
from shardwright.compiler.plan.program import Compute
from shardwright.runtime.layout import Mesh


def parts_of_operator(
    instruction: Compute, time: OpTime, inside: Collection[int], mesh: Mesh, device: Device
) -> tuple[float, float]:
    """Seconds of the gradients of an inner operator's inner operands (``inside``), and of those of
    its other operands.
    """
    call = local_call(instruction.original, instruction.assignment, mesh)
    outside = set(call.differentiated) - set(inside)
    if not outside:
        return time.backward_s, 0.0
    # The time may be a measured one. The roofline says only in which ratio it is split; both parts
    # pay the host.
    alone_s = roofline(call, device).backward_s
    host_s = min(device.host_s[1], time.backward_s)
    shares = [
        roofline(_wanting(call, wanted), device).backward_s / alone_s if alone_s else 0.0
        for wanted in (inside, outside)
    ]
    first_s, second_s = (share * (time.backward_s - host_s) + host_s for share in shares)
    return first_s, second_s


def _wanting(call: LocalCall, wanted: Collection[int]) -> LocalCall:
    """The call if only these operands took a gradient."""
    operands = tuple(
        replace(x, requires_grad=x.requires_grad and i in wanted)
        for i, x in enumerate(call.operands)
    )
    return replace(call, operands=operands)
