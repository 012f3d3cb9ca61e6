"""Which part of one device's arithmetic ranks do, and that a compile says so where it is much more
than their part.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from torch import Tensor, nn

from shardwright import parallelize
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.work_share import WorkShare
from shardwright.frontend.cli.main import main
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig


class Layer(nn.Module):
    """A product with as much arithmetic before experts as in them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.experts = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.before(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = (
            nn.Linear(8, 8, bias=False),
            nn.ModuleList(Layer() for _ in range(2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.first(x).square().mean()


ARGS = {"x": torch.ones(4, 8)}


def half(graph: Any, config: ComputeConfig) -> Any:
    """Experts are computed on every rank."""
    builder = graph.builder(mesh={"dp": config.plan_ngpus})
    for op in graph.ops:
        if op.target == "linear" and "experts" not in op.module_path:
            builder.partition(op, op.rule.factors[0].name, "dp")
    return builder.build()


def compiled_share(name: str, policy: str, **fields: Any) -> WorkShare:
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True, **fields)
    found = compile_graph(
        plans.zoo_traced(name), find_policy(policy).apply, config, policy_name=policy
    )
    assert found.work is not None
    return found.work


@pytest.mark.parametrize(
    ("policy", "name"), [("tp", "mlp"), ("data", "mlp"), ("tp", "mlp-uneven"), ("pp", "mlp")]
)
def test_an_even_plan(policy: str, name: str) -> None:
    """Uneven pieces and stages count with their mean."""
    found = compiled_share(
        name, policy, pas_config={"num_microbatches": 2} if policy == "pp" else {}
    )
    assert found == WorkShare(2, pytest.approx(0.5), ()) and not found.is_uneven


def test_dp_is_exempt() -> None:
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2)
    assert (
        compile_graph(
            plans.zoo_traced("mlp"), find_policy("dp").apply, config, policy_name="dp"
        ).work
        is None
    )


def test_ranks_that_do_more_than_their_part_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five products, one of which has no gradient of its input: 14 passes, of which 6 are whole on
    2 ranks, so that each does 10.
    """
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    with pytest.warns(UserWarning) as told:
        parallelize(Layers(), ARGS, half, config, gen_savedir=tmp_path, load_module=False)
    assert [str(one.message) for one in told] == [
        "each rank of Layers does much more than its part: "
        "71.4% of the arithmetic of one device on each of 2 ranks, 50% would be even\n"
        "  why:   layers.*.experts (linear): 43% of one device's, on every rank\n"
        "         every rank computes all experts for all tokens\n"
        "  try:   another policy or mesh; `shardwright inspect` says why operators are not split"
    ]
    assert main(["inspect", str(next(tmp_path.rglob("manifest.json")).parent)]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert (
        "work 71.4% of the arithmetic of one device on each of 2 ranks, 50% would be even "
        "layers.*.experts" in shown
    )
