"""Tensors that are cut into one piece: in a graph, an operator of one result gives no tuple."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tracing import traced

from shardwright.frontend.verification.verify import verify

X = torch.randn(4, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class OnePiece(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:  # [B, 1, 6]
        (chunk,) = self.up(x).chunk(1, dim=-1)
        (row,) = chunk.unbind(1)
        for other in torch.unbind(input=chunk, dim=-2):
            row = row + other
        (part,), (whole,) = row.split(8, -1), torch.tensor_split(row, 1)
        return self.down(part * whole + row).square().mean()


def test_the_piece_is_the_tensor() -> None:
    graph = traced(OnePiece(), {"x": X})
    assert {op.target for op in graph.ops} == {"linear", "getitem", "add", "mul", "square", "mean"}


def test_generated_code_gets_a_tensor() -> None:
    report = verify(OnePiece(), {"x": X}, "tp", {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=1)
    assert report.ok, str(report)
