"""Sizes of pieces are written by the dim and the axis that they come from, and have the values of
the program.
"""

from __future__ import annotations

import re
from pathlib import Path

import plans
import pytest
import torch
from parity import reference_run
from torch import Tensor, nn

from shardwright.compiler.codegen.local_sizes import sizes_in, spelled
from shardwright.compiler.plan.program import Compute


class Heads(nn.Module):
    """Scores of 4 heads from three projections, with a variable called like the number of a rank's
    heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 48), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        local_heads = x * 2
        query, key, value = self.query(local_heads).split(16, dim=-1)
        heads = (query * key + value).view(4, 6, 4, 4).transpose(1, 2).softmax(-1)
        return self.out(heads.transpose(1, 2).reshape(4, 6, 16)).square().mean()


X = {"x": torch.linspace(-1, 1, 4 * 6 * 8, dtype=torch.float64).reshape(4, 6, 8)}


@pytest.mark.parametrize(
    ("policy", "lines"),
    [
        (
            "tp",
            [
                "local_heads_1 = tp.local_size(4)",
                ".split(4 * local_heads_1, dim=-1)",
                ".view(4, 6, local_heads_1, 4)",
                ".reshape(4, 6, 4 * local_heads_1)",
            ],
        ),
        (
            "data",
            [
                "local_batch = dp.local_size(4)",
                ".split(16, dim=-1)",
                ".view(local_batch, 6, 4, 4)",
                ".reshape(local_batch, 6, 16)",
            ],
        ),
    ],
)
def test_a_method_names_the_sizes_of_its_pieces(
    policy: str, lines: list[str], tmp_path: Path
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Heads().double()
    compiled = plans.compile_with(plans.traced(module, X), policy, 2)
    text = compiled.files["gencode0.py"]
    for line in lines:
        assert text.count(line) == 1, text
    plans.check(module, X, compiled, tmp_path, reference_run(module, [X], steps=1))


def test_every_size_that_depends_on_the_split_is_an_expression() -> None:
    """Queries of several heads for one key, in a model of transformers: no view has a bare number
    for its heads.
    """
    compiled = plans.compile_with(plans.zoo_traced("llama"), "tp", 2)
    program, mesh = compiled.program, compiled.program.plan.mesh
    views = [
        i
        for i in program.body
        if isinstance(i, Compute) and i.op.target in ("view", "reshape") and i.assignment
    ]
    assert views
    for view in views:
        assert sizes_in(spelled(view, mesh))
    text = compiled.files["gencode0.py"]
    assert re.search(r"\.reshape\(\d+, \d+, \d+ \* local_kv_heads\)", text)


def test_a_call_that_nothing_splits_is_as_it_was() -> None:
    program = plans.compile_with(plans.zoo_traced("llama"), "dp", 1).program
    assert all(
        spelled(i, program.plan.mesh) is i.op for i in program.body if isinstance(i, Compute)
    )
