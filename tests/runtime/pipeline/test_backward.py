"""Split backwards: gradients equal to those of one backward, and nothing computed twice that costs
or communicates.
"""

import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.runtime.pipeline.backward import SplitBackward
from shardwright.runtime.pipeline.executor import _last_gradients
from shardwright.runtime.schedule_actions import parse_actions

DOUBLE = torch.float64


def split(results, gradients, inputs):
    return SplitBackward(
        [(get_gradient_edge(x), g) for x, g in zip(results, gradients, strict=True)], inputs
    )


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape, dtype=DOUBLE))


def check(function, inputs, parameters):
    """The gradients of ``function(*inputs)`` in two parts are those of autograd in one."""
    results = function(*inputs)
    gradients = [torch.randn_like(x) for x in results]
    expected = torch.autograd.grad(results, [*inputs, *parameters], gradients, allow_unused=True)
    for p in parameters:
        p.grad = None
    backward = split(function(*inputs), gradients, inputs)
    mine = backward.input_gradients()
    assert all(p.grad is None for p in parameters), "a parameter got its gradient in the first part"
    backward.accumulate()
    for x, e in zip([*mine, *(p.grad for p in parameters)], expected, strict=True):
        assert (x is None) == (e is None)
        if x is not None:
            torch.testing.assert_close(x, e, rtol=1e-13, atol=1e-13)


class Counting(torch.autograd.Function):
    """A function whose backward counts its runs, as one that communicates must run once."""

    runs = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx, g, h):
        Counting.runs += 1
        x, w = ctx.saved_tensors
        return g * w + h, g * x + h


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    random.seed(0)


def leaf(*shape):
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


def test_an_mlp_with_norms_and_an_embedding():
    up, down, bias, scale, shift, table = (
        parameter(8, 4),
        parameter(4, 8),
        parameter(8),
        parameter(4),
        parameter(4),
        parameter(7, 4),
    )

    def mlp(x):
        y = F.linear(torch.tanh(F.linear(F.layer_norm(x, (4,), scale, shift), up, bias)), down)
        y = y + F.embedding(torch.tensor([1, 5, 1]), table)
        return y, y.square().mean()

    check(mlp, [leaf(3, 4)], [up, down, bias, scale, shift, table])


def test_weights_used_twice():
    weight, bias = parameter(4, 4), parameter(4)

    def twice(x):
        return (F.linear(torch.tanh(F.linear(x, weight, bias)), weight, bias) @ weight @ weight,)

    check(twice, [leaf(3, 4)], [weight, bias])


def test_parameters_computed_from_others():
    a, b = parameter(4, 4), parameter(4)

    def tangled(x, y):
        c = torch.exp(b)  # goes into the inner part itself, and b does so beside it
        d = (a * c) @ a
        return x @ d + b + c * y.sum(), (d * b).sum(), a.square().sum()

    check(tangled, [leaf(3, 4), leaf(2)], [a, b])


def test_results_that_are_inputs_or_parameters_and_inputs_without_use():
    w = parameter(3)
    check(lambda x, y, z: (x, w * 2.0, x * w + y), [leaf(3), leaf(3), leaf(3)], [w])


def test_without_inputs_all_is_left_for_the_second_part():
    w = parameter(3, 3)
    check(lambda: ((w @ w).sum(),), [], [w])


def test_functions_in_python_run_once():
    w, v = parameter(4), parameter(4, 4)

    def function(x):
        y, z = Counting.apply(x @ v, w)
        return ((y * z) @ v.tanh(),)

    check(function, [leaf(3, 4)], [w, v])
    Counting.runs = 0
    x = leaf(3, 4)
    results = function(x)
    backward = split(results, [torch.ones_like(results[0])], [x])
    backward.input_gradients()
    assert Counting.runs == 1
    backward.accumulate()
    assert Counting.runs == 1


def test_weight_products_are_left_for_the_second_part():
    """Counted in floating-point operations: the first part has the products for inputs, the second
    those for weights.
    """
    layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))
    x = torch.randn(5, 16, requires_grad=True)
    backward = split([y := layers(x)], [torch.ones_like(y)], [x])
    with FlopCounterMode(display=False) as first:
        backward.input_gradients()
    with FlopCounterMode(display=False) as second:
        backward.accumulate()
    product = 2 * 5 * 16 * 16
    assert (first.get_total_flops(), second.get_total_flops()) == (3 * product, 3 * product)


