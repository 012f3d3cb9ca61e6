"""Programs as text."""

from __future__ import annotations

from typing import Any

import plans
import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.passes.print_program import print_program


class Returns(nn.Module):
    """Returns its mean as it is, or in a dict."""

    def __init__(self, key: str | None) -> None:
        super().__init__()
        self.key = key

    def forward(self, x: Tensor) -> Any:
        mean = x.mean()
        return mean if self.key is None else {self.key: mean}


@pytest.mark.parametrize(
    ("key", "line"),
    [(None, "return mean"), ("loss", "return loss=mean"), ("a\n", "return a\\n=mean")],
)
def test_results_by_path(key: str | None, line: str) -> None:
    """A lone tensor has no path: it was printed as ``return =mean``."""
    program = plans.compile_with(plans.traced(Returns(key), {"x": torch.ones(2)}), "dp", 1).program
    assert print_program(program).splitlines()[-1].strip() == line
