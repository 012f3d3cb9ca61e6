"""Gradients that are zero in exact arithmetic are compared with the size of their rounding,
everything else as ever.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from torch import Tensor, nn

import shardwright.frontend.verification.verify as verification
from shardwright.frontend.verification.deviation import Deviation, deviations
from shardwright.frontend.verification.one_device import Reference, reference_run
from shardwright.frontend.verification.rounding import Samples, allow_rounding, is_zero_exactly
from shardwright.frontend.verification.verify import VerifyReport, verify

CONFIG = {"plan_ngpus": 2, "runtime_ngpus": 2}


class Normalised(nn.Module):
    """Biases in front of batch norms. Small inputs make what the norms divide by small, and the
    terms of gradients large.
    """

    def __init__(self, dropout: float = 0.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=eps)
        self.down, self.last = nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return F.cross_entropy(self.last(self.down(self.dropout(hidden))), y)


def report(dropout: float = 0.0, scale: float = 1e-3, eps: float = 1e-5) -> VerifyReport:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, y = (
        torch.randn(8, 3, 12, 12, generator=generator) * scale,
        torch.randint(0, 4, (8,), generator=generator),
    )
    return verify(Normalised(dropout, eps), {"x": x, "y": y}, "data", CONFIG)


@pytest.mark.parametrize("dropout", spread([0.0, 0.5], 2, first=1))
def test_biases_in_front_of_batch_norms(dropout: float) -> None:
    found = report(dropout)
    assert found.ok, str(found)
    noise = {d.name: d.noise for d in found.deviations["gradients"]}
    assert {name for name, own in noise.items() if own is not None} == {"conv.bias", "down.bias"}
    assert "of 2 gradients no digit means anything: " in str(found)


def test_rounding_that_is_large_beside_other_tensors() -> None:
    """Where norms divide by next to nothing, what cancels leaves 1e-9, and parameters and running
    means move by it.
    """
    found = report(scale=1e-4, eps=1e-20)
    assert found.ok, str(found)
    (bias,) = [d for d in found.deviations["parameters"] if d.name == "conv.bias"]
    assert bias.noise is not None and bias.error > 1e-10


def test_a_gradient_of_few_digits_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is that of a scale in front of a norm, whose ``eps`` alone leaves it an effect:
    a difference of a tenth is a mistake.
    """
    few = Deviation("scale", (1,), error=1e-10, magnitude=1e-9, allowed=1e-14)
    wrong = replace(few, error=5e-11)

    def allowed(d: Deviation, is_zero: bool) -> bool:
        one = Reference([], [], {"scale": torch.tensor([1e-9])}, {}, {})
        other = replace(one, gradients={"scale": torch.tensor([1e-9 + 1e-11])})
        found = allow_rounding({"gradients": [d]}, one, [other], lambda name: is_zero)
        return found["gradients"][0].excess <= 1.0

    assert (
        allowed(replace(few, error=5e-12), False)
        and not allowed(wrong, False)
        and allowed(wrong, True)
    )


