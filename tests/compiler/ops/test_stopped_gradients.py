"""Operands of a user's operator to which a gradient comes back. Small calls show it, and calls that
are alike share one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import user_ops
from torch import Tensor, nn

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops import registry, stopped_gradients
from shardwright.compiler.ops.register import UserOpDef
from shardwright.compiler.ops.sample_calls import sample_calls
from shardwright.compiler.ops.stopped_gradients import reached_operands
from shardwright.compiler.trace import trace

TARGET = "user_ops.FirstAlone"


class Layers(nn.Module):
    """Calls the operator in three layers, in the last one with other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(4, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights[:2]:
            x = user_ops.FirstAlone.apply(weight * x, x * weight)
        return user_ops.FirstAlone.apply(x.sum(0), self.weights[2].sum(0)).sum()


def test_calls_that_are_alike_are_tried_once_until_another_operator_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def counted(op: IROp, opdef: UserOpDef) -> object:
        tried.append(op.name)
        return sample_calls(op, opdef)

    monkeypatch.setattr(stopped_gradients, "_known", {})
    monkeypatch.setattr(stopped_gradients, "sample_calls", counted)
    graph = trace(Layers(), {"x": torch.zeros(4, 6)})
    ops = [op for op in graph.ops if op.target == TARGET]
    assert len(ops) == 3
    # Passes make operators anew, so what is known of an operator itself is lost.
    for op in (*ops, *(op.changed(region=1) for op in ops)):
        assert reached_operands(op) == op.operands[:1]
    assert tried == [ops[0].name, ops[2].name]
    # What is registered under the name since is tried again.
    opdef = registry.get(TARGET)
    assert isinstance(opdef, UserOpDef)
    monkeypatch.setitem(registry.OPS, TARGET, replace(opdef))
    assert reached_operands(ops[1].changed()) == ops[1].operands[:1]
    assert tried[2:] == [ops[1].name]
