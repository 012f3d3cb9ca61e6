"""Graphs as text."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.compiler.ir.printer import print_graph, print_op
from shardwright.compiler.ops.annotation import parse_rule
from shardwright.compiler.trace import trace


class Example(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4, bias=False)
        self.down.weight = nn.Parameter(self.up.weight.detach().t().clone())
        self.norm = nn.BatchNorm1d(6)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(x, 0.5, self.training))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        h = self.norm(self.up(x))
        y = checkpoint(self.inner, h, use_reentrant=False)
        with torch.no_grad():
            first, rest = y[:, 1:].split([1, 2], dim=1)
        return {"y": y * scale, "parts": (first, rest)}


EXPECTED = """\
graph Example
  input %x: f32[batch, 4]'
  parameter %up_weight: f32[6, 4]'  # up.weight
  parameter %up_bias: f32[6]'  # up.bias
  parameter %down_weight: f32[4, 6]'  # down.weight
  parameter %norm_weight: f32[6]'  # norm.weight
  parameter %norm_bias: f32[6]'  # norm.bias
  buffer %norm_running_mean: f32[6]  # norm.running_mean
  buffer %norm_running_var: f32[6]  # norm.running_var
  buffer %norm_num_batches_tracked: i64[]  # norm.num_batches_tracked
  default scale = 1.0
  %up: f32[batch, 6]' = linear(%x, %up_weight, %up_bias)  # up  test_printer.py:29
  %norm_num_batches_tracked_1: i64[] = add(%norm_num_batches_tracked, other=1)\
  # norm  test_printer.py:29  only in train
  %norm: f32[batch, 6]' = batch_norm(%up, %norm_running_mean, %norm_running_var, \
%norm_weight, %norm_bias, training=(True if training else False))  # norm  test_printer.py:29
  %dropout: f32[batch, 6]' = dropout(%norm, training=(True if training else False))\
  # test_printer.py:26  [recompute_0]
  %down: f32[batch, 4]' = linear(%dropout, %down_weight)  # down  test_printer.py:26  [recompute_0]
  %getitem: f32[batch, 3] = getitem(%down, index=(:, 1:))  # test_printer.py:32  no_grad
  %first: f32[batch, 1], %rest: f32[batch, 2] = split(%getitem, \
split_size_or_sections=(1, 2), dim=1)  # test_printer.py:32  no_grad
  %mul: f32[batch, 4]' = mul(%down, other=1.0)  # test_printer.py:33
  update %norm_num_batches_tracked = %norm_num_batches_tracked_1
  return {'y': %mul, 'parts': (%first, %rest)}
"""


def test_a_graph() -> None:
    graph = trace(Example(), {"x": torch.zeros(5, 4)}, dynamic_dims={"x": {0: "batch"}})
    assert print_graph(graph) == EXPECTED


def test_rule_autocast_and_two_bodies() -> None:
    graph = trace(nn.Linear(4, 6), {"input": torch.zeros(5, 4)})
    op = replace(graph.ops[0], autocast=torch.bfloat16)
    op = replace(op, rule=parse_rule("b k+, n k+, n -> b n", op))
    assert print_op(op).endswith("# autocast(bf16)  {b k+, n k+, n -> b n}")
    both = print_graph(replace(graph, eval_graph=graph))
    assert both == print_graph(graph) + "in eval mode:\n" + print_graph(graph)
