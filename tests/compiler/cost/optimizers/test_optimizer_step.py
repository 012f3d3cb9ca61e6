"""What a step of an optimizer does, told without memory, against steps that are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import planning
import plans
import pytest
import torch
from own_optimizers import Preconditioned
from torch.utils._pytree import tree_leaves
from zero_training import Muonlike

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.cost.optimizers.optimizer_step import StepProduct, work_of_step
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig

FLOAT = torch.float32


@pytest.mark.parametrize("shape", [(64, 16), (16, 64)])
def test_the_products_of_muon(shape: tuple[int, int]) -> None:
    """Five rounds, of the smaller dim: the square of a matrix, a polynomial of this, and the
    product of both.
    """
    found = work_of_step(torch.optim.Muon, shape, FLOAT)
    square, polynomial, product = ((16, 16, 64), (16, 16, 16), (16, 64, 16))
    assert (
        list(found.products)
        == [StepProduct(*size, "bfloat16") for size in (square, polynomial, product)] * 5
    )


def test_an_optimizer_without_products_has_none() -> None:
    assert work_of_step(torch.optim.AdamW, (64, 16), FLOAT).products == ()


ANY_SHAPE = [
    getattr(torch.optim, name) for name in ("SGD", "Adam", "NAdam", "RMSprop", "Adafactor")
] + [Muonlike]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (torch.optim.Muon, (96, 32)),
        (Preconditioned, (96, 32)),
        *((make, shape) for make in ANY_SHAPE for shape in ((96, 32), (40,))),
    ],
)
def test_temporary_bytes_are_those_of_a_step(
    make: Callable[..., torch.optim.Optimizer], shape: tuple[int, ...]
) -> None:
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer = make([parameter])
    peaks = []
    for _ in range(3):
        parameter.grad = torch.randn(shape)
        state = [
            x for x in tree_leaves(dict(optimizer.state[parameter])) if isinstance(x, torch.Tensor)
        ]
        with LiveBytes([parameter, parameter.grad, *state]) as live:
            before = live.now
            optimizer.step()
        peaks.append(live.peak - before)
    told = work_of_step(make, shape, FLOAT).temporary_bytes
    # Numbers of a step may be Python's or tensors.
    assert told is not None and abs(told - peaks[-1]) <= 64


class Listing(torch.optim.SGD):
    """Asks for all numbers of its gradient, which tensors without memory do not have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        parameter.grad @ parameter.grad.T
        parameter.grad.numpy()
        self.state[parameter]["seen"] = torch.zeros_like(parameter)


def test_of_a_step_that_does_not_run_so_what_ran_counts() -> None:
    found = work_of_step(Listing, (8, 4), FLOAT)
    assert found.products == (StepProduct(8, 8, 4, "float32"),) and found.temporary_bytes is None


@pytest.mark.parametrize(
    ("plan", "runtime", "zero", "ranks"),
    [(1, 1, 0, 1), (2, 2, 0, 2), (1, 4, 0, 1), (1, 4, 1, 4), (2, 4, 2, 4)],
)
def test_products_are_shared_by_those_who_share_the_tensors(
    plan: int, runtime: int, zero: int, ranks: int
) -> None:
    """Pieces of what tp cuts have one owner, and ZeRO deals out the rest."""
    module = torch.nn.Sequential(
        torch.nn.Linear(16, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 16, bias=False)
    )
    graph = plans.annotated(plans.traced(module, {"input": torch.ones(8, 16)}))
    config = ComputeConfig(plan_ngpus=plan, runtime_ngpus=runtime, use_zero=zero)
    policy = "tp" if plan > 1 else "dp"
    program = compile_graph(graph, find_policy(policy).apply, config, policy_name=policy).program
    hardware = planning.slow_machine(runtime)
    steps = []
    for name in ("Muon", "SGD(momentum=0.9)"):
        cost = audit(
            program, config, hardware, optimizer=OptimizerMemory(named=NamedOptimizer(name))
        )
        (step,) = (part for part in cost.timeline if part.name == "optimizer step")
        steps.append(step.end_s - step.start_s)
    device = hardware.device
    sizes = ((16, 16, 64), (16, 16, 16), (16, 64, 16))
    # Of both matrices.
    whole = 2 * 5 * sum(device.matmul_s(m, n, k, "bfloat16") for m, n, k in sizes)
    assert steps[0] - steps[1] == pytest.approx(whole / ranks)
