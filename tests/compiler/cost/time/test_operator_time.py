"""Operator times: known products by hand, and laws that hold for every operator."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from example_ops import all_calls, example_op
from in_shares import Named, check_each, shares
from op_examples import Call

from shardwright.compiler.cost.edge_messages import edge_messages
from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime, call_key
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.ir.size import DynamicSize
from shardwright.compiler.ops.strategy import Assignment, allowed, exchange, strategies
from shardwright.runtime.layout import Mesh

RATES = {"float64": 1e6, "float32": 1e9, "bfloat16": 4e9}
SLOW_MATH = Hardware(
    "toy", Device("toy", 10**9, RATES, 1e30, 0.0), (Tier("link", (8,), 0.0, 1e30),)
)
SLOW_MEMORY = Hardware(
    "toy",
    Device("toy", 10**9, dict.fromkeys(RATES, 1e30), 1e9, 0.0),
    (Tier("link", (8,), 0.0, 1e30),),
)
REAL = Hardware(
    "toy", Device("toy", 10**9, RATES, 1e9, 1e-9, 0.5), (Tier("link", (8,), 1e-6, 1e8),)
)
ALONE = Mesh()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def timed(function: Any, *args: Any, hardware: Hardware = SLOW_MATH, **kwargs: Any) -> OpTime:
    return op_time(example_op((function, args, kwargs))[0], {}, ALONE, hardware)


def cell(*, trained: bool) -> OpTime:
    weights = [randn(24, size).detach().requires_grad_(trained) for size in (5, 6)]
    return timed(torch.lstm_cell, randn(7, 5), (randn(7, 6), randn(7, 6)), *weights)


def seconds(time: OpTime) -> tuple[float, float]:
    return round(time.forward_s, 15), round(time.backward_s, 15)


@pytest.mark.parametrize(
    ("time", "forward", "backward"),
    [
        pytest.param(timed(F.linear, randn(4, 8, 16), randn(32, 16), randn(32)), 2 * 32 * 16 * 32,
            2, id="linear"),
        pytest.param(timed(F.linear, randn(4, 16).detach(), randn(32, 16)), 2 * 4 * 16 * 32, 1,
            id="no input gradient"),
        pytest.param(timed(torch.matmul, randn(3, 5, 4, 6), randn(3, 5, 6, 7)), 2 * 15 * 4 * 6 * 7,
            2, id="batched"),
        pytest.param(timed(torch.matmul, randn(6), randn(6)), 2 * 6, 2, id="dot"),
        pytest.param(
            timed(torch.einsum, "bhqd,bhkd->bhqk", randn(2, 3, 4, 5), randn(2, 3, 6, 5)),
            2 * 6 * 4 * 5 * 6, 2, id="einsum"
        ),
        pytest.param(timed(torch.addmm, randn(7), randn(4, 6), randn(6, 7)), 2 * 4 * 6 * 7, 2,
            id="addmm"),
        pytest.param(timed(F.conv2d, randn(2, 4, 8, 8), randn(6, 4, 3, 3), padding=1),
            2 * 2 * 64 * 6 * 4 * 9, 2, id="conv"),
        pytest.param(
            timed(F.conv2d, randn(2, 4, 8, 8), randn(6, 2, 3, 3), groups=2), 2 * 2 * 36 * 6 * 2 * 9,
            2, id="grouped conv"
        ),
        pytest.param(
            timed(F.conv_transpose2d, randn(2, 4, 5, 5), randn(4, 3, 2, 2)), 2 * 2 * 25 * 4 * 3 * 4,
            2, id="transposed conv"
        ),
        pytest.param(
            timed(F.scaled_dot_product_attention, randn(2, 3, 8, 4), randn(2, 3, 6, 4),
                randn(2, 3, 6, 5)),
            2 * 6 * 8 * 6 * (4 + 5), 2.5, id="attention",
        ),
        pytest.param(
            timed(F.scaled_dot_product_attention, *[randn(2, 3, 8, 4)] * 3, is_causal=True),
            6 * 8 * 8 * (4 + 4), 2.5, id="causal attention",
        ),
        pytest.param(timed(F.embedding, torch.zeros(4, 5, dtype=torch.long), randn(90, 6)), 0, 0,
            id="embedding"),
        pytest.param(timed(F.gelu, randn(4, 5)), 0, 0, id="gelu"),
        pytest.param(cell(trained=True), 2 * 7 * 24 * (5 + 6), 2,
            id="a recurrent cell, whose states are no weights"),
        pytest.param(cell(trained=False), 2 * 7 * 24 * (5 + 6), 1,
            id="a recurrent cell with frozen weights"),
    ],
)  # fmt: skip
def test_arithmetic_by_hand(time: OpTime, forward: float, backward: float) -> None:
    assert time.forward_s == pytest.approx(forward / 1e9)
    assert time.backward_s == pytest.approx(backward * forward / 1e9)


@pytest.mark.parametrize(
    ("time", "forward", "backward"),
    [
        pytest.param(timed(F.gelu, randn(4, 5), hardware=SLOW_MEMORY), 160, 240,
            id="gelu: input, what came in, gradient"),
        pytest.param(timed(torch.add, randn(4, 5), randn(4, 5), hardware=SLOW_MEMORY), 240, 0,
            id="add passes gradients on"),
        pytest.param(timed(torch.add, randn(4, 5), randn(5), hardware=SLOW_MEMORY), 180, 100,
            id="add sums over a broadcast"),
        pytest.param(timed(torch.mul, randn(4, 5), randn(4, 5), hardware=SLOW_MEMORY), 240, 480,
            id="mul has a kernel for each gradient"),
        pytest.param(timed(torch.mul, randn(4, 5), randn(5), hardware=SLOW_MEMORY), 180, 520,
            id="mul writes the gradient of a broadcast factor whole, and sums it"),
        pytest.param(timed(torch.pow, randn(4, 5), 2, hardware=SLOW_MEMORY), 160, 560,
            id="pow has three kernels in its backward"),
        pytest.param(timed(torch.cat, [randn(4, 5), randn(4, 5)], hardware=SLOW_MEMORY), 320, 0,
            id="cat has views for gradients"),
        pytest.param(timed(torch.neg, randn(4, 5), hardware=SLOW_MEMORY), 160, 160,
            id="neg reads nothing again"),
        pytest.param(timed(torch.Tensor.view, randn(4, 6), 2, 12, hardware=SLOW_MEMORY), 0, 0,
            id="view"),
        pytest.param(timed(torch.chunk, randn(4, 6), 2, hardware=SLOW_MEMORY), 0, 192, id="chunk"),
        pytest.param(timed(torch.Tensor.expand, randn(4, 1), 4, 6, hardware=SLOW_MEMORY), 0, 112,
            id="expand"),
        pytest.param(
            timed(F.embedding, torch.zeros(4, 5, dtype=torch.long), randn(90, 6),
                hardware=SLOW_MEMORY),
            4 * 5 * 8 + 2 * 480, 4 * 5 * 8 + 3 * 480 + 90 * 6 * 4, id="embedding",
        ),
        pytest.param(timed(F.gelu, randn(4, 5).detach(), hardware=SLOW_MEMORY), 160, 0,
            id="nothing to differentiate"),
    ],
)  # fmt: skip
def test_memory_traffic_by_hand(time: OpTime, forward: float, backward: float) -> None:
    assert seconds(time) == (pytest.approx(forward / 1e9), pytest.approx(backward / 1e9))


def test_rates_by_dtype_and_autocast() -> None:
    op, _ = example_op((F.linear, (randn(4, 16), randn(32, 16))))
    single = op_time(op, {}, ALONE, SLOW_MATH)
    half = op_time(replace(op, autocast=torch.bfloat16), {}, ALONE, SLOW_MATH)
    assert half.forward_s == pytest.approx(single.forward_s / 4)
    assert op_time(replace(op, grad_enabled=False), {}, ALONE, SLOW_MATH).backward_s == 0


def test_a_measured_time_replaces_the_estimate() -> None:
    op, _ = example_op((F.linear, (randn(4, 16), randn(32, 16))))
    mesh = Mesh((("tp", 2),))
    split: Assignment = {"tp": "split:n"}
    key = call_key(local_call(op, split, mesh))
    assert key == 'linear [[4, 16], "float32", true] [[16, 16], "float32", true]'
    times = OperatorTimes.from_json(OperatorTimes({key: OpTime(1.0, 2.0)}).to_json())
    assert op_time(op, split, mesh, REAL, times) == OpTime(1.0, 2.0)
    assert op_time(op, {}, mesh, REAL, times) == op_time(op, {}, mesh, REAL)


def known_by(function: Any, *args: Any, **kwargs: Any) -> str:
    return call_key(local_call(example_op((function, args, kwargs))[0], {}, ALONE))


def test_measured_times_are_known_by_attributes_too() -> None:
    """Calls of one operator on operands of one shape that differ in a tuple."""
    x, weight = randn(2, 4, 8, 8), randn(4, 4, 3, 3)
    far = known_by(F.conv2d, x, weight, padding=(2, 2), dilation=(2, 2))
    assert "padding=(2, 2) dilation=(2, 2)" in far != known_by(F.conv2d, x, weight, padding=(1, 1))
    assert known_by(F.avg_pool2d, x, (2, 2)) != known_by(F.avg_pool2d, x, (3, 3), (2, 2), (1, 1))
    assert known_by(torch.sum, x, (0, 1)) != known_by(torch.sum, x, (2, 3))
    assert (
        known_by(torch.Tensor.expand, x, 3, 2, 4, 8, 8)
        == 'expand [[2, 4, 8, 8], "float32", true] -> [3, 2, 4, 8, 8]'
    )


def test_measured_times_are_known_by_the_numbers_of_dynamic_sizes() -> None:
    """Two models traced with other dummy arguments, whose sizes have the same names."""
    op, _ = example_op((torch.cumsum, (randn(4, 5), 0)))
    short, long = (
        replace(op, args=(op.args[0], ("dim", DynamicSize("length", size)))) for size in (8, 64)
    )
    assert call_key(local_call(short, {}, ALONE)) == 'cumsum [[4, 5], "float32", true] dim=8'
    assert call_key(local_call(long, {}, ALONE)) == 'cumsum [[4, 5], "float32", true] dim=64'


def test_a_host_that_is_waited_for_adds_its_time() -> None:
    """It is added to views too, to measured times too, and to a backward where there is one."""
    device = replace(REAL.device, host_s=(1.0, 2.0))
    hardware = replace(REAL, device=device)
    for call in (
        (F.linear, (randn(4, 16), randn(32, 16))),
        (torch.transpose, (randn(4, 16), 0, 1)),
    ):
        op, _ = example_op(call)
        plain = op_time(op, {}, ALONE, REAL)
        assert op_time(op, {}, ALONE, hardware) == plain + OpTime(1.0, 2.0)
        times = OperatorTimes({call_key(local_call(op, {}, ALONE)): OpTime(3.0, 4.0)})
        assert op_time(op, {}, ALONE, hardware, times) == OpTime(4.0, 6.0)
    op, _ = example_op((F.gelu, (randn(4, 5).detach(),)))
    assert op_time(op, {}, ALONE, hardware).backward_s == 0


def test_gradients_of_values_that_are_read_twice_are_added_up() -> None:
    """The gradient of ``f`` in ``x + f(x)`` is added: two are read, and a sum is written."""
    op, _ = example_op((torch.tanh, (randn(64, 1024),)))
    summed, mesh = replace(op, summed=(0,)), Mesh((("tp", 2),))
    assert op.rule is not None
    split = f"split:{op.rule.factors[0].name}"
    ways: list[tuple[Assignment, int]] = [({}, 4 * 64 * 1024), ({"tp": split}, 2 * 64 * 1024)]
    for assignment, num_bytes in ways:
        alone, added = (op_time(x, assignment, mesh, REAL) for x in (op, summed))
        seconds = 3 * num_bytes / REAL.device.bytes_per_s
        assert added.forward_s == alone.forward_s
        assert added.backward_s == pytest.approx(alone.backward_s + seconds)
        times = OperatorTimes({call_key(local_call(op, assignment, mesh)): OpTime(1.0, 2.0)})
        assert op_time(summed, assignment, mesh, REAL, times) == OpTime(1.0, 2.0 + seconds)


def test_the_gradient_of_a_bias_is_summed_by_a_kernel_of_its_own() -> None:
    """It reads what came in, beside products whose arithmetic takes longer than their traffic."""
    x, weight, bias = randn(64, 32), randn(128, 32), randn(128)
    frozen = bias.detach()
    plain, biased = (timed(F.linear, x, weight, b, hardware=REAL) for b in (frozen, bias))
    summed_s = 4 * (64 * 128 + 128) / REAL.device.bytes_per_s
    assert biased.forward_s == plain.forward_s
    assert biased.backward_s == pytest.approx(plain.backward_s + summed_s)
    added = [timed(torch.addmm, b, x, weight.t(), hardware=REAL) for b in (frozen, bias)]
    assert added[1].backward_s == pytest.approx(added[0].backward_s + summed_s)


def test_products_fetch_before_they_compute() -> None:
    op, _ = example_op((F.linear, (randn(4, 16), randn(32, 16))))
    fetching = replace(SLOW_MATH, device=replace(SLOW_MATH.device, fetch_bytes_per_s=1e6))
    plain, found = op_time(op, {}, ALONE, SLOW_MATH), op_time(op, {}, ALONE, fetching)
    forward, backward = (4 * 16 + 32 * 16 + 4 * 32) * 4, (2 * 4 * 32 + 2 * (4 * 16 + 32 * 16)) * 4
    assert seconds(found) == (
        pytest.approx(plain.forward_s + forward / 1e6),
        pytest.approx(plain.backward_s + backward / 1e6),
    )


def test_operators_have_rates_of_their_own() -> None:
    """The slower of the memory and the operator counts; attention reaches a part of the rate of its
    products.
    """
    slow = replace(SLOW_MEMORY, device=replace(SLOW_MEMORY.device, rates={"gelu": (5e8, 1e10)}))
    assert seconds(timed(F.gelu, randn(4, 5), hardware=slow)) == (
        160 / 5e8,
        pytest.approx(240 / 1e9),
    )
    half = replace(SLOW_MATH, device=replace(SLOW_MATH.device, attention_efficiency=(0.5, 0.25)))
    heads = [randn(2, 3, 8, 4)] * 3
    whole, found = (
        timed(F.scaled_dot_product_attention, *heads, hardware=h) for h in (SLOW_MATH, half)
    )
    assert seconds(found) == (
        pytest.approx(2 * whole.forward_s),
        pytest.approx(4 * whole.backward_s),
    )


def in_two_bytes(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "slower"),
    [
        pytest.param((F.linear, in_two_bytes(7, 16), in_two_bytes(33, 16)), 4, id="columns"),
        pytest.param((F.linear, in_two_bytes(7, 17), in_two_bytes(32, 17)), 4, id="summed"),
        pytest.param((F.linear, in_two_bytes(7, 16), in_two_bytes(32, 16)), 1, id="rows"),
        pytest.param((F.linear, randn(7, 16), randn(33, 16)), 1, id="four bytes"),
        # torch 2.11 and 2.12 have none
        *(pytest.param((loss, in_two_bytes(7, 16), in_two_bytes(33, 16),
            torch.zeros(7, dtype=torch.long)), 4, id="loss")
            for loss in [getattr(F, "linear_cross_entropy", None)] if loss),
    ],
)  # fmt: skip
def test_products_of_odd_sizes_are_slower(call: tuple[Any, ...], slower: float) -> None:
    """Rows of the factors and of the result are counted in pieces of 16 bytes."""
    device = replace(SLOW_MATH.device, unaligned_efficiency=0.25)
    plain, found = (
        timed(*call, hardware=h) for h in (SLOW_MATH, replace(SLOW_MATH, device=device))
    )
    assert seconds(found) == (
        pytest.approx(slower * plain.forward_s),
        pytest.approx(slower * plain.backward_s),
    )


def test_split_vocabularies_communicate() -> None:
    op, _ = example_op((F.cross_entropy, (randn(64, 512), torch.zeros(64, dtype=torch.long))))
    mesh = Mesh((("tp", 2),))
    silent = replace(REAL, tiers=(Tier("link", (8,), 0.0, 1e30),))
    split, whole = (
        op_time(op, {"tp": "split:c"}, mesh, REAL),
        op_time(op, {"tp": "split:c"}, mesh, silent),
    )
    assert split.forward_s > whole.forward_s and split.backward_s == whole.backward_s
    far = replace(REAL, tiers=(Tier("near", (2, 2), 0.0, 1e30), Tier("far", (4,), 1.0, 1e8)))
    assert op_time(op, {"tp": "split:c"}, mesh, far, ranks=(0, 2)).forward_s > 1.0
    assert op_time(op, {"tp": "split:c"}, mesh, far, ranks=(2, 3)).forward_s < 1.0


@pytest.mark.parametrize("calls", spread(shares(all_calls()), 3, first=2))
def test_every_operator_has_a_time_that_splitting_does_not_raise(calls: Sequence[Named]) -> None:
    check_each(calls, check_time)


def check_time(name: str, call: Call) -> None:
    op, _ = example_op(call)
    assert op.rule is not None
    mesh = Mesh((("a", 2),))
    hardware = replace(REAL, tiers=(Tier("link", (8,), 0.0, 1e30),))
    whole = op_time(op, {}, mesh, hardware)
    assert 0 <= whole.forward_s < 1 and 0 <= whole.backward_s < 1
    if not any(x.requires_grad for x in op.operands) or not any(
        y.requires_grad for y in op.results
    ):
        assert whole.backward_s == 0
    for strategy in strategies(op.rule):
        if allowed(op.rule, {"a": strategy}, mesh):
            local = local_call(op, {"a": strategy}, mesh)
            split = op_time(op, {"a": strategy}, mesh, hardware)
            communicates = (
                bool(edge_messages(op, {"a": strategy}, mesh))
                or exchange(strategy) is not None
                or (
                    op.rule.parallel is not None
                    and strategy.removeprefix("split:") in op.rule.parallel.keywords
                )
            )
            # The larger of uneven pieces skips nothing.
            is_masked = strategy == "split:q" and op.arg("is_causal", False)
            if not communicates and not is_masked:  # else other, slower functions run
                assert split.forward_s <= whole.forward_s * (1 + 1e-9), (strategy, local)
                assert split.backward_s <= whole.backward_s * (1 + 1e-9), (strategy, local)


def test_linear_layers_cast_to_the_dtype_of_the_device() -> None:
    """[64, 128] x [128, 256] at twice the rate, and casts of three bytes an element: operands
    forward, the gradient backward. Other products, and other dtypes, stay as they are.
    """
    rates = {**RATES, "float8_e4m3fn": 8e9}
    device = replace(REAL.device, flops_per_s=rates, matmul_efficiency=1.0, bytes_per_s=1e12)
    plain, cast = (
        replace(REAL, device=replace(device, linear_dtype=dtype))
        for dtype in (None, "float8_e4m3fn")
    )
    x, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((64, 128), (256, 128)))
    before, after = (timed(F.linear, x, weight, hardware=machine) for machine in (plain, cast))
    operands_s, gradient_s = 3 * (64 + 256) * 128 / 1e12, 3 * 64 * 256 / 1e12
    assert after.forward_s == pytest.approx(before.forward_s / 2 + operands_s)
    assert after.backward_s == pytest.approx(before.backward_s / 2 + gradient_s)
    # A cast that writes the transposed tensor, too, of weights that are cast once a step.
    cast = replace(cast, device=replace(cast.device, linear_cast_bytes=(4.0, 0.0, 4.0)))
    once = timed(F.linear, x, weight, hardware=cast)
    assert once.forward_s == pytest.approx(before.forward_s / 2 + 4 * 64 * 128 / 1e12)
    assert once.backward_s == pytest.approx(before.backward_s / 2 + 4 * 64 * 256 / 1e12)
    for function, args in (
        (torch.matmul, (x, weight.mT)),
        (F.linear, (randn(64, 128), randn(256, 128))),
    ):
        assert timed(function, *args, hardware=plain) == timed(function, *args, hardware=cast)


def test_dropout_is_one_kernel_where_launches_queue() -> None:
    """1,000 numbers of 4 bytes: read, written, and a mask; on a device that waits for its host in
    several operators.
    """
    queue = timed(F.dropout, randn(10, 100), 0.5, hardware=SLOW_MEMORY)
    assert seconds(queue) == (1e-5, 1e-5)
    host = replace(SLOW_MEMORY, device=replace(SLOW_MEMORY.device, host_s=(1e-9, 1e-9)))
    waits = timed(F.dropout, randn(10, 100), 0.5, hardware=host)
    assert waits.forward_s > 1.9 * queue.forward_s
