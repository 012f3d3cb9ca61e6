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
- **views** are free. The gradient of a slice fills what the slice left out with zeros, that of an
  expansion is summed.
- **everything else** reads its operands and writes its results; the backward reads what came in and
  what was saved, and writes the gradients. :data:`PASSES` lists operators that go over their data
  more often.

Measured times of single calls replace these estimates where there are any (:class:`OperatorTimes`).

Example: a bfloat16 product of 4096 x 4096 x 4096 on a device of 100 TFLOP/s and 2 TB/s. Arithmetic
takes 2 * 4096^3 / 1e14 = 1.37 ms, traffic 3 * 4096^2 * 2 / 2e12 = 0.05 ms, so the forward takes
1.37 ms. An addition of two such matrices takes the 0.05 ms of its traffic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from shardwright.compiler.cost.communication import estimate
from shardwright.compiler.cost.local_calls import (
    LocalCall,
    LocalTensor,
    estimated_size,
    local_call,
    signature,
)
from shardwright.compiler.cost.machine.hardware import Device, Hardware
from shardwright.compiler.cost.time.arithmetic import (
    ATTENTION,
    CONVOLUTIONS,
    PRODUCTS,
    arithmetic_s,
    factors_of,
)
from shardwright.compiler.cost.time.collectives import axes_collective_s
from shardwright.compiler.ir.op import IROp, map_leaves
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.strategy import Assignment, exchange, factor_axes, split_factor
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one forward and of its part of one backward."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s

    def __add__(self, other: OpTime) -> OpTime:
        return OpTime(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


@dataclass(frozen=True)
class OperatorTimes:
    """Measured times by :func:`call_key`: operator, local shapes, dtypes and attributes."""

    entries: Mapping[str, OpTime] = field(default_factory=dict)

    def of(self, call: LocalCall) -> OpTime | None:
        """The measured time of a call, if there is one."""
        return self.entries.get(call_key(call)) if self.entries else None

    def to_json(self) -> dict[str, list[float]]:
        return {key: [time.forward_s, time.backward_s] for key, time in self.entries.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[float]]) -> OperatorTimes:
        return cls({key: OpTime(*times) for key, times in data.items()})


