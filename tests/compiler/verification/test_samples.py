"""What a check runs on: copies of the model and its inputs."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.compiler.verification.verify import verify


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


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_computed_from_others() -> None:
    model = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(4, 4)), torch.nn.Flatten(0))
    model.register_forward_hook(lambda module, inputs, result: result.square().sum())
    assert not model[0].weight.is_leaf
    report = verify(model, {"input": torch.ones(2, 4)}, "dp", {"plan_ngpus": 1, "runtime_ngpus": 2})
    assert report.ok, str(report)
