"""Loops over experts: those that are one dispatch, and what the others are refused with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from torch import Tensor, nn

from shardwright.compiler.trace.entry import trace
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import TraceError

HIDDEN, NUM_EXPERTS = 6, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Loop(nn.Module):
    """A router, experts, and a loop over them that ``form`` writes."""

    def __init__(self, form: Callable[..., Tensor], top_k: int) -> None:
        super().__init__()
        self.form, self.top_k = form, top_k
        self.embed, self.router = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, 8) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, 8) / 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # [B, S, 5], [B, S, HIDDEN]
        h = self.embed(x).reshape(-1, HIDDEN)
        weights, chosen = self.router(h).softmax(-1).topk(self.top_k)
        made = self.form(self, h, chosen, weights)
        return F.mse_loss((h + made).view(y.shape), y)


def where(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        token, choice = torch.where(chosen == index)
        if token.numel() == 0:
            continue
        y.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
    return y


def added_by_index(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = x.clone()
    for index, expert in enumerate(m.experts):
        token, choice = (chosen == index).nonzero(as_tuple=True)
        y[token] += weights[token, choice].unsqueeze(-1) * expert(x[token])
    return y


def one_hot(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The loop that Mixtral had."""
    y = torch.zeros(x.shape, dtype=x.dtype)
    masks = F.one_hot(chosen, NUM_EXPERTS).permute(2, 1, 0)
    for index in range(NUM_EXPERTS):
        choice, token = torch.where(masks[index])
        rows = m.experts[index](x[None, token].reshape(-1, HIDDEN))
        y.index_add_(0, token, (rows * weights[token, choice, None]).to(x.dtype))
    return y


def stacked(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index in range(NUM_EXPERTS):
        token, choice = torch.where(chosen == index)
        rows = F.silu(x[token] @ m.up[index])
        rows = rows @ m.down[index].T
        y = y.index_add(0, token, rows * weights[token, choice, None])
    return y


def by_mask(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """One expert for each token."""
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        mask = chosen[:, 0] == index
        if mask.any():
            y[mask] = expert(x[mask]) * weights[mask]
    return y


FORMS = {
    "where": (where, 2), "added by index": (added_by_index, 2), "one hot": (one_hot, 2),
    "stacked": (stacked, 2), "by mask": (by_mask, 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (4, 6, 5), "y": (4, 6, HIDDEN)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def build(form: Callable[..., Tensor], top_k: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Loop(form, top_k).double()


@pytest.mark.parametrize("name", spread(FORMS, 2))
def test_a_loop_is_one_dispatch_and_equals_one_device(name: str, tmp_path: Path) -> None:
    """Experts lie on two ranks, their inner width on two others each."""
    form, top_k = FORMS[name]
    report = verify(
        build(form, top_k),
        inputs(),
        "tp",
        {"plan_ngpus": 4, "runtime_ngpus": 4, "pas_config": {"ep": 2, "etp": 2}},
        steps=1,
        directory=tmp_path,
    )
    assert report.ok, str(report)
    if name != "stacked":
        (source,) = tmp_path.rglob("gencode0.py")
        for weight in ("up.weight", "up.bias"):
            stored = f'experts.2.{weight}", "[2 of 3/tp_ep * 8/tp'
            assert stored in source.read_text()
    targets = [op.target for op in trace(build(form, top_k), inputs()).ops]
    assert targets.count("dispatch") == targets.count("combine") == 1
    assert targets.count("grouped_linear") == 2


def something_else(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        token, choice = torch.where(chosen == index)
        if len(token) > 0:
            y.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        else:
            y = y + 1
    return y


def counted(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == index)
        y.index_add_(0, token, expert(x[token]) / token.shape[0])
    return y


def other_numbers(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == index)
        y.index_add_(0, token, expert(x[token]) * (index + 1))
    return y


def normed(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == index)
        y.index_add_(0, token, expert.down(expert.norm(expert.up(x[token]))))
    return y


def missing(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts[1:]):
        token, _ = torch.where(chosen == index + 1)
        y.index_add_(0, token, expert(x[token]))
    return y


def without_the_last(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index in range(NUM_EXPERTS - 1):
        token, choice = torch.where(chosen == index)
        y.index_add_(0, token, m.experts[index](x[token]) * weights[token, choice, None])
    return y


def read_between(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y, seen = torch.zeros_like(x), 0
    for index, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == index)
        y = y.index_add(0, token, expert(x[token]))
        seen = seen + y
    return seen


def overwritten(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for index, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == index)
        y[token] = expert(x[token])
    return y


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (something_else, "branches on how many tokens an expert has"),
        (counted, "div gets the number of tokens of an expert"),
        (other_numbers, "mul gets 2 here, 1 for the first expert"),
        (normed, "layer_norm has weights of its own for each expert"),
        (missing, "it runs the experts 1, 2, not each of them once"),
        (without_the_last, "it runs 2 experts, and 3 may be chosen"),
        (read_between, "the sum of some of the experts is read by other operators"),
        (overwritten, "each expert overwrites what others made of a token"),
    ],
)
def test_what_is_not_the_same_is_refused(form: Callable[..., Tensor], why: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(build(form), inputs())
    assert why in str(caught.value) and "test_expert_lanes.py" in str(caught.value)


class Chosen(nn.Module):
    """A mask by labels is no question for an expert."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return x[labels == 1].sum()


def test_a_mask_of_labels_chooses_elements() -> None:
    labels = torch.tensor([1, 0, 1])
    graph = trace(Chosen(), {"x": torch.ones(3, 2), "labels": labels})
    assert "sum" in [op.target for op in graph.ops]