def call_key(call: LocalCall) -> str:
    """The key of a measured time: ``linear [[4, 8], "float32", true] [[16, 8], "float32", true]``.

    Attributes follow the operands. Attributes that are sizes of the whole tensor are left out, and
    the shapes of the rank's results stand in their place.
    """
    operands = (
        json.dumps([list(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad])
        for x in call.operands
    )
    given = [(name, arg) for name, arg in call.op.args if not _holds_values(arg)]
    attributes = [
        f"{name}={map_leaves(arg, _in_numbers)!r}" for name, arg in given if not _is_size(name, arg)
    ]
    results = (
        ["->", *(json.dumps(list(x.shape)) for x in call.results)]
        if len(attributes) < len(given)
        else []
    )
    return " ".join([call.op.target, *operands, *attributes, *results])


def _holds_values(arg: Any) -> bool:
    return isinstance(arg, IRValue) or (isinstance(arg, tuple) and any(map(_holds_values, arg)))


def _in_numbers(leaf: Any) -> Any:
    """A leaf of an argument, with a number in the place of a dynamic size: calls of different sizes
    take different times.
    """
    if not isinstance(leaf, sympy.Expr):
        return leaf
    number = estimate(leaf)
    return int(number) if number.is_integer() else number


def _is_size(name: str, arg: Any) -> bool:
    """Whether an argument has sizes of the whole tensor, or bounds in it. They would tell apart
    calls that are alike on a rank.
    """
    return isinstance(arg, tuple) and name in SIZE_ARGUMENTS


SIZE_ARGUMENTS = frozenset(
    ("shape", "size", "sizes", "split_size_or_sections", "index", "repeats", "bounds")
)
"""The names of such arguments in the tables of operators. Strides, kernel sizes and dims are tuples
too, but time depends on them.
"""


VIEWS = frozenset(
    (
        "view",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "t",
        "movedim",
    )
    + (
        "swapaxes",
        "detach",
        "alias",
        "view_as_real",
        "view_as_complex",
        "real",
        "positive",
        "resolve_conj",
        "resolve_neg",
    )
)
"""Operators that move no data, neither forward nor backward. (A reshape of a tensor that is not
contiguous copies it once; that is left out.)
"""

SLICES = frozenset(
    (
        "getitem",
        "narrow",
        "select",
        "diagonal",
        "unfold",
        "split",
        "chunk",
        "unbind",
        "tensor_split",
        "imag",
    )
)
"""Views of parts of a tensor. Their gradients are written into a tensor of zeros."""

EXPANSIONS = frozenset(("expand", "broadcast_tensors", "meshgrid"))
"""Views that repeat elements. Their gradients are summed."""

PASSES_ON = frozenset(("add", "sub", "clone", "contiguous", "to"))
"""Operators that pass a gradient on as it came in, to an operand that was not broadcast."""

LOOKUPS = frozenset(
    ("embedding", "embedding_bag", "index_select", "gather", "take", "take_along_dim")
)
"""Operators that read rows of a table."""

_TABLE = {"embedding": 1, "embedding_bag": 1}
"""The position of the table among the operands, 0 for all others."""


PASSES: Mapping[str, tuple[float, float]] = {
    "cross_entropy": (2.0, 4.0),  # log-softmax; the gradient of the picked entries is made of zeros
    "nll_loss": (0.0, 1.0),
    "dropout": (5.0, 3.0),  # draw, scale, multiply
    "batch_norm": (3.0, 5.0),
    "group_norm": (3.0, 5.0),
    "instance_norm": (3.0, 5.0),
    "rms_norm": (3.0, 6.0),
    "softmax": (2.0, 3.0),
    "log_softmax": (2.0, 3.0),
    "logsumexp": (3.0, 4.0),
    "cumsum": (2.0, 4.0),
    "var": (2.0, 3.0),
    "std": (2.0, 3.0),
    "normalize": (4.0, 8.0),
    "cosine_similarity": (6.0, 12.0),
    "sort": (8.0, 3.0),
    "topk": (4.0, 2.0),
    "argsort": (8.0, 0.0),
}
"""How often forward and backward go over the largest tensor of the call, where reading and writing
once is too little.
"""

SPLIT_PASSES: Mapping[str, tuple[float, float]] = {
    "cross_entropy": (8.0, 4.0),
    "softmax": (8.0, 5.0),
    "log_softmax": (8.0, 5.0),
    "logsumexp": (5.0, 4.0),
    "batch_norm": (9.0, 12.0),
}
"""How often parallel forms go over it, which communicate inside: they consist of several operators.
"""

_MESSAGES: Mapping[str, tuple[float, float, float]] = {
    # (all-reduces of the forward, of the backward, elements of each relative to the reduced shape)
    "cross_entropy": (2, 0, 1.5),
    "nll_loss": (2, 0, 1.0),
    "softmax": (2, 1, 1.0),
    "log_softmax": (2, 1, 1.0),
    "logsumexp": (2, 0, 1.0),
    "batch_norm": (2, 1, 1.0),
}


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
        key = signature(op), tuple((axis, size, assignment.get(axis)) for axis, size in mesh.axes)
        if key not in hardware.call_times:
            call = local_call(op, assignment, mesh)
            found = roofline(call, hardware.device, _communicates(call, assignment, mesh)) + _host(
                call, hardware.device
            )
            hardware.call_times[key] = call, found
        call, found = hardware.call_times[key]
    else:
        call = local_call(op, assignment, mesh)
        found = _measured(call, assignment, mesh, hardware.device, times) + _host(
            call, hardware.device
        )
    return found + _messages(call, assignment, mesh, hardware, ranks)


def _measured(
    call: LocalCall, assignment: Assignment, mesh: Mesh, device: Device, times: OperatorTimes
) -> OpTime:
    """The time of a call as it was measured, or the estimate if it was not."""
    found = times.of(call)
    if found is None:
        return roofline(call, device, _communicates(call, assignment, mesh))
    if device.sharing is not None:  # it was measured with a core for itself
        slower = device.sharing.speed(1)
        return OpTime(slower * found.forward_s, slower * found.backward_s)
    return found


def _host(call: LocalCall, device: Device) -> OpTime:
    """The time that Python and autograd add to a call, on a device without a queue of launches."""
    forward_s, backward_s = device.host_s
    return OpTime(forward_s, backward_s if call.differentiated else 0.0)


def optimizer_s(parameter_bytes: float, state_bytes: float, hardware: Hardware) -> float:
    """Seconds of an optimizer's step over ``parameter_bytes`` of parameters with ``state_bytes`` of
    state on this rank.

    A fused step goes over parameter and state twice (read, write), and over the gradient once.
    Torch's unfused form takes :data:`UNFUSED` times that.
    """
    return UNFUSED * (3 * parameter_bytes + 2 * state_bytes) / hardware.device.bytes_per_s


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
            _at_least(device.memory_s(_view_gradient_bytes(call, wanted)), device, bool(wanted)),
        )
    forward_bytes, backward_bytes = _traffic(call, wanted, communicates)
    forward_flops_s, backward_flops_s = arithmetic_s(call, wanted, device)
    # Without a queue that prefetches, a product waits for its operands before it computes.
    if forward_flops_s:
        forward_flops_s += device.fetch_s(forward_bytes)
    if backward_flops_s:
        backward_flops_s += device.fetch_s(backward_bytes)
    forward = max(forward_flops_s, device.pass_s(target, forward_bytes, 0), device.launch_s)
    backward = max(backward_flops_s, device.pass_s(target, backward_bytes, 1))
    return OpTime(forward, _at_least(backward, device, bool(wanted) and backward_bytes > 0))