def test_what_the_second_part_used_is_freed():
    references = []

    class Kept:
        def __init__(self, x):
            self.x = x.detach()  # a result that is kept as it is would keep its own graph
            references.append(weakref.ref(self))

    x, up, down = leaf(4, 4), parameter(4, 4), parameter(4, 4)
    with saved_tensors_hooks(Kept, lambda kept: kept.x):
        y = F.linear(torch.tanh(F.linear(x, up)), down)
    backward = split([y], [torch.ones_like(y)], [x])
    del y
    backward.input_gradients()
    assert all(reference() is not None for reference in references)
    backward.accumulate()
    del backward
    assert all(reference() is None for reference in references)


def test_gradients_of_parameters_are_added_one_by_one_and_what_was_saved_goes_with_them():
    layers = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(16, 16, bias=False), nn.Tanh()))
    )
    for p in layers.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(256, 16, requires_grad=True)
    with LiveBytes([tensor for p in layers.parameters() for tensor in (p, p.grad)]) as live:
        backward = split([y := layers(x)], [torch.ones_like(y)], [x])
        del y
        backward.input_gradients()
        before, sizes = live.now, []
        for p in layers.parameters():
            p.register_post_accumulate_grad_hook(lambda p: sizes.append(live.now - before))
        backward.accumulate()
    activation = 256 * 16 * 4
    # A linear's gradient and input go when it has run, and with it the tanh before it.
    assert sizes == [-number * 2 * activation for number in range(6)]


@pytest.mark.parametrize("times", [1, 2])
def test_hooks_of_parameters_run_once(times):
    w, runs = parameter(4, 4), []
    w.register_post_accumulate_grad_hook(lambda p: runs.append(p.grad.clone()))
    x = leaf(3, 4)
    y = (x @ w).tanh()
    y = y @ w if times == 2 else y
    backward = split([y], [torch.ones_like(y)], [x])
    backward.input_gradients()
    assert not runs
    backward.accumulate()
    assert len(runs) == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed):
    """Graphs of random operators on inputs, parameters and what was made of both, with random
    results.
    """
    torch.manual_seed(seed)
    parameters = [parameter(3, 3) for _ in range(4)]
    program = random.Random(seed)
    steps = [(program.choice("amtsgc"), program.random(), program.random()) for _ in range(14)]

    def function(x, y):
        values = [x, y, *parameters]
        for kind, first, second in steps:
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            if kind == "a":
                values.append(a + 0.5 * b)
            elif kind == "m":
                values.append((a @ b).tanh())
            elif kind == "t":
                values.append(a.t() * 0.9)
            elif kind == "s":
                values.append(a * b.sum().tanh())
            elif kind == "g":
                values.append(sum(Counting.apply(a.tanh(), b.tanh())))
            else:
                values.append(torch.cat([a, b]).chunk(3)[1][:1] + a)
        return values[-4:]

    check(function, [leaf(3, 3), leaf(3, 3)], parameters)


@pytest.mark.parametrize(
    ("actions", "linked", "open_stages", "last"),
    [
        ("0F0 0F1 0B0 0B1", [], [], {3}),
        ("0F0 0F1 0I0 0I1 0W1 0W0", [], [], {5}),
        ("0F0 0I0 1F0 1I0 0W0 1W0", [], [], {4, 5}),
        ("0F0 1F0 1B0 0B0", [(0, 1)], [], {3}),
        ("0F0 1F0 1I0 0I0 0W0 1W0", [(0, 1)], [], {5}),
        ("0F0 0I0 0W0", [], [0], set()),
    ],
)
def test_gradients_are_complete_behind_the_last_that_adds_to_weights(
    actions: str, linked: list[tuple[int, int]], open_stages: list[int], last: set[int]
) -> None:
    """Reduced any earlier, a gradient would lack the share of a microbatch."""
    assert _last_gradients(parse_actions(actions), linked, open_stages) == last
