"""What is said of plans that products of odd sizes slow down."""

from __future__ import annotations

from dataclasses import replace

import planning
import pytest
import torch
from torch import nn

from shardwright import ComputeConfig
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.odd_sizes import slowed_by_odd_sizes
from shardwright.policies.autodist.questions.saved_plans import request_of_plan
from shardwright.policies.known_policies import find_policy


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(64, 128), nn.Linear(128, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(x)).square().sum()


@pytest.mark.parametrize(("width", "efficiency", "is_said"), [(321, 0.3, True), (320, 0.3, False),
    (321, 1.0, False), (321, 0.99, False)])  # fmt: skip
def test_it_is_said_of_a_plan_with_rows_of_odd_sizes(
    width: int, efficiency: float, is_said: bool
) -> None:
    model, x = Head(width).bfloat16(), torch.randn(256, 64, dtype=torch.bfloat16)
    graph, machine = planning.graph_of(model, {"x": x}), planning.slow_machine(2)
    device = replace(machine.device, unaligned_efficiency=efficiency)
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    plan = find_policy("dp").apply(graph, replace(config, plan_ngpus=1)).plan
    request = request_of_plan(
        graph, config, AutodistOptions(), replace(machine, device=device), plan
    )
    told = slowed_by_odd_sizes(request)
    assert (told is not None) is is_said
    assert told is None or "most goes to head, whose result is [256, 321]" in told
