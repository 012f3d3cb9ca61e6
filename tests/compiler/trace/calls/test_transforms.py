"""``torch.vmap``: the operators on whole tensors are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from tracing import traced

from shardwright.compiler.trace import trace
from shardwright.runtime.errors import TraceError

X = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Closes(nn.Module):
    """A function under vmap reads a parameter around it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row @ self.weight).tanh() + self.weight[0])(x)


def test_a_parameter_around_the_function_is_trained() -> None:
    traced(Closes(), {"x": X}, exact=False)


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(4, dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def masks(x: Tensor) -> Tensor:
    """Masks as transformers makes them, from a function of four indices that reads tensors around
    it.
    """
    starts = torch.tensor([0, 1, 2])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key >= starts[batch]) | (query == key)

    for dims in (
        (None, None, None, 0),
        (None, None, 0, None),
        (None, 0, None, None),
        (0, None, None, None),
    ):
        visible = torch.vmap(visible, in_dims=dims, out_dims=0)
    with TransformGetItemToIndex():
        mask = visible(torch.arange(3), torch.arange(1), torch.arange(4), torch.arange(4))
    return x.masked_fill(~mask[:, 0], -1e9).softmax(-1)


def products(x: Tensor) -> Tensor:
    places = torch.tensor([0, 2, 3])
    mixed = torch.vmap(lambda row, other: row @ other.T + row.sum(), in_dims=(0, None))(x, x[0])
    return torch.vmap(lambda row, place: row[:, place].square(), in_dims=(0, None))(mixed, places)


def two_results(x: Tensor) -> Tensor:
    largest, total = torch.func.vmap(lambda row: (row.amax(0), row.cumsum(0)), out_dims=(1, 0))(x)
    return total * largest.T[:, None]


@pytest.mark.parametrize("function", [masks, products, two_results])
def test_vmap(function: Callable[[Tensor], Tensor]) -> None:
    graph = traced(Apply(function), {"x": X}, exact=False)
    assert not [op.target for op in graph.ops if "." in op.target]


def test_other_transforms_are_refused() -> None:
    with pytest.raises(TraceError, match="forward uses a transform of torch.func"):
        trace(Apply(lambda x: torch.func.grad(lambda y: y.square().sum())(x)), {"x": X})


class OtherGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


def test_a_function_with_a_gradient_of_its_own_is_refused() -> None:
    with pytest.raises(TraceError, match="forward calls OtherGradient under torch.vmap"):
        trace(Apply(lambda x: torch.vmap(OtherGradient.apply)(x)), {"x": X})
