"""The policy ``data``: what it takes for the batch."""

from __future__ import annotations

from pathlib import Path

import plans
import pytest
import torch
from torch import Tensor, nn


class Prompted(nn.Module):
    """Images and prompts go through a layer together, laid end to end along the batch, as SegGPT
    does it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, image: Tensor, prompt: Tensor, label: Tensor) -> Tensor:
        both = self.up(torch.cat((self.embed(image), prompt), dim=0)).relu()  # [B + B, 8]
        half = both.shape[0] // 2
        mixed = self.down(both[:half] + both[half:])
        return (mixed - label).square().mean()


def test_batches_laid_end_to_end_are_split(tmp_path: Path) -> None:
    """Nothing is gathered: a rank has its rows of the images and of the prompts."""
    generator = torch.Generator().manual_seed(0)
    names = ("image", "prompt", "label")
    inputs = {name: torch.randn(5, 6, dtype=torch.float64, generator=generator) for name in names}
    compiled, _ = plans.check_policy(Prompted().double(), inputs, "data", 2, tmp_path)
    kinds = [adapter.step.kind for adapter in compiled.program.adapters()]
    assert sorted(kinds) == ["all_reduce", "narrow", "narrow", "narrow"]


class RowByRow(nn.Module):
    """Pads each row by itself, then stacks all, as TimesFM does it; or lays their places end to
    end, as Pixtral does it with the patches of images.
    """

    def __init__(self, is_stacked: bool) -> None:
        super().__init__()
        self.is_stacked = is_stacked
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = [torch.cat((row, row.new_ones(1, 6))) for row in x]  # [S + 1, 6] each
        joined = torch.stack(rows) if self.is_stacked else torch.cat([row[2:] for row in rows])
        return self.down(self.up(joined).relu()).square().mean()


@pytest.mark.parametrize("is_stacked", [True, False])
def test_rows_that_are_put_together_again_are_split(is_stacked: bool, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    compiled, _ = plans.check_policy(RowByRow(is_stacked).double(), {"x": x}, "data", 2, tmp_path)
    assert compiled.work is not None
    assert compiled.work.share == 0.5


class Stages(nn.Module):
    """Lays two stages end to end along the batch, and takes them apart again, as ZoeDepth does
    it.
    """

    def __init__(self, is_chunked: bool) -> None:
        super().__init__()
        self.is_chunked = is_chunked
        self.embed, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        both = self.up(torch.cat((x, self.embed(x)))).relu()  # [B + B, 8]
        first, second = both.chunk(2) if self.is_chunked else both.split(x.shape[0])
        return (self.down(first) * self.down(second).sin()).square().mean()


@pytest.mark.parametrize("is_chunked", [True, False])
def test_batches_that_are_taken_apart_again_are_split(is_chunked: bool, tmp_path: Path) -> None:
    """Nothing is gathered, and of 5 rows one rank has 3, the other 2 of both stages."""
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    compiled, _ = plans.check_policy(Stages(is_chunked).double(), {"x": x}, "data", 2, tmp_path)
    assert [a.step.kind for a in compiled.program.adapters()] == ["narrow", "all_reduce"]


class Filled(nn.Module):
    """Puts features of images into texts, one after the other, as Gemma 3 does it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        filled = x.masked_scatter((x[..., :1] > 0), features.tanh())
        return self.down(self.up(filled).relu()).square().mean()


def test_what_comes_behind_filled_places_is_split(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, features = (torch.randn(4, 3, 6, dtype=torch.float64, generator=generator) for _ in "xf")
    inputs = {"x": x, "features": features}
    compiled, _ = plans.check_policy(Filled().double(), inputs, "data", 2, tmp_path)
    assert compiled.work is not None
    assert compiled.work.share == 0.5
