"""How long an operator takes on the rank that has the most to do, by a roofline over its local
shapes.

The time is that of the arithmetic or of the memory traffic, whichever is longer, and never less
than one launch. On a device that waits for its host (a CPU) the host's time is added, and products
fetch what they need before they compute (``Device``). What counts:

- **products** (linear layers, matrix products, einsum, convolutions, attention, recurrent layers):
  ``2 m n k`` operations at the rate the device reaches at that size. The backward is one product
  for each operand that needs a gradient; flash attention computes its scores again, five products
  for the forward's two. A causal kernel skips half.
- **lookups** move the rows they need, not the table; their gradients fill the table with zeros
  first.
- **tokens of experts** are gathered, added up, and copied around their messages
  (``token_copies.py``).
- **views** are free. The gradient of a slice fills what the slice left out with zeros, that of an
  expansion is summed.
- **factors** (``mul``, ``div``) have a kernel each for their gradients, and one more to sum that of
  a factor which was broadcast.
- **the gradient of a bias** is a sum over rows of what came in, by a kernel of its own.
- **sums of gradients**, where operators behind this one read the same operand too
  (``IROp.summed``), read two gradients and write one.
- **everything else** reads its operands and writes its results; the backward reads what came in and
  what was saved, and writes the gradients. :data:`PASSES` lists operators that go over their data
  more often.

Measured times of single calls replace these estimates where there are any (:class:`OperatorTimes`).

Example: a bfloat16 product of 4096 x 4096 x 4096 on a device of 100 TFLOP/s and 2 TB/s. Arithmetic
takes 2 * 4096^3 / 1e14 = 1.37 ms, traffic 3 * 4096^2 * 2 / 2e12 = 0.05 ms, so the forward takes
1.37 ms. An addition of two such matrices takes the 0.05 ms of its traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.cost.local_calls import (
    LocalCall,
    local_call,
    signature,
)
from shardwright.compiler.cost.machine.hardware import Device, Hardware
from shardwright.compiler.cost.step_calls import calls_of_step
from shardwright.compiler.cost.time import token_copies
from shardwright.compiler.cost.time.arithmetic import (
    arithmetic_s,
    casts_operands,
)
from shardwright.compiler.cost.time.attention_calls import further_calls
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime
from shardwright.compiler.cost.time.inner_messages import communicates, messages_time
from shardwright.compiler.cost.time.operator_traffic import (
    EXPANSIONS,
    SLICES,
    VIEWS,
    bias_gradient_bytes,
    traffic,
    view_gradient_bytes,
)
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.time_steps import TIME_STEPS
from shardwright.compiler.ops.strategy import Assignment
from shardwright.compiler.ops.tables.stepped import steps_of
from shardwright.runtime.layout import Mesh


def op_time(
    op: IROp,
    assignment: Assignment,
    mesh: Mesh,
    hardware: Hardware,
    times: OperatorTimes | None = None,
    *,
    ranks: Sequence[int] | None = None,
) -> OpTime:
    """Seconds of one call of ``op`` on the slowest rank of ``mesh`` under the strategies of
    ``assignment``.

    ``op`` is the call as traced, with global shapes. ``ranks``: the global ranks the mesh lies on,
    in its order, for operators that communicate inside (default: the first ones).

    Raises:
        ConfigError: the hardware has no rate for the dtype of a product.
    """
    if times is None or not times.entries:
        # The cache lies on the hardware object and goes with it: no time outlives its rates.
        axes = ((axis, size, mesh.turns_of(axis)) for axis, size in mesh.axes)
        key = signature(op), tuple((*axis, assignment.get(axis[0])) for axis in axes)
        if key not in hardware.call_times:
            call = local_call(op, assignment, mesh)
            found = _estimated(call, hardware.device, communicates(call, assignment, mesh))
            found += _further(call, assignment, mesh, hardware.device)
            hardware.call_times[key] = call, found
        call, found = hardware.call_times[key]
    # Measured times are asked for by the local call, not by the strategy.
    else:
        call = local_call(op, assignment, mesh)
        found = _measured(call, assignment, mesh, hardware.device, times)
        found += _further(call, assignment, mesh, hardware.device)
    return found + messages_time(call, assignment, mesh, hardware, ranks)


def _further(call: LocalCall, assignment: Assignment, mesh: Mesh, device: Device) -> OpTime:
    """What comes beside a call, whether that was measured or not: tiles of attention, copies around
    tokens that are exchanged, sums of gradients.
    """
    return (
        further_calls(call, assignment, mesh, device)
        + token_copies.further_time(call, assignment, mesh, device)
        + _sums(call, device)
    )


def _measured(
    call: LocalCall, assignment: Assignment, mesh: Mesh, device: Device, times: OperatorTimes
) -> OpTime:
    """The time of a call as it was measured, or the estimate if it was not."""
    found = times.of(call)
    if found is None:
        return _estimated(call, device, communicates(call, assignment, mesh))
    if device.sharing is not None:  # it was measured with a core for itself
        slower = device.sharing.speed(1)
        found = OpTime(slower * found.forward_s, slower * found.backward_s)
    return found + _host(call, device)


def _estimated(call: LocalCall, device: Device, communicates: bool) -> OpTime:
    """The estimate of a call, with the host's time. The calls of all time steps run one after the
    other.
    """
    if call.op.target != TIME_STEPS:
        return roofline(call, device, communicates) + _host(call, device)
    step = OpTime()
    for inner in calls_of_step(call):
        step += roofline(inner, device) + _host(inner, device)
    count = steps_of(call.op).count
    return OpTime(count * step.forward_s, count * step.backward_s)


def _host(call: LocalCall, device: Device) -> OpTime:
    """The time that Python and autograd add to a call, on a device without a queue of launches."""
    forward_s, backward_s = device.host_s
    return OpTime(forward_s, backward_s if call.differentiated else 0.0)


def _sums(call: LocalCall, device: Device) -> OpTime:
    """The time in which gradients of the call are added to those that its operands have already."""
    wanted = call.differentiated
    sums = [call.operands[i].num_bytes for i in call.op.summed if i in wanted]
    # Both gradients are read, and the sum is written.
    return OpTime(0.0, sum(_at_least(device.memory_s(3 * n), device, True) for n in sums))


def optimizer_s(
    parameter_bytes: float, state_bytes: float, hardware: Hardware, *, fused: bool = False
) -> float:
    """Seconds of an optimizer's step over ``parameter_bytes`` of parameters with ``state_bytes`` of
    state on this rank.

    A fused step goes over parameter and state twice (read, write), and over the gradient once.
    Torch's unfused form takes :data:`UNFUSED` times that.
    """
    passes = 1.0 if fused else UNFUSED
    return passes * (3 * parameter_bytes + 2 * state_bytes) / hardware.device.bytes_per_s


UNFUSED = 2.5
"""How much more memory torch's optimizers move than a fused one, as they run one operator after the
other.
"""


# ------------------------------------------------------------------------------------------------
# the roofline


def roofline(call: LocalCall, device: Device, communicates: bool = False) -> OpTime:
    """Seconds of a call by itself. ``communicates``: it is a parallel form that communicates
    inside.
    """
    target = call.op.target
    if target in VIEWS:
        return OpTime()
    wanted = call.differentiated
    if target in SLICES or target in EXPANSIONS:
        return OpTime(
            0.0,
            _at_least(device.memory_s(view_gradient_bytes(call, wanted)), device, bool(wanted)),
        )
    has_queue = not any(device.host_s)
    forward_bytes, backward_bytes = traffic(call, wanted, communicates, has_queue)
    forward_flops_s, backward_flops_s = arithmetic_s(call, wanted, device)
    if casts_operands(call, device):
        # The backward casts the gradient, and reads what the forward has cast.
        casts = (*call.operands[:2], call.results[0])
        input_bytes, weight_bytes, gradient_bytes = (
            num_bytes * tensor.num_elements
            for num_bytes, tensor in zip(device.linear_cast_bytes, casts, strict=True)
        )
        forward_flops_s += device.memory_s(input_bytes + weight_bytes)
        if wanted:
            backward_flops_s += device.memory_s(gradient_bytes)
    # Without a queue that prefetches, a product waits for its operands before it computes.
    if forward_flops_s:
        forward_flops_s += device.fetch_s(forward_bytes)
    if backward_flops_s:
        backward_flops_s += device.fetch_s(backward_bytes)
    # Williams et al., "Roofline": the slower of computing and moving, at least a launch.
    forward = max(forward_flops_s, device.pass_s(target, forward_bytes, 0), device.launch_s)
    backward = max(backward_flops_s, device.pass_s(target, backward_bytes, 1))
    backward = _at_least(backward, device, bool(wanted) and backward_bytes > 0)
    bias_bytes = bias_gradient_bytes(call, wanted)
    return OpTime(
        forward, backward + _at_least(device.memory_s(bias_bytes), device, bias_bytes > 0)
    )


def _at_least(seconds: float, device: Device, runs: bool) -> float:
    return max(seconds, device.launch_s) if runs else 0.0


# ------------------------------------------------------------------------------------------------
# communication inside
