"""Which values many blocks read that take no gradient."""

import planning
import torch
from torch import Tensor, nn

from shardwright.policies.autodist.placement.shared import shared_values


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.inner(x) + bias


class Biased(nn.Module):
    """Blocks that add the same, made of an input, to what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        bias = bias.tanh()
        for block in self.blocks:
            x = block(x, bias)
        return x


def test_what_is_made_of_inputs_alone_is_shared() -> None:
    graph = planning.graph_of(Biased(), {"x": torch.randn(2, 4), "bias": torch.randn(2, 4)})
    (made,) = (op.results[0].name for op in graph.ops if op.target == "tanh")
    assert shared_values(graph) == ({made}, {made})
