"""Checks of values are left out; branches that decide something are refused."""

from __future__ import annotations

from collections.abc import Callable

import checking
import pytest
import torch
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.trace import trace
from shardwright.runtime.errors import TraceError

X = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        checking.raises,
        checking.raises_unless,
        checking.raises_for_one_of_two,
        checking.raises_for_both,
        checking.asserts,
        checking.asserts_a_number,
        checking.asserts_of_a_number,
        checking.asserts_an_element,
        checking.raises_for_any,
        checking.asks_for_a_truth_value,
        checking.loops,
        checking.returns,
        checking.returns_early,
    ],
)
def test_a_check_is_left_out(function: Callable[[Tensor], Tensor]) -> None:
    line = function.__code__.co_firstlineno + (2 if function is checking.loops else 1)
    with pytest.warns(UserWarning) as caught:
        graph = traced(Apply(function), {"x": X})
    assert f"leaves out a check of values: {checking.__file__}:{line} in (root) (Apply)" in str(
        caught[0].message
    )
    assert [op.target for op in graph.ops if op.results == (graph.output.value,)] in (["add"], [])


@pytest.mark.parametrize(
    "function",
    [
        checking.other_branch,
        checking.calls,
        checking.counts_first,
        checking.caught_by_itself,
        checking.suppressed,
        checking.chooses,
        checking.number_used,
        checking.number_computed,
        checking.element_decides,
        checking.truth_value_kept,
    ],
)
def test_what_decides_something_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match="needs the values of a tensor while tracing"):
        trace(Apply(function), {"x": X})


def test_a_branch_that_raises_either_way() -> None:
    with (
        pytest.warns(UserWarning, match="leaves out a check of values"),
        pytest.raises(TraceError, match="KeyError"),
    ):
        trace(Apply(checking.both), {"x": X})
