"""How much arithmetic operators do: the matrix products that they consist of, and the seconds of
these at the rates of a device.

Example: a linear layer ``[8, 768] x [768, 3072]`` is one product of 2 * 8 * 768 * 3072 operations
forward. Its backward is one such product for the gradient of the input, one for that of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwright.compiler.cost.local_calls import LocalCall, LocalTensor, estimated_size
from shardwright.compiler.cost.machine.hardware import Device
from shardwright.compiler.cost.step_calls import calls_of_step
from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.time_steps import TIME_STEPS
from shardwright.compiler.ops.rule import ATTENTION, TensorRefs
from shardwright.compiler.ops.seen_keys import is_told_late, seen_bands
from shardwright.compiler.ops.tables.stepped import steps_of
from shardwright.runtime.visible_keys import MOST_MASKED, pairs

PRODUCTS: Mapping[str, tuple[int, int]] = {
    "linear": (0, 1),
    "matmul": (0, 1),
    "addmm": (1, 2),
    "addmv": (1, 2),
    "addr": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "einsum": (0, 1),
    "tensordot": (0, 1),
    "outer": (0, 1),
    "grouped_mm": (0, 1),
    "grouped_linear": (0, 1),
}
"""Where the two factors of a product stand among the operands."""

CONVOLUTIONS = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))

LINEAR_LOSS = "linear_cross_entropy"

RECURRENT = frozenset(
    (
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    )
)


@dataclass(frozen=True, slots=True)
class _Product:
    """``batch`` products ``[m, k] x [k, n]``."""

    m: float
    n: float
    k: float
    batch: float = 1.0

    def seconds(self, device: Device, dtype: str) -> float:
        return device.matmul_s(self.m, self.n, self.k, dtype, self.batch)

    def gradient_s(self, device: Device, dtype: str, *, left: bool) -> float:
        """Seconds of the gradient of one factor: the product ``[m, n] x [n, k]`` for the left one,
        ``[k, m] x [m, n]`` for the right one.
        """
        if left:
            return device.matmul_s(self.m, self.k, self.n, dtype, self.batch)
        return device.matmul_s(self.k, self.n, self.m, dtype, self.batch)


def may_multiply(op: IROp) -> bool:
    """Whether an operator may have products: most have none, which can be told without their
    sizes.
    """
    known = (
        op.target in (*ATTENTION, LINEAR_LOSS, TIME_STEPS)
        or op.target in RECURRENT
        or op.target in CONVOLUTIONS
        or op.target in PRODUCTS
    )
    return known or "." in op.target  # an operator of one's own


def arithmetic_s(call: LocalCall, wanted: Sequence[int], device: Device) -> tuple[float, float]:
    """Seconds of the products of a call, forward and backward; ``wanted``: the operands that need
    gradients.
    """
    target = call.op.target
    if target == TIME_STEPS:
        times = [arithmetic_s(step, step.differentiated, device) for step in calls_of_step(call)]
        count = steps_of(call.op).count
        return count * sum(time[0] for time in times), count * sum(time[1] for time in times)
    dtype = _compute_dtype(call)
    if dtype is None:
        return 0.0, 0.0
    if target in ATTENTION:
        products_s = sum(product.seconds(device, dtype) for product in _attention_products(call))
        forward, backward = device.attention_efficiency
        # Flash attention keeps no scores: its backward computes them again, five products for two.
        return products_s / forward, 2.5 * products_s / backward if wanted else 0.0
    if target in RECURRENT:
        products = [
            (product.seconds(device, dtype), index in wanted)
            for index, product in _recurrent_products(call).items()
        ]
        forward = sum(seconds for seconds, _ in products)
        if not wanted:
            return forward, 0.0
        # The gradients of inputs and states need every product once, whichever of them is wanted;
        # a weight that takes a gradient needs its product once more.
        return forward, sum(2 * seconds if trained else seconds for seconds, trained in products)
    if casts_operands(call, device):
        assert device.linear_dtype is not None
        dtype = device.linear_dtype
    if target in CONVOLUTIONS:
        product, factors = _convolution(call), (0, 1)
    elif target == LINEAR_LOSS:
        product, factors = _head(call), (0, 1)
    elif target in PRODUCTS and len(call.operands) > PRODUCTS[target][1]:
        factors = PRODUCTS[target]
        product = _matrix_product(call, *factors)
    else:
        found = _contraction(call)
        if found is None:
            return 0.0, 0.0
        product, factors = found
    left, right = (index in wanted for index in factors)
    backward = product.gradient_s(device, dtype, left=True) if left else 0.0
    backward += product.gradient_s(device, dtype, left=False) if right else 0.0
    forward_s = product.seconds(device, dtype)
    if not is_aligned(call, factors):
        forward_s /= device.unaligned_efficiency
        backward /= device.unaligned_efficiency
    chunk_rows = call.op.arg("chunk_rows") if target == LINEAR_LOSS else None
    if wanted and chunk_rows and call.operands[0].shape[0] > chunk_rows:
        backward += forward_s  # the logits of every chunk once more
    return forward_s, backward


ALIGNED_BYTES = 16
"""What kernels of matrix units read at once: the rows of their matrices are multiples of it."""


def is_aligned(call: LocalCall, factors: tuple[int, int]) -> bool:
    """Whether rows of both factors of a product, and of its result, are multiples of
    :data:`ALIGNED_BYTES`. Dtypes of more than two bytes, and convolutions, count as aligned.
    """
    dtype = call.op.autocast or call.results[0].dtype
    if dtype.itemsize > 2 or call.op.target in CONVOLUTIONS:
        return True
    rows = [call.operands[index].shape[-1:] for index in factors]
    # The logits of a loss that is one operator have a column for each row of the matrix.
    is_loss = call.op.target == LINEAR_LOSS
    rows.append(call.operands[1].shape[:1] if is_loss else call.results[0].shape[-1:])
    return not any(size * dtype.itemsize % ALIGNED_BYTES for row in rows for size in row)


def casts_operands(call: LocalCall, device: Device) -> bool:
    """Whether a call is a linear layer whose operands the device casts to a narrower dtype."""
    if device.linear_dtype is None or call.op.target != "linear":
        return False
    return all(operand.dtype.itemsize == 2 for operand in call.operands[:2])


def _compute_dtype(call: LocalCall) -> str | None:
    """The name of the dtype in which products are computed; ``None`` for a dtype without a rate,
    such as integers.
    """
    dtype = call.op.autocast or (call.results[0].dtype if call.results else None)
    if dtype is not None and not dtype.is_floating_point:
        dtype = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _matrix_product(call: LocalCall, left: int, right: int) -> _Product:
    """The product that the factors of a rule describe.

    Factors of both operands and the result are a batch. Factors of both operands alone are summed
    over. The others are rows (left operand) or columns (right operand).
    """
    rule = call.op.rule
    assert rule is not None
    a, b, c = (
        factors_of(refs) for refs in (rule.operands[left], rule.operands[right], rule.results[0])
    )

    def size(names: set[str]) -> float:
        return math.prod(call.factors[name] for name in names)

    # Of rows for pairs of an expert and a token, only the chosen ones are multiplied.
    stored = call.operands[left].num_elements / max(1.0, size(a)) if rule.densities else 1.0
    rows = stored * size((a & c) - b)
    return _Product(rows, size((b & c) - a), size((a & b) - c), size(a & b & c))


def _contraction(call: LocalCall) -> tuple[_Product, tuple[int, int]] | None:
    """The product that an operator of the user's own is, and its two operands; ``None`` if it is
    none. It is one if its annotation sums over a factor of two operands.
    """
    rule = call.op.rule
    assert rule is not None
    # Operators of the user's own are called ``module.name``; those of torch have no dot.
    if "." not in call.op.target or len(rule.results) != 1:
        return None
    kept = factors_of(rule.results[0])
    for i in range(len(rule.operands)):
        for j in range(i + 1, len(rule.operands)):
            a, b = factors_of(rule.operands[i]), factors_of(rule.operands[j])
            # As in ``m k, k n -> m n``: a factor of both that the result lacks (k), and a factor of
            # each alone that it keeps (m and n). Without the latter it is a sum, not a product of
            # matrices.
            if (a & b) - kept and (a & kept) - b and (b & kept) - a:
                return _matrix_product(call, i, j), (i, j)
    return None


def factors_of(refs: TensorRefs) -> set[str]:
    """The names of the factors that the dims of a tensor consist of."""
    return {ref.factor for dim in refs for ref in dim}


def _convolution(call: LocalCall) -> _Product:
    """The product that a convolution is: unfolded blocks times the weight, for each group of
    channels.
    """
    # Shapes: x [N, C, *places], weight [C_out, C / groups, *kernel]; transposed, the weight is
    # [C, C_out / groups, *kernel], and each place of x makes a block of the result.
    x, weight = call.operands[:2]
    transposed = "transpose" in call.op.target
    # The argument ``groups`` is that of the whole call; this is how many of them the rank has.
    groups = max(1, round(_channels(x, weight) / max(1, weight.shape[0 if transposed else 1])))
    kernel = math.prod(weight.shape[2:])
    if transposed:
        places = x.num_elements / max(1, _channels(x, weight))
        return _Product(places, weight.shape[1] * kernel, weight.shape[0] / groups, groups)
    places = call.results[0].num_elements / max(1, weight.shape[0])
    return _Product(places, weight.shape[0] / groups, weight.shape[1] * kernel, groups)


def _head(call: LocalCall) -> _Product:
    """The product of a linear layer with its loss: rows ``[N, K]`` and a matrix ``[C, K]``."""
    x, matrix = call.operands[:2]
    return _Product(x.num_elements / max(1, x.shape[-1]), matrix.shape[0], matrix.shape[1])


def _channels(x: LocalTensor, weight: LocalTensor) -> int:
    return x.shape[len(x.shape) - (len(weight.shape) - 1)]


def _attention_products(call: LocalCall) -> tuple[_Product, _Product]:
    """The products of attention: scores, and mixed values. Keys that go round are computed with,
    whichever rank has them.
    """
    query, _, value = call.operands[:3]
    keys = estimated_size(call.op.operands[1].shape[-2])
    batch = math.prod(query.shape[:-2]) * _seen_share(call)
    queries = query.shape[-2]
    return (
        _Product(queries, keys, query.shape[-1], batch),
        _Product(queries, value.shape[-1], keys, batch),
    )


def _seen_share(call: LocalCall) -> float:
    """The share of all keys that the queries of the busiest rank see. Causal attention skips what
    is masked, which is half; if a rank has the last of several runs of queries, these see most of
    the keys, and with two runs in zigzag half again.
    """
    if call.op.target == "attention_where":
        return _seen_by_marks(call)
    if not call.op.arg("is_causal", False):
        return 1.0
    whole, local = estimated_size(call.op.operands[0].shape[-2]), call.operands[0].shape[-2]
    assert call.op.rule is not None
    queries = {ref.factor for ref in call.op.rule.operands[0][-2]}
    # Zigzag deals early and late queries alike, so each rank sees half of the pairs.
    if not local or queries & call.in_zigzag:
        return 0.5
    return 1 - local / (2 * max(local, whole))


def _seen_by_marks(call: LocalCall) -> float:
    """The share of all keys that the busiest rank computes with, where bands or marks tell what is
    seen.
    """
    op, local = call.op, call.operands[0].shape[-2]
    num_queries, num_keys = (estimated_size(x.shape[-2]) for x in op.operands[:2])
    assert op.rule is not None
    queries = {ref.factor for ref in op.rule.operands[0][-2]}
    is_plain = not op.has_arg("sinks") and not op.has_arg("cap") and not op.has_arg("blind")
    if local == num_queries and is_plain and num_queries * num_keys <= MOST_MASKED:
        return 1.0  # torch's operator with a mask
    bands = seen_bands(op, num_queries, num_keys)
    # Zigzag gives all ranks the same, and queries that are handed on even out what it leaves.
    is_even = bool(queries & call.in_zigzag) or is_told_late(op)
    if not local or not num_keys or is_even:
        everything = ((0, num_queries),)
        return pairs(bands, everything) / max(1, num_queries * num_keys)
    starts = range(0, num_queries, local)
    work = [pairs(bands, ((start, min(local, num_queries - start)),)) for start in starts]
    return max(work) / (local * num_keys)


def _recurrent_products(call: LocalCall) -> dict[int, _Product]:
    """The products of a recurrent layer, by the position of the weight among the operands. Every
    weight matrix multiplies every step of every sequence.
    """
    x = call.operands[0]
    steps = x.num_elements / max(1, x.shape[-1])
    states = set(leaves(call.op.arg("hx")))  # the states of a cell have two dims, as weights do
    named = list(enumerate(zip(call.op.operands, call.operands, strict=True)))[1:]
    weights = {index: w for index, (value, w) in named if len(w.shape) == 2 and value not in states}
    return {index: _Product(steps, w.shape[0], w.shape[1]) for index, w in weights.items()}