def call_bytes(call: LocalCall) -> tuple[float, float]:
    """Bytes that a call by itself reads and writes, forward and backward."""
    return _traffic(call, call.differentiated, communicates=False)


def _at_least(seconds: float, device: Device, runs: bool) -> float:
    return max(seconds, device.launch_s) if runs else 0.0


def _bytes(tensors: Sequence[LocalTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _view_gradient_bytes(call: LocalCall, wanted: Sequence[int]) -> float:
    return _bytes(call.results) + _bytes([call.operands[i] for i in wanted]) if wanted else 0.0


def _traffic(call: LocalCall, wanted: Sequence[int], communicates: bool) -> tuple[float, float]:
    """Bytes read and written, forward and backward."""
    target, operands, results = call.op.target, call.operands, call.results
    made = _bytes(results)
    if target in LOOKUPS and len(operands) > 1:
        # Forward reads the index and the rows it needs, and writes these. Backward reads index and
        # incoming gradient, fills the whole table with zeros, and adds rows to it.
        table = _TABLE.get(target, 0)
        index = _bytes([x for i, x in enumerate(operands) if i != table])
        return index + 2 * made, index + 3 * made + operands[table].num_bytes if wanted else 0.0
    gradients = _bytes([operands[i] for i in wanted])
    passes = (SPLIT_PASSES if communicates else PASSES).get(target)
    if passes is not None:
        largest = max((tensor.num_bytes for tensor in (*operands, *results)), default=0)
        return passes[0] * largest + made * (passes[0] == 0), passes[1] * largest * bool(wanted)
    forward = _bytes(operands) + made
    if call.op.autocast is not None and target in PRODUCTS:
        # Autocast writes a cast copy of each operand, and the product reads it.
        forward += 2 * sum(x.num_elements for x in operands) * call.op.autocast.itemsize
    if not wanted:
        return forward, 0.0
    if target in PRODUCTS or target in CONVOLUTIONS or target == ATTENTION:
        return forward, len(wanted) * made + _bytes(operands) + gradients
    if target in PASSES_ON:
        broadcast = [
            operands[i] for i in wanted if operands[i].num_elements != results[0].num_elements
        ]
        cast = gradients + made if target == "to" else 0
        return forward, sum(made + x.num_bytes for x in broadcast) + cast
    return forward, made + _bytes([operands[i] for i in _read_again(call, wanted)]) + gradients


def _read_again(call: LocalCall, wanted: Sequence[int]) -> Sequence[int]:
    """The operands that a backward reads. If the call is linear in all wanted operands together,
    their gradients do not depend on them: it reads the others only.
    """
    rule = call.op.rule
    assert rule is not None
    joint = next((found for found in rule.linear_sets if found >= set(wanted)), None)
    return [i for i in range(len(call.operands)) if joint is None or i not in joint]


# ------------------------------------------------------------------------------------------------
# communication inside


def _communicates(call: LocalCall, assignment: Assignment, mesh: Mesh) -> bool:
    return bool(_inner_axes(call.op.rule, assignment, mesh))


def _inner_axes(rule: OpRule | None, assignment: Assignment, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which the parallel form of the call reduces something."""
    if rule is None or rule.parallel is None or not rule.parallel.keywords:
        return ()
    cut = factor_axes(assignment, mesh)
    found = [
        axis
        for factor in rule.parallel.keywords
        for axis in cut.get(factor, ())
        if mesh.axis_size(axis) > 1
    ]
    return tuple(found)


def _messages(
    call: LocalCall,
    assignment: Assignment,
    mesh: Mesh,
    hardware: Hardware,
    ranks: Sequence[int] | None,
) -> OpTime:
    """What the parallel form of the call communicates."""
    target = call.op.target
    sent = _exchange(call, assignment, mesh, hardware, ranks)
    if sent is not None:
        return sent.time
    axes = _inner_axes(call.op.rule, assignment, mesh) if target in _MESSAGES else ()
    if not axes:
        return OpTime()
    on = tuple(range(mesh.size)) if ranks is None else tuple(ranks)
    forwards, backwards, share = _MESSAGES[target]
    total = OpTime()
    for axis in axes:
        num_bytes = (
            share
            * _reduced_elements(call, axis, assignment)
            * max(4, call.operands[0].dtype.itemsize)
        )
        seconds = axes_collective_s(hardware, "all_reduce", num_bytes, mesh, (axis,), on)
        total += OpTime(forwards * seconds, backwards * seconds if call.differentiated else 0.0)
    return total


@dataclass(frozen=True, slots=True)
class Exchange:
    """What an operator sends along an axis where it exchanges the cut of two dims: seconds, of
    which the time of the operator has a part, and bytes.
    """

    axis: str
    time: OpTime
    forward_bytes: float
    backward_bytes: float


def exchange_in(
    op: IROp,
    assignment: Assignment,
    mesh: Mesh,
    hardware: Hardware,
    *,
    ranks: Sequence[int] | None = None,
) -> Exchange | None:
    """What ``op`` sends under a strategy that exchanges two dims; ``None`` under any other.
    ``ranks``: as for :func:`op_time`, whose answer has these seconds.
    """
    if not any(map(exchange, assignment.values())):
        return None
    return _exchange(local_call(op, assignment, mesh), assignment, mesh, hardware, ranks)


def _exchange(
    call: LocalCall,
    assignment: Assignment,
    mesh: Mesh,
    hardware: Hardware,
    ranks: Sequence[int] | None,
) -> Exchange | None:
    on = tuple(range(mesh.size)) if ranks is None else tuple(ranks)
    for axis, strategy in assignment.items():
        if exchange(strategy) and mesh.axis_size(axis) > 1:
            return _tokens_sent(call, axis, mesh, hardware, on)
    return None


def _tokens_sent(
    call: LocalCall, axis: str, mesh: Mesh, hardware: Hardware, ranks: tuple[int, ...]
) -> Exchange:
    """Tokens that go to the ranks of their experts, or come back: each once to every rank that has
    an expert for it. Numbers and weights of the choices go with them.
    """
    rule, num_ranks = call.op.rule, mesh.axis_size(axis)
    assert rule is not None and rule.densities is not None
    there = call.op.target == "dispatch"
    density = next(d for side in rule.densities for d in side if d is not None)
    tokens, hidden = (call.operands[0] if there else call.results[0]).shape
    routing = rule.results[-1] if there else rule.operands[-1]
    (experts,) = routing[0]
    num_experts = rule.factor(experts.factor).size
    top_k = density.share * estimated_size(num_experts)
    # The part of all ranks that one token goes to, if it chooses evenly.
    asked = 1 - (1 - 1 / num_ranks) ** top_k
    rows = tokens * num_ranks * min(1.0, asked * density.imbalance) * hidden
    item = (call.operands[0] if there else call.results[0]).dtype.itemsize

    def sent_s(num_bytes: float) -> float:
        return axes_collective_s(hardware, "all_to_all", num_bytes, mesh, (axis,), ranks)

    numbers_s = numbers_bytes = 0.0
    rows_bytes = rows * item
    if there:
        counts_bytes, numbers_bytes = 16.0 * num_ranks, 8 * rows / hidden + 16 * tokens * top_k
        numbers_s = sent_s(counts_bytes) + sent_s(numbers_bytes)
        numbers_bytes += counts_bytes
    if there and len(call.operands) > 2:  # the weights of the choices go with the rows
        rows_bytes += item * tokens * top_k
    rows_s = sent_s(rows_bytes)
    backward = bool(call.differentiated)
    time = OpTime(rows_s + numbers_s, rows_s if backward else 0.0)
    return Exchange(axis, time, rows_bytes + numbers_bytes, rows_bytes if backward else 0.0)


def _reduced_elements(call: LocalCall, axis: str, assignment: Assignment) -> float:
    """The elements that one all-reduce of a parallel form sums: those of the first operand without
    its split factor; one for a loss whose rows are split; one per channel for batch norm.
    """
    rule = call.op.rule
    assert rule is not None
    factor = split_factor(assignment[axis], 0)
    assert factor is not None
    if call.op.target in ("cross_entropy", "nll_loss") and factor in factors_of(rule.operands[1]):
        return 1.0
    if call.op.target == "batch_norm":
        return float(call.operands[0].shape[1])
    return call.operands[0].num_elements / max(1, call.factors[factor])
