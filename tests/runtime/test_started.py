"""What is started and waited for later, against the adapter and the plain product: bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from torch import Tensor

from shardwright.runtime.adapters import all_gather, all_reduce, grad_all_reduce, reduce_scatter
from shardwright.runtime.flights import flight_of
from shardwright.runtime.layout import Cut, Mesh
from shardwright.runtime.ops.linear_beside import addmm_beside, linear_beside
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.started import arrived, start

NUM_RANKS = 3
ADAPTERS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "sum": (grad_all_reduce, {}),
    "sum both ways": (all_reduce, {"backward": "all_reduce"}),
    "sum forward": (all_reduce, {}),
    "gather": (all_gather, {"dim": 0, "backward": "reduce_scatter"}),
    "gather of the middle": (all_gather, {"dim": -2, "backward": "reduce_scatter"}),
    "gather and slice": (all_gather, {"dim": 0}),
    "scatter": (reduce_scatter, {"dim": 0}),
    "two segments": (all_gather, {"dim": 0, "cut": Cut((9, 6)), "backward": "reduce_scatter"}),
}


def job(
    rank: int, adapter: str, early: bool, shape: tuple[int, ...], transposed: bool, cast: bool
) -> tuple[list[Tensor], str]:
    """Two products of what an adapter makes, one with a bias: loss and all gradients."""
    function, arguments = ADAPTERS[adapter]
    own, shared = (torch.Generator().manual_seed(seed) for seed in (7 + rank, 3))
    tp = RankMesh(Mesh((("tp", NUM_RANKS),))).axis("tp")
    dtype = torch.float32 if cast else torch.float64
    x = torch.randn(shape, generator=shared if function is grad_all_reduce else own, dtype=dtype)
    x.requires_grad_()
    sizes = [(8, n) if transposed else (n, 8) for n in (4, 6)]
    weights = [torch.randn(size, generator=own, dtype=dtype).requires_grad_() for size in sizes]
    biases = [torch.randn(n, generator=own, dtype=dtype).requires_grad_() for n in (4, 6)]
    with count_communication() as volume:
        if early:
            y = arrived(start(function, x * 2, tp, **arguments), beside=weights)
        else:
            y = function(x * 2, tp, **arguments)
        made = []
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            for weight, bias in zip(weights, biases, strict=True):
                if transposed:
                    rows = y.view(-1, 8)
                    product = addmm_beside if early else torch.addmm
                    made.append(product(bias, rows, weight))
                else:
                    linear = linear_beside if early else F.linear
                    made.append(linear(y, weight, bias if weight is weights[0] else None))
        loss = sum((out.to(dtype) ** 2).sum() for out in made)
        assert isinstance(loss, Tensor)
        loss.backward()
    grads = [w.grad for w in (x, *weights, *biases) if w.grad is not None]
    return [loss.detach(), *grads], str(volume)


@pytest.mark.parametrize("adapter", spread(ADAPTERS, 2))
def test_bits_and_messages_are_those_of_the_adapter(adapter: str) -> None:
    for shape, transposed, cast in itertools.product(
        [(5, 8), (5, 2, 8), (0, 2, 8)], [False, True], [False, True]
    ):
        if adapter == "two segments" and shape[0] != 5:
            continue
        if adapter == "scatter":
            shape = (3 * shape[0], *shape[1:])
        both = [run_ranks(NUM_RANKS, job, adapter, e, shape, transposed, cast) for e in (1, 0)]
        for (early, its_volume), (plain, volume) in zip(*both, strict=True):
            assert len(early) == len(plain) and all(map(torch.equal, early, plain))
            assert its_volume == volume


def test_products_run_while_the_sum_is_under_way() -> None:
    """The backward starts the sum, computes the gradient of the weight, and waits then."""
    events: list[str] = []

    def rank(index: int) -> None:
        tp = RankMesh(Mesh((("tp", 2),))).axis("tp")
        x = torch.ones(3, 4, requires_grad=True)
        weight = torch.ones(2, 4, requires_grad=True)
        y = arrived(start(grad_all_reduce, x, tp), beside=(weight,))
        flight = flight_of(y.view(-1, 4))
        assert flight is not None
        begin, out = flight.back, linear_beside(y, weight)

        def back(grad: Tensor, phase: Any) -> Callable[[], Tensor]:
            finish = begin(grad, phase)
            product = flight.products[0]
            flight.products[0] = lambda: (noted("product"), product())[1]
            noted("start")
            return lambda: (noted("wait"), finish())[1]

        def noted(event: str) -> None:
            if index == 0:
                events.append(event)

        flight.back = back
        out.sum().backward()

    run_ranks(2, rank)
    assert events == ["start", "product", "wait"]


def test_a_frozen_weight_has_no_gradient_and_other_weights_are_plain() -> None:
    def rank(index: int) -> None:
        tp = RankMesh(Mesh((("tp", 2),))).axis("tp")
        x = torch.ones(3, 4, requires_grad=True)
        frozen, other = torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)
        y = arrived(start(grad_all_reduce, x, tp), beside=(frozen,))
        (linear_beside(y, frozen) + linear_beside(y, other)).sum().backward()
        assert frozen.grad is None and other.grad is not None and x.grad is not None
        # Nothing comes back to an input without a gradient.
        still = arrived(start(grad_all_reduce, x.detach(), tp), beside=(other,))
        assert flight_of(still) is None
        before = other.grad.clone()
        linear_beside(still, other).sum().backward()
        assert torch.equal(other.grad, 2 * before)

    run_ranks(2, rank)
