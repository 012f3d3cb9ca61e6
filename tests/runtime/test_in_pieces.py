"""A function that runs piece by piece against the same function run once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright import count_communication, run_ranks
from shardwright.compiler.cost.fake.fake_rank import FakeRank
from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.runtime import in_pieces as module
from shardwright.runtime.in_pieces import TOTAL, Gather, Joined, Once, Piece, in_pieces, piece_of
from shardwright.runtime.layout import Cut, Mesh
from shardwright.runtime.ops import dropout
from shardwright.runtime.ops.random import RngState
from shardwright.runtime.ranks.groups import AxisGroup, RankMesh

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
            in_pieces(loss, "loss", count, taken, (TOTAL,)).backward()
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
        layout = f"[64{'/rows' if count > 1 else ''}]"
        result: Tensor = in_pieces(
            lambda piece, x: dropout(x, 0.5, draw=rng.draw("drop", layout=layout)),
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


def product_in_steps(
    x: Tensor, weight: Tensor, bias: Tensor, r: AxisGroup, c: AxisGroup, count: int
) -> Tensor:
    """``x`` has this rank's columns along ``c``, ``weight`` its columns along ``r``."""

    def product(piece: Piece, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    taken = (
        piece_of(x, 1, gather=Gather(c, 1, "reduce_scatter")),
        piece_of(weight, 1, gather=Gather(r, 1, "reduce_scatter")),
        Once(bias),
    )
    result: Tensor = in_pieces(product, "steps", count, taken, (TOTAL,))
    return result


SQUARE = Mesh((("r", 2), ("c", 2)))


def test_a_product_gathers_its_operands_in_pieces() -> None:
    """A linear on 2 x 2 ranks: the numbers of one device, and what the formulas say is received."""
    m, k, n = 6, 8, 10
    whole = [torch.randn(shape, dtype=torch.float64) for shape in ((m, k), (n, k), (n,))]

    def run(rank: int) -> list[Tensor]:
        ranks = RankMesh(SQUARE)
        r, c = ranks.axis("r"), ranks.axis("c")
        own = [
            whole[0].chunk(2, 0)[r.index].chunk(2, 1)[c.index],
            whole[1].chunk(2, 0)[c.index].chunk(2, 1)[r.index],
            whole[2].chunk(2)[c.index],
        ]
        own = [x.clone().requires_grad_() for x in own]
        with count_communication() as forward:
            y = product_in_steps(*own, r, c, 4)
        with count_communication() as backward:
            y.sin().sum().backward()
        assert forward.total().received == (m * k + k * n) / 4
        assert backward.total(phase="backward").received == 2 * (m * k + k * n) / 4
        assert forward.total(phase="backward").received == 0
        # Ranks along r have other rows, and so summands of the gradient of the bias.
        assert own[2].grad is not None
        own[2].grad = r.communicator.all_reduce(own[2].grad)
        return [y.detach(), *(x.grad for x in own if x.grad is not None)]

    leaves = [x.clone().requires_grad_() for x in whole]
    y = F.linear(*leaves)
    expected = [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]
    for rank, found in enumerate(run_ranks(4, run)):
        r, c = divmod(rank, 2)
        wanted = [
            expected[0].chunk(2, 0)[r].chunk(2, 1)[c],
            expected[1].chunk(2, 0)[r].chunk(2, 1)[c],
            expected[2].chunk(2, 0)[c].chunk(2, 1)[r],
            expected[3].chunk(2)[c],
        ]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_two_gathered_pieces_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the piece at hand of each operand, and the next one, whose gather began before. Beside
    them lies the result, so far and of this piece.
    """
    rank, order = FakeRank(SQUARE, zeros=True), list[str]()
    r, c = rank.axes["r"], rank.axes["c"]
    assert isinstance(r, AxisGroup) and isinstance(c, AxisGroup)
    m, k, n = 64, 96, 32
    x, weight, bias = torch.zeros(m, k // 2), torch.zeros(n, k // 2), torch.zeros(n)
    start, run = module.start_gather, F.linear

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            order.append(name)
            return function(*given)

        return call

    monkeypatch.setattr(module, "start_gather", noted("gather", start))
    monkeypatch.setattr(F, "linear", noted("product", run))
    held = x.numel() + weight.numel() + bias.numel()
    for count in (4, 12):
        order.clear()
        with torch.no_grad(), LiveBytes() as live:
            product_in_steps(x, weight, bias, r, c, count)
        both = ["gather"] * 2
        assert order == both + [*both, "product"] * (count - 1) + ["product"]
        assert live.peak / 4 == held + 2 * (m + n) * k / count + 2 * m * n
