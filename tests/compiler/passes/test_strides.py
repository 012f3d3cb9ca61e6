"""A view must not depend on strides that adapters do not keep."""

from __future__ import annotations

from pathlib import Path

import expert_models
import plans
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.program import Compute, Program
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig


class Turned(nn.Module):
    """Applies a function to transposed activations, which are back in order when they are
    viewed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        # [B, S, H], as strided as up's result.
        hidden = F.gelu(self.up(x).transpose(1, 2)).transpose(1, 2)
        rows = hidden.view(-1, 8)
        return self.down(rows).view(2, -1).square().mean()


def cut_before_the_transpose(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """The projection and the first transpose are cut, the function and what follows are not."""
    builder = graph.builder(mesh={"tp": config.plan_ngpus}).partition("up", "n", "tp")
    return builder.partition("transpose", "b", "tp").build("gathered")


def targets(program: Program) -> dict[str, str]:
    return {
        i.original.name: i.op.target
        for i in program.body
        if isinstance(i, Compute) and "view" in i.original.target
    }


INPUTS = {"x": torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(2, 3, 6)}


def test_a_gather_between_two_transposes(tmp_path: Path) -> None:
    compiled, _ = plans.check_policy(
        Turned().double(), INPUTS, cut_before_the_transpose, 2, tmp_path
    )
    assert isinstance(compiled.program, Program)
    # What the product makes is in order.
    assert targets(compiled.program) == {
        "rows": "reshape",
        "view": "view",
    }


def test_views_stay_views_where_nothing_is_moved() -> None:
    graph = plans.traced(Turned().double(), INPUTS)
    assert targets(plans.compile_with(graph, "dp", 1).program) == {"rows": "view", "view": "view"}


def test_what_experts_make_is_in_order() -> None:
    """The second of two equal layers has the views of the first, also with gathered weights."""
    model = expert_models.get(expert_models.BY_HAND)
    graph = plans.traced(model.build(), model.inputs(batch=4, seq=6))
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2, use_zero=3)
    found = find_policy("dp")
    program = compile_graph(graph, found.apply, config, policy_name=found.name).program
    assert set(targets(program).values()) == {"view"}
