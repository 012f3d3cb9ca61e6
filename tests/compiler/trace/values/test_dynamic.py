"""Sizes that stay symbolic, and what happens to models that fix them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from tracing import same_as_eager, traced

from shardwright.compiler.ir.op import RankDevice
from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.trace import trace
from shardwright.runtime.errors import TraceError

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS = {"x": {0: "rows"}}


class Computes(nn.Module):
    """Uses sizes in views, factories, slices and arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        y = x.reshape(rows * 2, width // 2) * torch.ones(rows * 2, 1, dtype=x.dtype)
        position = torch.arange(rows, dtype=x.dtype) / rows
        scaled = y.view(-1, width) * position[:, None] / rows**0.5
        half = scaled[: rows // 2].sum(0) + scaled[rows - 1 :].sum(0)
        return torch.cat((scaled, half.expand(rows + 1, width)))


def test_sizes_become_expressions() -> None:
    module = Computes()
    graph = traced(module, {"x": X}, dynamic_dims=ROWS)
    assert [str(size) for size in graph.outputs[0].shape] == ["2*rows + 1", "6"]
    for rows in (2, 5, 9):
        same_as_eager(graph, module, {"x": X.repeat(3, 1)[:rows]})
    assert "[2 * rows, 3]'" in print_graph(graph)
    assert [(d.input, d.dim, d.symbol) for d in graph.dynamic_dims] == [("x", 0, "rows")]


def test_one_name_is_one_size() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    graph = traced(Adds(), {"x": X, "y": X}, dynamic_dims={"x": {0: "n"}, "y": {0: "n"}})
    assert graph.conditions == ()
    with pytest.raises(TraceError) as caught:
        trace(Adds(), {"x": X, "y": X}, dynamic_dims={"x": {0: "n"}, "y": {0: "m"}})
    text = str(caught.value)
    assert (
        text.startswith("the model fixes the dynamic dim ")
        and "in terms of another one: " in text
        and "test_dynamic.py:" in text
    )
    with pytest.raises(
        TraceError,
        match="dynamic dim 'n' has two sizes in the dummy arguments\n  where: dim 0 of y\n  why:   "
        "3 here, 4 before",
    ):
        trace(Adds(), {"x": X, "y": X[:3]}, dynamic_dims={"x": {0: "n"}, "y": {0: "n"}})


def test_parts_are_written_in_place() -> None:
    class Shifts(nn.Module):
        """A shift as T5 makes the inputs of its decoder of its labels."""

        def forward(self, x: Tensor) -> Tensor:
            shifted = x.new_zeros(x.shape)
            shifted[1:] = x[:-1].clone()
            shifted[..., 0] = 7.0
            shifted[-1, 1:3] += x[0, 1:3]
            return shifted.masked_fill_(shifted < -1, 0.0)

    graph = traced(Shifts(), {"x": X}, dynamic_dims=ROWS)
    assert [str(size) for size in graph.outputs[0].shape] == ["rows", "6"]
    # One row would be broadcast.
    assert [str(condition) for condition in graph.conditions] == ["Ne(rows - 1, 1)"]
    for rows in (3, 5, 9):
        same_as_eager(graph, Shifts(), {"x": X.repeat(3, 1)[:rows]})


def test_sizes_as_tensors() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() / torch.tensor(x.shape[0]) + torch.tensor([x.shape[0], 1.0]).sum()

    graph = traced(Counts(), {"x": X}, dynamic_dims=ROWS)
    same_as_eager(graph, Counts(), {"x": X.repeat(2, 1)})
    assert all(op.arg("device") == RankDevice() for op in graph.ops if op.target == "full")


def test_negative_dims_count_from_the_end() -> None:
    graph = trace(Computes(), {"x": X}, dynamic_dims={"x": {-2: "rows"}})
    assert graph.dynamic_dims[0].dim == 0


class FixesByInt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = 0.0
        for row in range(int(x.shape[0])):  # the line of the error
            total = total + x[row] * row
        return total


class FixesByAddition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize(
    "module", [FixesByInt(), FixesByAddition()], ids=lambda module: type(module).__name__
)
def test_a_fixed_dim_is_refused(module: nn.Module) -> None:
    with pytest.raises(TraceError) as caught:
        trace(module, {"x": X}, dynamic_dims=ROWS)
    first, where, why, hint = str(caught.value).split("\n")
    assert first == "the model fixes the dynamic dim 'rows' to 4"
    assert "test_dynamic.py:" in where
    if isinstance(module, FixesByInt):
        assert why == (
            "  why:   a loop in Python is traced for one number of steps, and this one runs over "
            "it: for row in range(int(x.shape[0])):  # the line of the error"
        )
        assert hint == (
            "  try:   leave 'rows' out of dynamic_dims, pad inputs to a few lengths and compile "
            "once for each; or write the loop with a function that loops by itself "
            "(torch.cumsum, nn.LSTM)"
        )
    else:
        assert why == (
            "  why:   this line needs the size as a number, or compares it with a fixed one: "
            "return x * self.weight"
        )
        assert hint == (
            "  try:   compute with x.shape[...] instead (torch.sym_float(size) for float(size), "
            "math.sqrt for another library's), or leave 'rows' out of dynamic_dims"
        )


def test_a_loop_within_brackets_is_a_loop() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sum(x[i] for i in range(x.shape[0]))  # type: ignore[return-value]

    with pytest.raises(TraceError, match="a loop in Python is traced for one number of steps"):
        trace(Sums(), {"x": X}, dynamic_dims=ROWS)


def test_branches_on_sizes_become_conditions() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 3 else x

    graph = trace(Branches(), {"x": X}, dynamic_dims=ROWS)
    assert [str(condition) for condition in graph.conditions] == ["rows > 3"]
    assert "  where rows > 3\n" in print_graph(graph)


class LooksUp(nn.Module):
    """Chooses by the text of a size, as models with tables for several resolutions do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * {"4x6": 2.0, "7x6": 3.0}.get(f"{x.shape[0]}x{x.shape[1]:d}", 5.0)


def test_the_text_of_a_size_is_that_of_the_dummy_arguments_and_is_said() -> None:
    with pytest.warns(UserWarning, match="makes text of a dynamic size, which reads 4 in every"):
        graph = trace(LooksUp(), {"x": X}, dynamic_dims=ROWS)
    same_as_eager(graph, LooksUp(), {"x": X})


class Cuts(nn.Module):
    """Makes whole numbers of what follows from a size."""

    def __init__(self, cut: Callable[[float], int]) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return x[: self.cut(x.shape[0] * 0.5)].sum() * self.cut(x.shape[0] / 3)


def test_a_number_that_int_makes_of_a_size_is_said() -> None:
    with pytest.warns(UserWarning, match=r"test_dynamic.py:\d+: int\(\) makes the number 2 of"):
        graph = trace(Cuts(int), {"x": X}, dynamic_dims=ROWS)
    assert len(graph.conditions) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follows = trace(Cuts(math.floor), {"x": X}, dynamic_dims=ROWS)
    assert not any("floor" in str(condition) for condition in follows.conditions)


class Keys(nn.Module):
    """Takes a size for what only a plain number can be."""

    def forward(self, x: Tensor) -> Tensor:
        return x * {4: 2.0}[x.shape[0]]


def test_a_size_where_only_a_number_can_be_is_named() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Keys(), {"x": X}, dynamic_dims=ROWS)
    assert str(caught.value).split("\n")[-2:] == [
        "  why:   a dynamic size is given to what takes only a plain number",
        "  try:   compute with + - * // % and math, or leave the dim out of dynamic_dims",
    ]


def test_wrong_declarations() -> None:
    with pytest.raises(
        TraceError,
        match="dynamic_dims names an input that is not among the arguments: 'xx'\n  try:   did you "
        "mean 'x'?",
    ):
        trace(Computes(), {"x": X}, dynamic_dims={"xx": {0: "n"}})
    with pytest.raises(TraceError, match="dynamic_dims names dim 2 of 'x', which has 2 dims"):
        trace(Computes(), {"x": X}, dynamic_dims={"x": {2: "n"}})
    with pytest.raises(TraceError, match="dynamic dim 'rows' has size 1 in the dummy arguments\n"):
        trace(Computes(), {"x": X[:1]}, dynamic_dims=ROWS)
