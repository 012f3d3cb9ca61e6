"""Inside float64_casts a cast to float32 is a cast to float64, and afterwards nothing is left of
it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from precision import float64_casts
from torch import nn


def test_casts_mean_float64_inside() -> None:
    x = torch.tensor(1 / 3, dtype=torch.float64)
    with float64_casts():
        casts = [
            x.float(),
            x.to(torch.float32),
            x.type(torch.float),
            torch.tensor(1 / 3),
            torch.zeros((), dtype=torch.float),
        ]
        assert [cast.dtype for cast in casts] == [torch.float64] * 5
        assert x.float().item() == 1 / 3
        assert nn.Linear(2, 2).weight.dtype == torch.float64


@pytest.mark.parametrize(
    "shapes",
    [((8, 24), (2, 24, 24)), ((2, 8, 24), (24, 8)), ((8, 16), (16, 24)), ((4, 3, 24), (4, 24, 24))],
)
def test_products_of_groups_in_float64(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes)
    end = 8 if a.ndim != b.ndim else 16
    offs = None if a.ndim == b.ndim == 3 else torch.tensor([4, end], dtype=torch.int32)
    expected = F.grouped_mm(a, b, offs=offs)
    with float64_casts():
        found = F.grouped_mm(a.double(), b.double(), offs=offs)
    # The other is of float32.
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)


def test_everything_is_restored_after_an_error_and_after_nesting() -> None:
    dtype = torch.float32
    with pytest.raises(RuntimeError, match="model"), float64_casts(), float64_casts():
        raise RuntimeError("the model failed")
    assert torch.float32 is dtype and torch.float is dtype and torch.get_default_dtype() is dtype
    assert "float" not in torch.Tensor.__dict__
    assert torch.ones(1, dtype=torch.float64).float().dtype is dtype


def test_nested_contexts_keep_the_outer_one() -> None:
    x = torch.ones(1, dtype=torch.float64)
    with float64_casts():
        with float64_casts():
            pass
        assert x.float().dtype == torch.float64


taken_before = torch.float32


class Accumulates(nn.Module):
    """Casts to dtypes that were named when this file was read."""

    def forward(self, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [x.to(dtype), self.by_name(x), self.decorated(x), x.to(taken_before), outside(x)]

    @staticmethod
    def by_name(x: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return x.to(dtype)

    @torch.no_grad()
    def decorated(self, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return x.to(dtype)


def outside(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return x.to(dtype)


def test_it_reaches_dtypes_that_a_models_file_took_before() -> None:
    x, model = torch.ones(1, dtype=torch.float64), nn.Sequential(Accumulates())
    with float64_casts():
        assert {y.dtype for y in model(x)} == {taken_before} and taken_before is not torch.float32
    with float64_casts(model):
        with float64_casts(model):
            assert [y.dtype for y in model(x)] == [torch.float64] * 5
        assert [y.dtype for y in model(x)] == [torch.float64] * 5
    assert [y.dtype for y in model(x)] == [torch.float32] * 5 and taken_before is torch.float32


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_it_reaches_the_casts_inside_transformers(name: str) -> None:
    """Without it the loss carries float32 rounding: the reason why the helper exists."""
    entry = zoo.get(name)
    with float64_casts():
        exact = zoo.loss_of(entry.build()(**entry.inputs())).item()
    rounded = zoo.loss_of(entry.build()(**entry.inputs())).item()
    assert 1e-10 < abs(exact - rounded) < 1e-5
