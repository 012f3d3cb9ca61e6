"""Operators that give back their operand are left out; what looks like one and is not stays."""

from __future__ import annotations

import plans
import pytest
import torch
from torch import Tensor, nn
from tracing import same_as_eager

from shardwright.compiler.ir.graph_grammar import verify
from shardwright.compiler.passes.identities import without_identities
from shardwright.compiler.trace.entry import trace

DOUBLE = torch.float64
CASES = {
    "whole numbers plus 0": (lambda x: x.long() + 0, 1),
    "0 plus whole numbers": (lambda x: 0 + x.long(), 1),
    "plus 0 turns -0.0 to 0.0": (lambda x: x + 0, 0),
    "plus -0.0": (lambda x: x + -0.0, 1),
    "minus 0": (lambda x: x - 0, 1),
    "minus -0.0": (lambda x: x - -0.0, 0),
    "0 minus": (lambda x: 0 - x, 0),
    "times 1.0": (lambda x: x * 1.0, 1),
    "1 times": (lambda x: 1 * x, 1),
    "whole numbers times 1.0 are floating": (lambda x: x.long() * 1.0, 0),
    "truth times 1 is a number": (lambda x: (x > 0) * 1, 0),
    "complex times 1": (lambda x: torch.complex(x, x.log()) * 1, 0),
    "over 1": (lambda x: x / 1, 1),
    "1 over": (lambda x: 1 / x, 0),
    "rounded down": (lambda x: torch.div(x, 1, rounding_mode="floor"), 0),
    "whole numbers over 1 are floating": (lambda x: x.long() / 1, 0),
    "all of it": (lambda x: x[:, 0:], 1),
    "all but one": (lambda x: x[:, 1:], 0),
    "a dim more": (lambda x: x[..., None], 0),
    "contiguous twice": (lambda x: x.transpose(0, 1).contiguous().reshape(-1).contiguous(), 1),
    "contiguous once": (lambda x: x.contiguous().transpose(0, 1).contiguous(), 0),
    "a chain": (lambda x: ((x * 1.0) / 1) - 0, 3),
    "cut from gradients": (lambda x: _detached(x.sin()) * x, 0),
}


def _detached(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1.0


class Calls(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.sin()).cos()


@pytest.mark.parametrize("case", CASES)
def test_what_gives_back_its_operand_is_left_out(case: str) -> None:
    function, left_out = CASES[case]
    module, inputs = (
        Calls(function),
        {"x": torch.tensor([[0.0, -0.0, 2.0], [-1.5, float("inf"), float("nan")]])},
    )
    graph = trace(module, inputs)
    cleaned = without_identities(graph)
    verify(cleaned)
    assert len(graph.ops) - len(cleaned.ops) == left_out
    same_as_eager(cleaned, module, {"x": torch.tensor([[0.0, -0.0, 2.0], [-1.5, 0.5, 3.0]])})


def test_what_is_returned_is_a_tensor_of_its_own() -> None:
    graph = trace(Calls(lambda x: x), {"x": torch.ones(2)})
    assert without_identities(graph) is graph
    graph = trace(Copies(), {"x": torch.ones(2)})
    assert [op.target for op in without_identities(graph).ops] == ["mul"]


class Copies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


class Counts(nn.Module):
    """Reads a buffer before it changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        before = self.total.view(3) * 1.0
        self.total += x.detach()
        return (x * before).sum()


def test_a_copy_of_a_buffer_that_changes_stays() -> None:
    graph = trace(Counts(), {"x": torch.ones(3, dtype=DOUBLE)})
    assert without_identities(graph) is graph


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generated_files_have_none(name: str) -> None:
    text = plans.compile_with(plans.zoo_traced(name), "tp", 2).files["gencode0.py"]
    assert "torch.arange" in text
    for sign in (" + 0 ", " * 1.0 ", "[:, 0:"):
        assert sign not in text
    layers = text[text.index("_block(self, block") :]
    assert layers.count(".contiguous()") == 1
