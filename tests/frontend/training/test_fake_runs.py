"""Operations of a model that are counted without computing anything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from expert_models import Experts
from torch import Tensor, nn

from shardwright.frontend.training.fake_runs import count_flops


class Chosen(nn.Module):
    """A linear layer and experts, every token at the first two."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        config = SimpleNamespace(
            num_experts=4, hidden=8, inner=16, _experts_implementation=implementation
        )
        self.embed, self.experts = nn.Linear(4, 8), Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(2).expand(len(x), 2)
        y: Tensor = self.experts(self.embed(x), chosen, torch.ones(len(x), 2))
        return y.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_are_counted_in_every_dtype(
    dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch's own rule for fake tensors takes float32 for an error, and logs it."""
    tokens = 6
    # Forward, and backward to weights and, of experts, to what they read.
    expected = 2 * 2 * tokens * 4 * 8 + 3 * 2 * (2 * tokens) * (8 * 32 + 16 * 8)
    model = Chosen("grouped_mm").to(dtype)
    assert count_flops(model, {"x": torch.zeros(tokens, 4, dtype=dtype)}) == expected
    assert "grouped_mm" not in capfd.readouterr().err
