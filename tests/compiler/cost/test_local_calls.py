"""The local sizes that costs are computed from are those of the layouts that lowering gives."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from covers import spread
from example_ops import all_calls, example_op
from in_shares import Named, check_each, shares
from op_examples import Call

from shardwright.compiler.cost.local_calls import local_bytes, local_call, local_shape
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import allowed, layouts, strategies
from shardwright.runtime.layout import Layout, Mesh

MESHES = [Mesh((("a", 2), ("b", 1))), Mesh((("a", 2), ("b", 3)))]


@pytest.mark.parametrize("calls", spread(shares(all_calls()), 3, first=1))
def test_local_shapes_are_those_of_the_rank_at_index_0(calls: Sequence[Named]) -> None:
    check_each(calls, check_shapes)


def check_shapes(name: str, call: Call) -> None:
    op, _ = example_op(call)
    assert op.rule is not None
    if op.rule.densities is not None:  # how many rows a rank has is assumed
        return
    for mesh in MESHES:
        origin = dict.fromkeys(mesh.names, 0)
        for chosen in itertools.product(strategies(op.rule), repeat=2):
            assignment = dict(zip(mesh.names, chosen, strict=True))
            if not allowed(op.rule, assignment, mesh):
                continue
            found = local_call(op, assignment, mesh)
            operands, results = layouts(op.rule, assignment, mesh)
            assert [x.shape for x in found.operands] == [
                layout.local_shape(mesh, origin) for layout in operands
            ], assignment
            assert [x.shape for x in found.results] == [
                layout.local_shape(mesh, origin) for layout in results
            ], assignment


def test_the_largest_piece_of_segments_and_of_several_axes() -> None:
    mesh = Mesh((("dp", 2), ("tp", 3)))
    layout = Layout.parse("[5/dp * 4, 32+8+7/tp * 2]")
    assert local_shape(layout, mesh) == (3 * 4, (11 + 3 + 3) * 2)
    assert local_shape(Layout.parse("[10/tp/dp]"), mesh) == (2,)


def test_bytes_follow_the_dtype() -> None:
    assert local_bytes(Layout.parse("[10/tp, 3]"), torch.bfloat16, Mesh((("tp", 4),))) == 3 * 3 * 2


def test_differentiated_operands(linear: IROp) -> None:
    call = local_call(linear, {}, Mesh())
    assert call.differentiated == (0, 1, 2)


@pytest.fixture
def linear() -> IROp:
    return example_op(next(call for name, call in all_calls() if name == "products-0"))[0]
