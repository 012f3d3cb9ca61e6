"""A function that runs piece by piece against the same function run once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.runtime.in_pieces import TOTAL, Joined, Piece, in_pieces, piece_of
from shardwright.runtime.layout import Cut
from shardwright.runtime.ops import dropout
from shardwright.runtime.ops.random import RngState

B, S, H, V = 2, 5, 3, 7


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (
        torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((B, S, H), (V, H))
    )
    return hidden, weight, torch.randint(V, (B * S,))


def loss_of(piece: Piece, x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    assert x.shape[1] == piece.local_size(S) and x.is_contiguous()
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.view(-1, V), labels, reduction="sum"), logits


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("wanted", [True, False])
def test_pieces_give_what_the_whole_gives(count: int, wanted: bool) -> None:
    """Also where pieces differ in length, and where some are empty."""
    hidden, weight, labels = operands()

    def run(num_pieces: int) -> list[Tensor]:
        results = Joined(1, Cut((S,)), wanted=wanted)
        total, logits = in_pieces(
            loss_of,
            "loss",
            num_pieces,
            (piece_of(hidden, 1), weight, piece_of(labels, 0, Cut((S,), B))),
            (TOTAL, results),
            rng=RngState(0),
        )
        assert (logits is None) != wanted
        loss = total + logits.pow(2).sum() if wanted else total
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    for found, expected in zip(run(count), run(1), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_only_a_piece_is_there_at_a_time() -> None:
    """Logits are 100 times as large as anything else: of 10 pieces one lives, and its gradient."""
    hidden, weight = torch.randn(100, 2).requires_grad_(), torch.randn(400, 2).requires_grad_()
    labels = torch.randint(400, (100,))

    def loss(piece: Piece, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), labels, reduction="sum")

    def peak(count: int) -> int:
        with LiveBytes() as live:
            taken = (piece_of(hidden, 0), weight, piece_of(labels, 0))
            in_pieces(loss, "loss", count, taken, (TOTAL,), rng=RngState(0)).backward()
            return live.peak

    assert peak(10) < 0.2 * peak(1)


def test_sums_over_pieces_are_wide() -> None:
    """512 gradients of 1 in bfloat16 sum up to 512: in its own 8 bits the sum would stop at 256."""
    x = torch.ones(1024, dtype=torch.bfloat16)
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    total = in_pieces(
        lambda piece, x, weight: (x * weight).sum(),
        "rows",
        512,
        (piece_of(x, 0), weight),
        (TOTAL,),
        rng=RngState(0),
    )
    total.backward()
    assert weight.grad is not None
    assert total.item() == weight.grad.item() == 1024


@pytest.mark.parametrize("mode", ["fast", "plan_independent"])
def test_backward_draws_what_forward_drew(mode: str) -> None:
    """Elements that forward kept have a gradient, though another step has begun since. Pieces draw
    different numbers, and in mode ``plan_independent`` those of the whole.
    """
    x = torch.ones(64, dtype=torch.float64, requires_grad=True)
    rng = RngState(0, mode)  # type: ignore[arg-type]

    def drop(count: int) -> Tensor:
        layout = {"layout": f"[64{'/rows' if count > 1 else ''}]"}
        result: Tensor = in_pieces(
            lambda piece, x: dropout(x, 0.5, rng=rng, draw="drop", **layout),
            "rows",
            count,
            (piece_of(x, 0),),
            (Joined(0, Cut((64,))),),
            rng=rng,
        )
        return result

    found = drop(2)
    rng.next_step()
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(grad, found)
    assert not torch.equal(found[:32], found[32:])
    assert (mode == "fast") != torch.equal(drop(1), drop(2))
