"""What a host that launches one operator after the other adds to a forward and a backward."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier
from shardwright.compiler.cost.time.body_time import BodyTime, body_time
from shardwright.compiler.plan.program import Program
from shardwright.compiler.trace.entry import trace
from shardwright.experts import combine, dispatch, grouped_linear
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig

DEVICE = Device("toy", 10**12, {"float32": 1e9}, 1e15, 0.0)  # only products take time
LAUNCH_S = 0.1
PRODUCT_S = 2 * 1000**3 / 1e9


class Net(nn.Module):
    """Nine operators that take next to no time, and behind or before them a product; a sum."""

    def __init__(self, *, product_last: bool) -> None:
        super().__init__()
        self.product, self.product_last = nn.Linear(1000, 1000, bias=False), product_last
        self.scale = nn.Parameter(torch.ones(1000))

    def forward(self, x: Tensor) -> Tensor:
        if not self.product_last:
            x = self.product(x)
        x = x * self.scale
        for _ in range(8):
            x = x.tanh()
        return (self.product(x) if self.product_last else x).sum()


def body(queue_s: float, *, stops: bool = False, **options: bool) -> BodyTime:
    return body_of(Net(**options), queue_s, stops=stops)


def body_of(
    model: nn.Module, queue_s: float, *, stops: bool = False, one_by_one: bool = False
) -> BodyTime:
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1)
    x = torch.zeros(1000, 1000)
    graph = trace(model, {"x": x})
    program = compile_graph(graph, find_policy("dp").apply, config, policy_name="dp").program
    assert isinstance(program, Program)
    device = replace(
        DEVICE, queue_s=(queue_s, queue_s), queue_stops=stops, experts_one_by_one=one_by_one
    )
    return body_time(program, Hardware("toy", device, (Tier("link", (1,), 0.0, 1e12),)), (0,))


def test_large_operators_at_the_end_hide_launches_of_the_backward_only() -> None:
    """The device waits for ten launches of the forward before its product runs. Then the host has
    time to launch the whole backward.
    """
    found = body(LAUNCH_S, product_last=True)
    assert found.forward_s == pytest.approx(10 * LAUNCH_S + PRODUCT_S, rel=1e-4)
    assert found.backward_s == pytest.approx(2 * PRODUCT_S, rel=1e-4)
    assert found.waiting_s == pytest.approx(10 * LAUNCH_S, rel=1e-3)


def test_large_operators_at_the_beginning_hide_what_comes_after() -> None:
    """Only the first launch is waited for, as the host is ahead from then on."""
    found = body(LAUNCH_S, product_last=False)
    assert found.forward_s == pytest.approx(LAUNCH_S + PRODUCT_S, rel=1e-4)
    # Eleven launches of the forward and eleven of the backward, then the weight's gradient.
    ends_s = max(LAUNCH_S + PRODUCT_S, 22 * LAUNCH_S) + PRODUCT_S
    assert found.forward_s + found.backward_s == pytest.approx(ends_s, rel=1e-4)


def test_a_host_that_waits_at_the_end_of_a_forward_launches_no_backward_before() -> None:
    goes_on, stops = (body(LAUNCH_S, stops=stops, product_last=False) for stops in (False, True))
    assert stops.forward_s == goes_on.forward_s
    # Eleven launches of the backward, then the weight's gradient.
    assert stops.backward_s == pytest.approx(11 * LAUNCH_S + PRODUCT_S, rel=1e-4)
    # A product in the backward still hides the launches behind it.
    last = body(LAUNCH_S, stops=True, product_last=True)
    assert last.backward_s == pytest.approx(2 * LAUNCH_S + 2 * PRODUCT_S, rel=1e-4)


def test_a_slow_host_is_waited_for_at_every_operator() -> None:
    """What the device has to do in the meantime is hidden."""
    found = body(2 * PRODUCT_S, product_last=True)
    assert found.forward_s == pytest.approx(11 * 2 * PRODUCT_S, rel=1e-4)
    assert found.forward_s + found.backward_s == pytest.approx(22 * 2 * PRODUCT_S, rel=1e-4)


def test_kernels_that_sum_gradients_are_launched() -> None:
    """The gradient of a bias and that of a value which two operators read have one each."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1000, 1000), nn.Linear(1000, 1000)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            return (x + self.down(x)).sum()

    found = body_of(Biased(), 2 * PRODUCT_S)
    # Two products, an addition and a sum.
    assert found.forward_s == pytest.approx(4 * 2 * PRODUCT_S, rel=1e-3)
    # An addition's backward launches nothing. Of the other six launches three sum gradients: of two
    # biases, and of ``x`` behind ``up``. Behind the last one comes the gradient of a weight.
    assert found.backward_s == pytest.approx(6 * 2 * PRODUCT_S + PRODUCT_S, rel=1e-3)


def test_products_of_experts_are_launched_one_by_one_where_there_is_no_kernel_for_all() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(1000, 5, bias=False)
            self.weight = nn.Parameter(torch.zeros(5, 1000, 1000))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).topk(2)
            rows, gains, routing = dispatch(x, chosen, weights, num_experts=5)
            rows = grouped_linear(rows, self.weight, routing) * gains.unsqueeze(-1)
            return combine(rows, routing).sum()

    together, apart = (
        body_of(Experts(), 20 * PRODUCT_S, one_by_one=one_by_one) for one_by_one in (False, True)
    )
    # Four further launches there and back; a host this slow hides what the device computes.
    for more_s in (
        apart.forward_s - together.forward_s,
        apart.backward_s - together.backward_s,
    ):
        assert more_s == pytest.approx(4 * 20 * PRODUCT_S, rel=1e-3)
