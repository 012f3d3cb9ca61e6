"""Functions that draw random numbers, found where the modules of the original were."""

from __future__ import annotations

import copy

import pytest
import torch

from shardwright.runtime.layout import Mesh
from shardwright.runtime.ops import dropout
from shardwright.runtime.ops.random import Draw, RngState
from shardwright.runtime.ops.random_functions import RandomFunctions, add_function

ONES = torch.ones(64, dtype=torch.float64)


@pytest.mark.parametrize("path", ["add.x", "h.add_function", "a-b.dropout", "_below.x", "h.0_1"])
def test_paths(path: str) -> None:
    """They lead to what draws under their names, whatever else lies on the way."""
    rng = RngState(1)
    functions = RandomFunctions()
    assert not functions
    for other in ("h.0.dropout", "h.0", "h"):
        add_function(functions, other, dropout, Draw(rng, other))
    add_function(functions, path, dropout, Draw(rng, path))
    expected = dropout(ONES, draw=rng.draw(path))
    assert functions and torch.equal(functions[path](ONES), expected)
    assert torch.equal(functions.h[0].dropout(ONES), functions["h.0.dropout"](ONES))
    assert not torch.equal(functions.h(ONES), functions.h[0](ONES))


def test_a_layout_with_names_is_given_their_values() -> None:
    """Each call draws the whole, and takes its piece."""
    mesh = Mesh((("dp", 2),))
    whole = dropout(ONES, draw=RngState(1).draw("h", layout="[64]"))
    for size in (64, 32):
        for rank in range(2):
            rng = RngState(1, "plan_independent", mesh, {"dp": rank})
            functions = RandomFunctions()
            add_function(functions, "h", dropout, Draw(rng, "h"), "[seq/dp]")
            half = size // 2
            found = functions.h(ONES[:half], sizes={"seq": size})
            assert torch.equal(found, whole[rank * half :][:half])


def test_copies_draw_by_their_own_state() -> None:
    rng = RngState(1)
    functions = RandomFunctions()
    add_function(functions, "h.0", dropout, rng.draw("h_0"))
    its_rng, copied = copy.deepcopy((rng, functions))
    first = functions.h[0](ONES)
    rng.next_step()
    assert torch.equal(copied.h[0](ONES), first) and not torch.equal(functions.h[0](ONES), first)
    its_rng.next_step()
    assert torch.equal(copied.h[0](ONES), functions.h[0](ONES))
