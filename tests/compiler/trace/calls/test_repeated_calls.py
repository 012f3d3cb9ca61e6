"""Calls that are not run again: how many are left, and that their results are those of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.trace.call_recorder import CallRecorder
from shardwright.compiler.trace.calls.repeated_calls import RepeatedCalls
from shardwright.compiler.trace.entry import trace


class Block(nn.Module):
    """Views, writes to them, results of several tensors, and calls that differ in little."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).chunk(3, dim=-1)
        with torch.no_grad():
            shift = (a + b).mean(-1, keepdim=True)
        y = torch.cat([a + b, (c - shift) * 2], dim=-1)
        y[:, 0] += 1
        y.t().mul_(2)
        value, index = y.topk(2, dim=-1)
        counts = torch.ones_like(index) * 2
        y = y + (torch.ones_like(index) * 2.5).sum() * value.sum() + counts.sum()
        return F.silu(y.transpose(0, 1).contiguous().t()) + index.max() + y.unsqueeze(0)[0]


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Steps(nn.Module):
    """Reads another place of one tensor in each step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        h, places = x[0], x.repeat(16, 1)
        for t in range(self.count):
            h = torch.tanh(places[t] * 2 + h)
        return h.sum()


def traced(model: nn.Module) -> Any:
    return trace(model, {"x": torch.zeros(4, 8)})


def test_layers_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, count = CallRecorder.run, 0

    def counted(self: CallRecorder, *args: Any) -> Any:
        nonlocal count
        count += 1
        return run(self, *args)

    monkeypatch.setattr(CallRecorder, "run", counted)
    runs = []
    for model in (*map(Deep, (2, 3, 6)), Steps(10), Steps(50)):
        count = 0
        traced(model)
        runs.append(count)
    # Of each further layer run only views, calls that change an argument, and those not in C.
    assert (runs[2] - runs[1]) == 3 * (runs[1] - runs[0])
    assert runs[1] - runs[0] <= 13 < runs[0] / 2
    # Of each further step only the view.
    assert runs[4] - runs[3] == 40


def test_the_graph_is_that_of_calls_that_are_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep(3)
    shown = print_graph(traced(model))
    monkeypatch.setattr(RepeatedCalls, "results", lambda *args: None)
    assert print_graph(traced(model)) == shown


class Casts(nn.Module):
    """Calls of one function that differ in the types of numbers, in autocast and in gradients."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        index = x.argmax(-1)
        whole, real, flag = index * 2, index * 2.0, index * True
        plain = x @ w
        with torch.autocast("cpu", torch.bfloat16):
            low = x @ w
        with torch.no_grad():
            cut = x @ w
        assert (whole.dtype, real.dtype, flag.dtype) == (torch.int64, torch.float32, torch.int64)
        assert (plain.dtype, low.dtype) == (torch.float32, torch.bfloat16)
        assert plain.requires_grad and not cut.requires_grad
        assert not plain.is_leaf and plain.grad_fn is not None
        return (plain + low + cut).sum() * real.sum() * whole.sum() * flag.sum()


def test_calls_that_differ_in_little_are_not_taken_for_each_other() -> None:
    x, w = (torch.zeros(3, 3, requires_grad=True) for _ in range(2))
    trace(Casts(), {"x": x, "w": w})
