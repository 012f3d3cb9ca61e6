"""Branches on whether numbers are finite, and masks that choose everything: one outcome is traced,
and calls are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import plans
import pytest
import torch
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import InputError, TraceError

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def not_finite(x: Tensor) -> bool:
    return not torch.isfinite(x).all()


def infinite_or_none(x: Tensor) -> bool:
    return bool((torch.isinf(x) | torch.isnan(x)).any())


def without_gradients(x: Tensor) -> bool:
    with torch.no_grad():
        return not x.isfinite().all()


def one_after_the_other(x: Tensor) -> bool:
    return bool(torch.isinf(x).any() or torch.isnan(x).any())


def negated(x: Tensor) -> bool:
    return bool((~x.isfinite()).any().item())


class Mends(nn.Module):
    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.first, self.last, self.asks = nn.Linear(6, 8).double(), nn.Linear(8, 6).double(), asks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).exp()
        if self.asks(hidden):
            hidden = hidden.clamp(-1e3, 1e3)
        return self.last(hidden).square().mean()


@pytest.mark.parametrize(
    "asks", [not_finite, infinite_or_none, without_gradients, one_after_the_other, negated]
)
def test_the_branch_for_finite_numbers_is_traced(asks: Callable[[Tensor], bool]) -> None:
    graph = traced(Mends(asks), {"x": X})
    targets = [op.target for op in graph.ops]
    assert "only_finite" in targets and "clamp" not in targets and "isfinite" not in targets


def test_a_branch_on_other_numbers_is_refused() -> None:
    with pytest.raises(TraceError, match=r"__bool__\(\) needs the values"):
        trace(Mends(lambda x: bool((torch.isinf(x) | (x > 1e4)).any())), {"x": X})


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_the_check_holds_under_a_plan(policy: str) -> None:
    assert verify(
        Mends(not_finite), {"x": X}, policy, {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=1
    ).ok


class LooksAtBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = (
            nn.Linear(6, 3).double(),
            nn.Buffer(torch.ones(6, dtype=torch.float64)),
        )

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(self.shift).any() or torch.isinf(x).any():
            x = x * 0
        return self.layer(x + self.shift).sum()


def test_what_is_looked_at_is_no_change_of_it() -> None:
    graph = traced(LooksAtBuffer(), {"x": X})
    assert [op.target for op in graph.ops].count("only_finite") == 2 and not graph.buffer_updates


class Clamps(nn.Module):
    """Keeps a parameter in a range, as Gemma 3n does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.layer.weight.data.clamp_(-2.0, 2.0)
            with torch.no_grad():
                self.layer.bias.clamp_max_(2.0)
        return self.layer(x).square().mean()


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_a_parameter_that_is_kept_in_a_range(policy: str) -> None:
    assert "unclamped" in [op.target for op in traced(Clamps(), {"x": X}).ops]
    assert verify(Clamps(), {"x": X}, policy, {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=1).ok


class Images(nn.Module):
    """Leaves out images that are padding, as Idefics does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 2, 2, 2).double()

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(0, 1)
        real = (flat == 0).sum((-1, -2, -3)) != flat[0].numel()
        counts = real.view(images.shape[:2]).sum(1)
        hidden = self.layer(flat[real].contiguous())
        return torch.stack([part.mean() for part in hidden.split(counts.tolist())]).square().sum()


IMAGES = torch.rand(2, 3, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_mask_that_chooses_everything() -> None:
    with pytest.warns(UserWarning, match="chooses every element of the dummy arguments"):
        graph = traced(Images(), {"images": IMAGES})
    assert "all_chosen" in [op.target for op in graph.ops]


def test_a_mask_that_leaves_something_out_is_refused() -> None:
    images = IMAGES.clone()
    images[1, 2] = 0
    with pytest.raises(TraceError, match=r"__getitem__\(\) needs the values"):
        trace(Images(), {"images": images})


def test_a_call_that_takes_another_way_is_refused(tmp_path: Path) -> None:
    padded = IMAGES.clone()
    padded[:, 0] = 0
    cases: list[tuple[nn.Module, str, Tensor, Tensor, str]] = [
        (
            Mends(not_finite),
            "x",
            X,
            X * 1e6,
            "a number is infinite or no number where forward branches on that",
        ),
        (
            Images(),
            "images",
            IMAGES,
            padded,
            "a mask leaves out elements that it chose when the module was compiled",
        ),
    ]
    for module, name, good, bad, message in cases:
        compiled = plans.compile_with(plans.traced(module, {name: good}), "data", 2)
        plans.write(tmp_path / name, compiled, module)
        torch.testing.assert_close(
            plans.run_once(tmp_path / name, compiled, {name: good}).loss, module(good).detach()
        )
        with pytest.raises(InputError, match=message):
            plans.run_once(tmp_path / name, compiled, {name: bad})


class Asks(nn.Module):
    """Branches on what the whole model in front of it has computed."""

    def __init__(self, asks: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):  # a path through the sums and another around them, 2**40 in all
            x = x + x.tanh()
        asked = self.asks(x)
        for _ in range(40):
            asked = asked | asked
        return x if asked else -x


def test_a_branch_is_decided_by_looking_at_each_value_once() -> None:
    with pytest.raises(TraceError, match="needs the values of a tensor"):
        trace(Asks(lambda x: x.sum() > 0), {"x": X})
    graph = traced(Asks(lambda x: x.isnan().any()), {"x": X})
    assert [op.target for op in graph.ops].count("only_finite") == 1
