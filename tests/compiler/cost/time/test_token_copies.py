"""What dispatch and combine copy: 8 tokens of 16 float64 numbers, 2 of 4 experts each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.machine.hardware import Tier, load_hardware
from shardwright.compiler.cost.time.inner_messages import exchanges_in
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.cost.time.operator_traffic import VIEWS, call_bytes
from shardwright.compiler.cost.time.token_copies import LAUNCHES, asked_share
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.passes.rules import attach_rules
from shardwright.compiler.trace.entry import trace
from shardwright.experts import combine, dispatch
from shardwright.runtime.layout import Mesh

MESH = Mesh((("ep", 2),))
TOKENS = 8 * 16 * 8
"""The bytes of the tokens; a row for each of two choices has twice as many."""

IMBALANCE = 1.25
"""What a rank's experts get of the mean: the default."""


class Routed(nn.Module):
    """x [8, 16] through experts that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows, routing = dispatch(x * self.gain, chosen, num_experts=4)
        return combine(rows, routing).sum()


@pytest.fixture(scope="module")
def ops() -> dict[str, IROp]:
    inputs = {"x": torch.zeros(8, 16, dtype=torch.float64), "chosen": torch.tensor([[0, 1]] * 8)}
    return {op.target: op for op in attach_rules(trace(Routed().double(), inputs)).ops}


def test_rows_are_gathered_and_added_up(ops: dict[str, IROp]) -> None:
    routing = 8 * 2 * 8  # an integer for each choice, in or out
    found = {name: call_bytes(local_call(ops[name], {}, MESH)) for name in ("dispatch", "combine")}
    assert found["dispatch"][1] == 7 * TOKENS and found["combine"][1] == 11 * TOKENS
    assert found["dispatch"][0] >= 4 * TOKENS + routing and found["combine"][0] >= 7 * TOKENS
    half = call_bytes(local_call(ops["combine"], {"ep": "split:e"}, MESH))
    assert half[1] == 2 * IMBALANCE * TOKENS, "the gradient of a sum is one gather"


def test_an_exchange_copies_around_its_messages(ops: dict[str, IROp]) -> None:
    """4 tokens are here; of 8, each wanted by 0.75 of 2 ranks, 6 come here, or more."""
    op = ops["dispatch"]
    device = replace(load_hardware("a100-80gb").device, launch_s=0.0, bytes_per_s=1e6)
    silent = replace(load_hardware("a100-80gb"), device=device, tiers=(Tier("l", (8,), 0.0, 1e30),))
    time = op_time(op, {"ep": "exchange:t>e"}, MESH, silent)
    own = call_bytes(local_call(op, {"ep": "exchange:t>e"}, MESH))
    token, arrived = 16 * 8, 6 * IMBALANCE
    assert time.forward_s * 1e6 - own[0] == pytest.approx(token * (2 * 4 + 2 * arrived))
    assert time.backward_s * 1e6 - own[1] == pytest.approx(token * (4 + 5 * arrived))


def test_sums_in_a_wider_dtype_than_messages() -> None:
    """Sums of float64 are sent as float32: half the bytes on the way, and casts beside them."""

    class Narrow(Routed):
        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            rows, routing = dispatch(x * self.gain, chosen, num_experts=4)
            return combine(rows, routing, dtype=torch.float32).sum()

    inputs = {"x": torch.zeros(8, 16, dtype=torch.float64), "chosen": torch.tensor([[0, 1]] * 8)}
    op = {op.target: op for op in attach_rules(trace(Narrow().double(), inputs)).ops}["combine"]
    hardware = load_hardware("a100-80gb")
    (sent,) = exchanges_in(op, {"ep": "exchange:e>t"}, MESH, hardware)
    arrived = 6 * IMBALANCE  # as above
    assert sent.forward_bytes == sent.backward_bytes == arrived * 16 * 4
    device = replace(hardware.device, launch_s=0.0, bytes_per_s=1e6)
    silent = replace(hardware, device=device, tiers=(Tier("l", (8,), 0.0, 1e30),))
    time = op_time(op, {"ep": "exchange:e>t"}, MESH, silent)
    own = call_bytes(local_call(op, {"ep": "exchange:e>t"}, MESH))
    # Home come 6 sums for 4 tokens. They are added up in 8 bytes; what is sent, what has come and
    # what they add up to is cast.
    added, cast = 8 * (4 + 3 * arrived), (8 + 4) * (4 + 2 * arrived)
    assert time.forward_s * 1e6 - own[0] == pytest.approx(16 * (added + cast))


class Launches(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.count += name not in VIEWS and name not in ("slice", "expand", "_unsafe_view")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("target", sorted(LAUNCHES))
def test_each_is_made_of_as_many_operators_as_it_says(target: str) -> None:
    x, chosen = torch.randn(8, 16, requires_grad=True), torch.tensor([[0, 1]] * 8)
    gains = torch.rand(8, 2, requires_grad=True)
    rows, _, routing = dispatch(x, chosen, gains, num_experts=4)
    rows = rows.detach().requires_grad_()
    with Launches() as forward:
        if target == "dispatch":
            made: tuple[Tensor, ...] = dispatch(x, chosen, gains, num_experts=4)[:2]
        else:
            made = (combine(rows, routing),)
    inputs, ones = ([x, gains] if target == "dispatch" else [rows]), [y.clone() for y in made]
    with Launches() as backward:
        torch.autograd.grad(made, inputs, ones)
    expected = LAUNCHES[target]
    assert abs(forward.count - expected[0]) <= 2 and abs(backward.count - expected[1]) <= 1


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8])
def test_tokens_that_choose_groups_first_go_to_fewer_ranks(num_parts: int) -> None:
    """8 experts in 4 groups: all ways to choose 2 groups, and then 3 times an expert there."""
    ways, hits = 0, 0
    for chosen in itertools.combinations(range(4), 2):
        experts = [expert for expert in range(8) if expert // 2 in chosen]
        for choice in itertools.product(experts, repeat=3):
            ways += num_parts
            hits += len({expert * num_parts // 8 for expert in choice})
    assert asked_share(num_parts, 3, (4, 2)) == pytest.approx(hits / ways)
    assert asked_share(num_parts, 3, (4, 4)) == pytest.approx(asked_share(num_parts, 3, (1, 1)))


def test_groups_that_parts_do_not_fit_do_not_count() -> None:
    assert asked_share(3, 3, (4, 2)) == asked_share(3, 3, (1, 1)) == pytest.approx(19 / 27)
