"""Stages that no gradient comes back to: what they pass on is rounded to codes, or is for a result
that is no part of the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from torch import Tensor, nn

import shardwright
from shardwright.frontend.verification.verify import VerifyReport, verify
from shardwright.runtime.errors import UsageError


class Codes(nn.Module):
    """A decoder of the nearest codes: its encoder has no gradients, so that no weight decay touches
    it either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
        self.codes, self.decoder = nn.Embedding(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        nearest = torch.cdist(self.encoder(x), self.codes.weight).argmin(-1)
        return F.mse_loss(self.decoder(F.embedding(nearest, self.codes.weight)), y)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", spread(["1f1b", "zb_h1"], 2))
def test_parameters_without_gradients_stay_without(schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, size, generator=generator) for size in (8, 2))
    options = {"schedule": schedule, "num_microbatches": 2}
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "use_end2end": True, "pas_config": options}
    report = verify(Codes(), {"x": x, "y": y}, "pp", config)
    assert report.ok, str(report)


class Aside(nn.Module):
    """A model with a second result. The weights that only it is made of lie on both sides of a cut,
    and have no gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
        self.head, self.before, self.after = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        before, hidden = self.before(x), self.layers(x)
        loss = F.mse_loss(self.head(hidden), y)
        return {"loss": loss, "aside": self.after(before + hidden.detach())}


class Skipping(nn.Module):
    """One value goes from the first stage into two others, and is part of the loss in one of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head, self.after = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = hidden = torch.relu(self.layers[0](x))
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return F.mse_loss(self.head(hidden), y), self.after(first)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", spread(["1f1b", "zb_h1"], 2, first=1))
def test_only_stages_that_lead_to_the_loss_send_gradients(schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, size, generator=generator) for size in (8, 2))
    options = {"schedule": schedule, "num_microbatches": 2}
    config = {"plan_ngpus": 3, "runtime_ngpus": 3, "use_end2end": True, "outputs": "all"}
    report = verify(Skipping(), {"x": x, "y": y}, "pp", {**config, "pas_config": options})
    assert report.ok, str(report)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, (grad * ctx.saved_tensors[0]).sum(0)


@shardwright.register_op("b n, n -> b n")
def no_gradient(x: Tensor, scale: Tensor) -> Tensor:
    """A product, of which one operand gets no gradient."""
    return _NoGradient.apply(x, scale)  # type: ignore[no-any-return, no-untyped-call]


CALLS = itertools.count()


@shardwright.register_op("b n, n -> b n", prove=False)
def untold(x: Tensor, scale: Tensor) -> Tensor:
    """The same, of which no small call tells anything: no two of them give the same."""
    return no_gradient(x, scale) + next(CALLS)


class Opaque(nn.Module):
    """A model in the middle of which an operator stops the gradient, as only running it shows.
    ``aside``: the way around it, by which the weights before it are trained all the same.
    """

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], *, aside: bool = False) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(count)))
            for count in (6, 1)
        )
        self.scale = nn.Parameter(torch.ones(8))
        self.product, self.aside = product, aside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = self.before(x)
        hidden = self.after(self.product(before, self.scale))
        return F.mse_loss(hidden[:, :2] + (before[:, :2] if self.aside else 0), y)


def verified_in_two_stages(model: nn.Module, schedule: str) -> VerifyReport:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, size, generator=generator) for size in (8, 2))
    options = {"schedule": schedule, "num_microbatches": 2}
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "use_end2end": True, "pas_config": options}
    return verify(model, {"x": x, "y": y}, "pp", config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", spread(["1f1b", "zb_h1"], 2))
@pytest.mark.parametrize("aside", [False, True])
def test_operators_that_return_no_gradient_send_none(schedule: str, aside: bool) -> None:
    report = verified_in_two_stages(Opaque(no_gradient, aside=aside), schedule)
    assert report.ok, str(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", spread(["1f1b", "zb_h1"], 2))
def test_a_gradient_that_does_not_come_is_refused(schedule: str) -> None:
    """Zeros in its place would be a gradient, by which weights before it are decayed."""
    with pytest.raises(UsageError, match="no gradient of '.*' comes out of 1[BI]0, and stage 0"):
        verified_in_two_stages(Opaque(untold), schedule)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("policy", "use_zero"), spread([("pp", 0), ("pp", 2), ("tp", 3), ("data", 1), ("hybrid", 3)], 2)
)
def test_weights_that_no_loss_reaches_stay_without_gradients(policy: str, use_zero: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, size, generator=generator) for size in (8, 2))
    plan_ngpus = 4 if policy == "hybrid" else 2
    config = {
        "plan_ngpus": plan_ngpus,
        "runtime_ngpus": 2 * plan_ngpus,
        "use_end2end": True,
        "use_zero": use_zero,
        "outputs": "all",
        "pas_config": {"num_microbatches": 2} if policy in ("pp", "hybrid") else {},
    }
    report = verify(Aside(), {"x": x, "y": y}, policy, config)
    assert report.ok, str(report)
