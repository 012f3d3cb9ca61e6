"""The global norm: each distinct element once, whatever the layout."""

import pytest
import torch

from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.gradnorm import counts_here, global_norm, norm_dtype

MESH = Mesh((("dp", 2), ("tp", 3)))
LAYOUTS = [
    "[7, 4]",
    "[7/tp, 4] G(dp)",
    "[7/dp/tp, 4]",
    "[7, 3 * 4/tp] G(dp)",
    "[2/tp, 1]",
    "[5] G(dp, tp)",
    "[3/dp]",
]


@pytest.mark.parametrize("num_ranks", [6, 12])
def test_it_equals_one_device(num_ranks):
    generator = torch.Generator().manual_seed(0)
    layouts = [Layout.parse(text) for text in LAYOUTS]
    wholes = [
        torch.randn(layout.shape, dtype=torch.float64, generator=generator) for layout in layouts
    ]
    expected = torch.cat([whole.flatten() for whole in wholes]).norm()

    def norm(rank):
        ranks, counted = RankMesh(MESH), []
        for layout, whole in zip(layouts, wholes, strict=True):
            piece = whole
            for dim in range(whole.ndim):
                runs = layout.runs(dim, MESH, ranks.coords)
                piece = (
                    torch.cat([piece.narrow(dim, a, b - a) for a, b in runs], dim)
                    if runs
                    else piece.narrow(dim, 0, 0)
                )
            parameter = torch.nn.Parameter(torch.zeros_like(piece))
            parameter.grad = piece
            if counts_here(layout, ranks):
                counted.append(parameter)
        return global_norm(counted, current_world().everyone, torch.float64, torch.device("cpu"))

    norms = run_ranks(num_ranks, norm)
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    torch.testing.assert_close(norms[0], expected, rtol=1e-14, atol=0)


def test_low_precision_is_summed_in_a_wider_one():
    parameter = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1.2e10)
    assert norm_dtype([parameter]) == torch.float32
    norm = global_norm([parameter], current_world().everyone, torch.float32, torch.device("cpu"))
    # 10,000 roundings of float32, in lanes. A sum in bfloat16 would stop growing after some 256
    # terms.
    torch.testing.assert_close(
        norm, torch.tensor(parameter.grad[0].item() * 100), rtol=1e-5, atol=0
    )


def test_no_gradient_at_all():
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert (
        global_norm([parameter], current_world().everyone, torch.float32, torch.device("cpu")) == 0
    )
