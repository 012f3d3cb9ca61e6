"""What a check runs on: copies of the model and its inputs."""

import functools
from types import SimpleNamespace

import pytest
import torch

from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import ConfigError


class Slotted(torch.nn.Module):
    """Keeps a mask and a setting in slots."""

    __slots__ = ("mask", "setting", "unset")

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 0.5])
        self.setting = SimpleNamespace(scale=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.mask * self.setting.scale).sum()


def test_a_module_with_slots() -> None:
    model = Slotted()
    report = verify(model, {"x": torch.ones(2, 4)}, "dp", {"plan_ngpus": 1, "runtime_ngpus": 2})
    assert report.ok, str(report)
    assert model.mask.dtype == torch.float32, "the model is left as it was"


class Spectrum(torch.nn.Module):
    """A Fourier layer: some frequencies times complex weights, turned by a complex buffer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, 6, 8]
        found = torch.fft.rfft(x)
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        out = torch.zeros(found.shape, dtype=torch.cfloat)
        out[..., :3] = torch.einsum("bix,iox->box", found[..., :3] * self.turn, weight)
        return torch.fft.irfft(out).square().sum()


@pytest.mark.parametrize("policy", ["data", "tp"])
def test_complex_numbers(policy: str) -> None:
    model = Spectrum(torch.randn(6, 6, 3, 2))
    report = verify(
        model, {"x": torch.randn(4, 6, 8)}, policy, {"plan_ngpus": 2, "runtime_ngpus": 4}
    )
    assert report.ok, str(report)


def test_complex_parameters() -> None:
    with pytest.raises(
        ConfigError, match="the parameter weight is complex, and verify compares in float64"
    ):
        verify(
            Spectrum(torch.randn(6, 6, 3, dtype=torch.cfloat)),
            {"x": torch.randn(4, 6, 8)},
            "dp",
            {"plan_ngpus": 1, "runtime_ngpus": 1},
        )


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_computed_from_others() -> None:
    model = torch.nn.Sequential(
        torch.nn.utils.weight_norm(torch.nn.Linear(4, 4)), torch.nn.Flatten(0)
    )
    model.register_forward_hook(lambda module, inputs, result: result.square().sum())
    assert not model[0].weight.is_leaf
    report = verify(model, {"input": torch.ones(2, 4)}, "dp", {"plan_ngpus": 1, "runtime_ngpus": 2})
    assert report.ok, str(report)


class Hooked(torch.nn.Module):
    """A hook, and a function in an attribute, that see the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((4,), 1.5))
        self.linear, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] * self.gain,))
        self.after = lambda x: self.last(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.linear(x)).square().mean()


@pytest.mark.parametrize("policy", ["data", "tp"])
def test_functions_that_see_the_module(policy: str) -> None:
    model = Hooked()
    report = verify(
        model, {"x": torch.ones(2, 4)}, policy, {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=2
    )
    assert report.ok, str(report)
    assert {d.name for d in report.deviations["gradients"]} >= {"gain", "last.weight"}
    assert model.gain.dtype == torch.float32 and model.gain.grad is None


class Settled(torch.nn.Module):
    """Casts to dtypes that its constructor settles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dtype = torch.nn.Linear(4, 4), torch.bfloat16
        self.cast = functools.partial(torch.Tensor.to, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cast(self.linear(x).to(self.dtype)).to(x.dtype).square().mean()


def test_dtypes_that_a_constructor_settles() -> None:
    model = Settled()
    report = verify(
        model, {"x": torch.randn(6, 4)}, "data", {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=1
    )
    assert report.ok, str(report)
    assert model.dtype == torch.bfloat16
