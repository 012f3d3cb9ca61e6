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
    """Scores [8, 12] of 12 experts: a token chooses 2 of 4 groups, and 3 experts there. ``apart``:
    the experts of a group do not lie side by side.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, scores: Tensor) -> Tensor:
        scores = scores * self.gain
        groups = scores.view(8, 4, 3).amax(-1).topk(2).indices
        mask = torch.zeros(8, 4).scatter_(1, groups, 1)
        if self.form == "side by side":
            mask = mask.unsqueeze(-1).expand(8, 4, 3).reshape(8, 12)
        elif self.form == "repeated":
            mask = mask.repeat_interleave(3, dim=1)
        else:
            mask = mask.unsqueeze(1).expand(8, 3, 4).reshape(8, 12)
        chosen_of = scores if self.form == "unused" else scores.masked_fill(mask == 0, -torch.inf)
        weights, chosen = chosen_of.topk(3)
        rows, gains, routing = dispatch(scores, chosen, weights, num_experts=12)
        return combine(rows * gains.unsqueeze(-1), routing).sum() + mask.sum()


def groups_in(graph: IRGraph) -> set[tuple[int, int]]:
    """The groups that dispatches, and what follows them, are told of."""
    rules = (op.rule for op in graph.ops if op.rule is not None and op.rule.densities is not None)
    return {d.groups for rule in rules for side in rule.densities or () for d in side if d}


@pytest.mark.parametrize(
    ("form", "groups"),
    [("side by side", (4, 2)), ("repeated", (4, 2)), ("apart", (1, 1)), ("unused", (1, 1))],
)
def test_groups_are_found_where_they_limit_the_choice(form: str, groups: tuple[int, int]) -> None:
    traced = trace(Router(form), {"scores": torch.randn(8, 12)})
    assert groups_in(annotate(traced, pass_manager())) == {groups}


def test_groups_of_transformers() -> None:
    entry = expert_models.get("deepseek_v3")
    traced = trace(entry.build(), entry.inputs())
    assert groups_in(annotate(traced, pass_manager())) == {(2, 1)}
