"""Run an operator on one rank with whole tensors, and on several with pieces of them, and compare
results and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from placements import Placement, decode, encode, transposed
from torch import Tensor

from shardwright.runtime.layout import Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks


def assert_parallel(
    num_ranks: int,
    plain: Callable[..., Tensor],
    parallel: Callable[..., Tensor],
    operands: Sequence[tuple[Tensor, Placement]],
    result: Placement,
    *,
    tolerance: float = 1e-12,
) -> None:
    """``parallel(axis, *pieces)`` on every rank computes ``plain(*operands)``: the value, and the
    gradient of every operand.

    ``operands``: whole tensors and how they lie on the axis; those that require gradients are
    differentiated. ``result``: how the result lies. The gradient that comes in is random.
    """
    wholes = [x.detach().clone().requires_grad_(x.requires_grad) for x, _ in operands]
    expected = plain(*wholes)
    differentiated = [i for i, x in enumerate(wholes) if x.requires_grad]
    gradient = torch.randn(expected.shape, dtype=expected.dtype)
    expected_grads = (
        torch.autograd.grad(expected, [wholes[i] for i in differentiated], gradient)
        if differentiated
        else ()
    )

    pieces = [encode(x.detach(), placement, num_ranks) for x, placement in operands]
    gradients = encode(gradient, transposed(result), num_ranks)

    def on_rank(rank: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        axis = RankMesh(Mesh((("tp", num_ranks),))).axis("tp")
        local = [
            p[rank].clone().requires_grad_(x.requires_grad)
            for p, (x, _) in zip(pieces, operands, strict=True)
        ]
        y = parallel(axis, *local)
        grads = (
            torch.autograd.grad(y, [local[i] for i in differentiated], gradients[rank])
            if differentiated
            else ()
        )
        return y.detach(), grads

    outputs = run_ranks(num_ranks, on_rank)
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(
        decode([y for y, _ in outputs], result),
        expected.detach(),
        **close,
        msg=lambda m: f"value: {m}",
    )
    for position, (operand, expected_grad) in enumerate(
        zip(differentiated, expected_grads, strict=True)
    ):
        lies = transposed(operands[operand][1])
        grad = decode([grads[position] for _, grads in outputs], lies)
        torch.testing.assert_close(
            grad,
            expected_grad,
            **close,
            msg=lambda m: f"gradient of operand {operand}: {m}",  # noqa: B023
        )


def on_mesh(mesh: Mesh, fn: Callable[[RankMesh], Any]) -> list[Any]:
    """``fn`` of every rank's mesh, on threads."""
    return run_ranks(mesh.size, lambda rank: fn(RankMesh(mesh)))
