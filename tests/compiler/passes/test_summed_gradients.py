"""Which gradients are added to others."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.passes.without_gradients import without_gradients
from shardwright.compiler.trace.entry import trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        largest = x.detach().amax()
        x = x + torch.tanh(x) * torch.sigmoid(x)
        return (F.linear(x, self.weight) / largest).sum()


def test_all_but_the_last_reader_add_theirs() -> None:
    """A weight that is used twice has two, too; what is detached has none."""
    graph = trace(Block(), {"x": torch.randn(2, 4)})
    ops = annotate(graph, pass_manager()).ops
    summed = [(op.target, op.summed) for op in ops if op.summed]
    assert summed == [("linear", (1,)), ("tanh", (0,)), ("sigmoid", (0,))]
    ops = annotate(without_gradients(graph), pass_manager()).ops
    assert not any(op.summed for op in ops)
