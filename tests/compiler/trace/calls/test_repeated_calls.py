"""Calls that are not run again: how many are left, and that their results are those of a run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tracing import traced as held

from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.trace.call_recorder import CallRecorder
from shardwright.compiler.trace.calls.plain_views import Part, indexed_part
from shardwright.compiler.trace.calls.repeated_calls import RepeatedCalls
from shardwright.compiler.trace.entry import trace


class Block(nn.Module):
    """Views, writes to them, results of several tensors, and calls that differ in little."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 12), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        kept = F.dropout(x, 0.1, self.training)  # in eval mode x itself
        kept[:, 1] *= 2
        a, b, c = self.up(x).chunk(3, dim=-1)
        with torch.no_grad():
            shift = (a + b).mean(-1, keepdim=True)
        y = torch.cat([a + b, (c - shift) * 2], dim=-1)
        y[:, 0] += 1
        y.t().mul_(2)
        value, index = y.topk(2, dim=-1)
        counts = torch.ones_like(index) * 2
        y = y + (torch.ones_like(index) * 2.5).sum() * value.sum() + counts.sum()
        return F.silu(y.transpose(0, 1).contiguous().t()) + index.max() + y.unsqueeze(0)[0] + kept


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
    # Of each further layer run, in either mode, only pieces, calls that change an argument, and
    # those not in C.
    assert (runs[2] - runs[1]) == 3 * (runs[1] - runs[0])
    assert runs[1] - runs[0] <= 2 * 8 < runs[0] / 2
    # Of each further step nothing.
    assert runs[4] == runs[3]


def test_the_graph_is_that_of_calls_that_are_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep(3)
    shown = print_graph(traced(model))
    monkeypatch.setattr(RepeatedCalls, "results", lambda *args: None)
    monkeypatch.setattr(RepeatedCalls, "view", lambda *args: None)
    monkeypatch.setattr(RepeatedCalls, "alias", lambda _, tensor: torch.ops.aten.alias(tensor))
    assert print_graph(traced(model)) == shown


class Views(nn.Module):
    """Reads of tensors that are written to between one read and the next."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = x * self.scale
        kept, total = torch.zeros(4, 8), x.new_zeros(8)
        early, turned = kept[1], kept.t()
        assert not early.requires_grad
        kept.copy_(x)
        # Torch lets gradients flow through views that were made before.
        assert early.requires_grad and turned.requires_grad and kept[2].requires_grad
        y = x * 1
        for t in range(4):
            row, column = y[t, None], y.t()[:, t]
            row.mul_(2)
            total = total + row[0] * column.unsqueeze(0).t().sum() + kept[t] * places[t]
            assert row.requires_grad and not row.is_leaf and not places[t].requires_grad
        with torch.no_grad():
            total = total + x[0] * (x.t() * 1).sum()
        return total + early + turned[:, 3] + y[1:][1].as_strided((8,), (1,), 16)


def test_views_follow_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"x": torch.randn(4, 8), "places": torch.arange(4)}
    graph = held(Views(), given)
    monkeypatch.setattr(RepeatedCalls, "results", lambda *args: None)
    monkeypatch.setattr(RepeatedCalls, "view", lambda *args: None)
    assert print_graph(trace(Views(), given)) == print_graph(graph)


def test_parts_by_index_lie_where_torch_says() -> None:
    draw = random.Random(0)
    bounds, steps = [None, -7, -2, -1, 0, 1, 3, 9], [None, 1, 2, 3]
    for _ in range(500):
        x = torch.zeros([draw.randint(0, 4) for _ in range(draw.randint(0, 4))])
        if x.ndim:
            x = x.permute(draw.sample(range(x.ndim), x.ndim))[..., draw.randint(0, 1) :]
        items: list[Any] = []
        for _ in range(draw.randint(0, x.ndim + 1)):
            part = slice(*(draw.choice(choices) for choices in (bounds, bounds, steps)))
            items.append(draw.choice([None, part, draw.randint(-4, 4)]))
        if draw.random() < 0.5:
            items[draw.randint(0, len(items)) : draw.randint(0, 4)] = [..., None]
        index = items[0] if len(items) == 1 and draw.random() < 0.5 else tuple(items)
        found = indexed_part(x, index)
        try:
            view = x[index]
        except IndexError:
            assert found is None, (x.shape, index)
            continue
        offset = view.storage_offset() - x.storage_offset()
        assert found == Part(tuple(view.shape), view.stride(), offset), (x.shape, index)


@pytest.mark.parametrize("index", [True, (0, True), torch.tensor(1), [0, 1], (..., [1]), 4, "a"])
def test_other_indices_are_left_to_torch(index: Any) -> None:
    assert indexed_part(torch.zeros(4, 3), index) is None


class Casts(nn.Module):
    """Calls of one function that differ in the types of numbers, in autocast, in gradients and in
    the kernels that are allowed.
    """

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
        heads = x.new_zeros(2, 3, 4, 3).transpose(1, 2)
        fused = F.scaled_dot_product_attention(heads, heads, heads)
        with sdpa_kernel([SDPBackend.MATH]):
            written_out = F.scaled_dot_product_attention(heads, heads, heads)
        assert fused.stride() != written_out.stride()
        assert not plain.is_leaf and plain.grad_fn is not None
        return (plain + low + cut).sum() * real.sum() * whole.sum() * flag.sum()


def test_calls_that_differ_in_little_are_not_taken_for_each_other() -> None:
    x, w = (torch.zeros(3, 3, requires_grad=True) for _ in range(2))
    trace(Casts(), {"x": x, "w": w})