@pytest.mark.parametrize(("scaled", "expected"), [(False, True), (True, False)])
def test_exact_gradients_are_told_from_the_loss(scaled: bool, expected: bool) -> None:
    """However small: a bias in front of a norm has none, a scale in front of one has."""

    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.norm = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.norm(x * self.front if scaled else x + self.front), y)

    model = Front().double()
    inputs = {"x": torch.randn(16, 4, dtype=torch.float64) * 30, "y": torch.randint(0, 4, (16,))}

    def run(model: nn.Module, samples: Samples) -> Reference:
        return reference_run(model, samples, steps=1)

    reference = run(model, [[inputs]])
    assert (
        reference.gradients["front"] is not None and reference.gradients["front"].abs().max() < 1e-7
    )
    assert is_zero_exactly("front", run, model, [[inputs]], reference) == expected


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    spread(
        [
            (
                "conv.bias",
                "gradients",
                1e-9,
            ),  # one of those that are rounding, far above its rounding of 1e-12
            ("conv.weight", "gradients", 1e-10),
            ("norm.weight", "gradients", 1e-11),
            ("conv.bias", "parameters", 1e-9),
            ("norm.weight", "parameters", 2e-10),
            ("norm.running_mean", "buffers", 1e-10),
            ("norm.running_var", "buffers", 1e-9),
        ],
        2,
    ),
)
def test_small_true_differences_are_found(
    name: str, kind: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside gradients that are rounding only, every other tensor stays at the bound."""
    train_plan = verification.train_plan

    def wrong(*args: Any) -> Reference:
        result = train_plan(*args)
        getattr(result, kind)[name].view(-1)[0] += error
        return result

    monkeypatch.setattr(verification, "train_plan", wrong)
    found = report()
    assert [(k, d.name) for k, ds in found.deviations.items() for d in ds if d.excess > 1.0] == [
        (kind, name)
    ], str(found)


def test_more_than_rounding_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    train_plan = verification.train_plan

    def wrong(*args: Any) -> Reference:
        result = train_plan(*args)
        assert result.gradients["conv.bias"] is not None
        result.gradients["conv.bias"] += 1e-8
        return result

    monkeypatch.setattr(verification, "train_plan", wrong)
    assert re.search(
        r"conv.bias +\(8,\) .* <--  one device is \de-1\d from itself".replace(r"\de", r"[\d.]+e"),
        str(report()),
    )


@pytest.mark.parametrize(
    ("error", "noise", "equal"),
    [
        (3e-9, 1e-9, True),  # one device is as far from itself
        (3e-9, 5e-10, False),
        (3e-9, 0.0, False),
        (2e-6, 9e-7, False),  # six digits are asked for, whatever the noise
        (9e-7, 9e-7, True),
    ],
)
@pytest.mark.parametrize("kind", ["gradients", "parameters", "buffers", "losses"])
def test_last_digits_that_one_device_has_not_either(
    kind: str, error: float, noise: float, equal: bool
) -> None:
    one = Reference([], [], {"w": torch.ones(4)}, {"w": torch.ones(4)}, {"w": torch.ones(4)})
    moved = {"w": torch.ones(4, dtype=torch.float64) + noise}
    found: dict[str, list[Deviation]] = {
        "gradients": [Deviation("w", (4,), 0.0, 1.0, allowed=1e-10)]
    }
    found[kind] = [Deviation("w", (4,), error, 1.0, allowed=1e-10)]
    allowed = allow_rounding(
        found, one, [Reference([], [], moved, moved, moved)], lambda name: False
    )
    assert (allowed[kind][0].excess <= 1.0) == (equal and kind != "losses")


class Chain(nn.Module):
    """Batch norms over four values each: every one makes rounding larger, until ten digits are left
    of sixteen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 4)
        parts = (
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, eps=1e-12), nn.Tanh())
            for _ in range(30)
        )
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.parts(self.first(x))), y)


@pytest.fixture(scope="module")
def chain() -> tuple[Reference, Reference, list[Reference]]:
    """What two ranks compute, what one device does, and what that does after last bits have
    changed.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 4, (4,), generator=generator)
    train_plan, ours, compared = verification.train_plan, [], []

    def trained(*args: Any) -> Reference:
        ours.append(train_plan(*args))
        # So that digits are asked for.
        wrong = {name: g * 0.5 for name, g in ours[0].gradients.items() if g is not None}
        return replace(ours[0], gradients=wrong)

    def asked(found: Any, reference: Reference, repeats: list[Reference], is_zero: Any) -> Any:
        compared.extend((reference, repeats))
        return allow_rounding(found, reference, repeats, is_zero)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "train_plan", trained)
        patch.setattr(verification, "allow_rounding", asked)
        torch.manual_seed(0)
        assert not verify(Chain(), {"x": x, "y": y}, "data", CONFIG, steps=1).ok
    return ours[0], *compared


def _one_element(x: Tensor) -> None:
    x.view(-1)[0] += 1e-6 * x.abs().max()


MISTAKES = {
    "halved": lambda x: x.mul_(0.5),
    "a summand is missing": lambda x: x.sub_(x.abs().mean() / 16),
    "two elements are exchanged": lambda x: x.view(-1)[:2].copy_(x.view(-1)[:2].flip(0)),
    "a row of another rank": lambda x: x[0].copy_(x[4]),
    "the sixth digit": _one_element,
}


@pytest.mark.parametrize("mistake", spread([None, *MISTAKES], 2))
def test_mistakes_are_found_where_last_digits_are_rounding(mistake: str | None, chain: Any) -> None:
    ours, reference, repeats = chain
    gradients = {name: gradient.clone() for name, gradient in ours.gradients.items()}
    if mistake is not None:
        MISTAKES[mistake](gradients["first.weight"])
    found = {
        "gradients": deviations(gradients, reference.gradients),
        "parameters": deviations(ours.parameters, reference.parameters),
        "buffers": deviations(ours.buffers, reference.buffers),
    }
    allowed = allow_rounding(found, reference, repeats, lambda name: False)
    differ = [d.name for kind in allowed.values() for d in kind if d.excess > 1.0]
    assert differ == ([] if mistake is None else ["first.weight"])
