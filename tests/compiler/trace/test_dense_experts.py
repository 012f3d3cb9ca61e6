"""Experts that a loop runs on all tokens: loops that become products with a stack, and others that
are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.trace.entry import trace
from shardwright.experts import combine, dispatch, grouped_linear
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.config import ComputeConfig

HIDDEN, NUM_EXPERTS = 6, 3


class Expert(nn.Module):
    """A gated expert, and layers that some forms add."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(4, HIDDEN, bias=False)
        self.norm, self.dropout = nn.LayerNorm(4), nn.Dropout(0.5)
        self.within: Callable[[Expert, Tensor], Tensor] = lambda expert, x: x

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        y: Tensor = self.down(self.within(self, F.silu(gate) * up))
        return y


class Dense(nn.Module):
    """A router, experts, and a loop over all of them that ``form`` writes."""

    def __init__(self, form: Callable[..., Tensor], within: Any = None) -> None:
        super().__init__()
        self.form = form
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        for expert in self.experts:
            expert.within = within or expert.within

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # [B, S, HIDDEN]
        return F.mse_loss(self.form(self, x, self.router(x).softmax(-1)), y)


def added(m: Any, x: Tensor, weights: Tensor) -> Tensor:
    y = x
    for index, expert in enumerate(m.experts):
        y = y + expert(x) * weights[..., index : index + 1]
    return y


def of_the_best(m: Any, x: Tensor, weights: Tensor) -> Tensor:
    tokens = x.reshape(-1, HIDDEN)
    values, chosen = weights.reshape(-1, NUM_EXPERTS).topk(2)
    y = torch.zeros_like(tokens)
    for index in reversed(range(NUM_EXPERTS)):
        y += (values * (chosen == index)).sum(-1, keepdim=True) * m.experts[index](tokens)
    return y.view_as(x)


def stacked(m: Any, x: Tensor, weights: Tensor) -> Tensor:
    return (torch.stack([expert(x) for expert in m.experts], -2) * weights.unsqueeze(-1)).sum(-2)


def looked_at(m: Any, x: Tensor, weights: Tensor) -> Tensor:
    y, most = torch.zeros_like(x), 0
    for index, expert in enumerate(m.experts):
        y = y + expert(x) * weights[..., index, None]
        most = most + y.abs().mean()
    return y * most


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(4, 3, HIDDEN, generator=generator, dtype=torch.float64) for n in "xy"}


@pytest.mark.parametrize(
    ("form", "policy"),
    [
        (added, "ep"),
        pytest.param(of_the_best, "ep", marks=pytest.mark.slow),
        (stacked, "ep"),
        pytest.param(looked_at, "ep", marks=pytest.mark.slow),
        pytest.param(added, "tp", marks=pytest.mark.slow),
        pytest.param(added, "data", marks=pytest.mark.slow),
    ],
)
def test_a_loop_over_all_experts_is_split(
    form: Callable[..., Tensor], policy: str, tmp_path: Path
) -> None:
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    report = verify(Dense(form).double(), inputs(), policy, config, directory=tmp_path)
    assert report.ok, str(report)
    if policy == "ep":
        (path,) = tmp_path.rglob("gencode0.py")
        assert '"experts.2.up.weight", "[2 of 3/ep * 8, 6]"' in path.read_text()


def targets(form: Callable[..., Tensor], within: Any = None) -> list[str]:
    return [op.target for op in trace(Dense(form, within).double(), inputs()).ops]


def test_all_experts_are_three_products_and_a_sum() -> None:
    """Two products with weights, and the weighted sum in the place of three of each."""
    found = targets(added)
    assert (found.count("einsum"), found.count("linear")) == (3, 1)
    # Where partial sums are read, the loop goes on with what is taken out of the product.
    found = targets(looked_at)
    assert (found.count("einsum"), found.count("select")) == (2, 3)


def returned_twice(m: Any, x: Tensor, weights: Tensor) -> Tensor:
    y: Tensor = sum(expert(x) for expert in m.experts) + m.experts[0](x)
    return y


def of_own_inputs(m: Any, x: Tensor, weights: Tensor) -> Tensor:
    y: Tensor = sum(expert(x * (index + 1)) for index, expert in enumerate(m.experts))
    return y


@pytest.mark.parametrize(
    ("form", "within"),
    [
        (added, lambda expert, x: expert.norm(x)),
        (added, lambda expert, x: expert.dropout(x)),
        (added, lambda expert, x: x * x.mean()),
        (returned_twice, None),
        (of_own_inputs, None),
    ],
    ids=["norm", "dropout", "mean", "twice", "inputs"],
)
def test_what_is_not_known_to_be_the_same_is_left_alone(form: Any, within: Any) -> None:
    found = targets(form, within)
    assert "einsum" not in found and found.count("linear") >= 2 * NUM_EXPERTS


class ByFunctions(nn.Module):
    """Experts written with the functions of ``shardwright.experts``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights, chosen = x.view(-1, HIDDEN)[:, :NUM_EXPERTS].topk(2)
        rows, gains, routing = dispatch(x.view(-1, HIDDEN), chosen, weights, num_experts=3)
        made = grouped_linear(rows, self.up, routing) * gains.unsqueeze(-1)
        return F.mse_loss(combine(made, routing).view_as(y), y)


def test_functions_for_experts_are_named_after_the_users_line() -> None:
    graph = trace(ByFunctions().double(), inputs())
    (op,) = (op for op in graph.ops if op.target == "dispatch")
    assert [value.name for value in op.results] == ["rows", "gains", "routing"]
    assert op.source is not None and op.source.file == __file__
