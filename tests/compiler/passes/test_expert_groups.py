"""Routers that choose groups of experts first."""

from __future__ import annotations

import expert_models
import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.trace.entry import trace
from shardwright.experts import combine, dispatch


class Router(nn.Module):
    """Scores [8, 12] of 12 experts, in ``form``: a token chooses 2 of 4 groups, or leaves one out,
    and 3 experts there.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, scores: Tensor) -> Tensor:
        scores = scores * self.gain
        of_groups = scores.view(8, 4, 3).amax(-1)
        groups = of_groups.topk(2).indices
        mask = torch.zeros(8, 4).scatter_(1, groups, 1)
        if self.form == "apart":  # the experts of a group do not lie side by side
            mask = mask.unsqueeze(1).expand(8, 3, 4).reshape(8, 12)
        elif self.form == "repeated":
            mask = mask.repeat_interleave(3, dim=1)
        else:
            mask = mask.unsqueeze(-1).expand(8, 4, 3).reshape(8, 12)
        of_experts = scores.masked_fill(mask == 0, -torch.inf)
        if self.form == "times":
            of_experts = scores * mask
        elif self.form == "left out":
            worst = (-of_groups).topk(1).indices
            gone = torch.zeros(8, 4).scatter_(1, worst, 1).unsqueeze(-1) > 0
            of_experts = scores.view(8, 4, 3).masked_fill(gone, -torch.inf).flatten(1)
        elif self.form == "of the authors":  # of DeepSeek-V3
            gone = torch.ones(8, 4, dtype=torch.bool).scatter_(1, groups, False)
            of_experts = scores.view(8, 4, 3).masked_fill(gone.unsqueeze(-1), -torch.inf).flatten(1)
        elif self.form == "unused":
            of_experts = scores
        weights, chosen = of_experts.topk(3)
        rows, gains, routing = dispatch(scores, chosen, weights, num_experts=12)
        return combine(rows * gains.unsqueeze(-1), routing).sum() + mask.sum()


def groups_in(graph: IRGraph) -> set[tuple[int, int]]:
    """The groups that dispatches, and what follows them, are told of."""
    rules = (op.rule for op in graph.ops if op.rule is not None and op.rule.densities is not None)
    return {d.groups for rule in rules for side in rule.densities or () for d in side if d}


@pytest.mark.parametrize(
    ("form", "groups"),
    [
        ("of transformers", (4, 2)),
        ("of the authors", (4, 2)),
        ("repeated", (4, 2)),
        ("times", (4, 2)),
        ("left out", (4, 3)),
        ("apart", (1, 1)),
        ("unused", (1, 1)),
    ],
)
def test_groups_are_found_where_they_limit_the_choice(form: str, groups: tuple[int, int]) -> None:
    traced = trace(Router(form), {"scores": torch.randn(8, 12)})
    assert groups_in(annotate(traced, pass_manager())) == {groups}


def test_groups_of_transformers() -> None:
    entry = expert_models.get("deepseek_v3")
    traced = trace(entry.build(), entry.inputs())
    assert groups_in(annotate(traced, pass_manager())) == {(2, 1)}
