"""Dropout of attention weights that are drawn tile by tile."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shardwright.runtime.layout import Mesh
from shardwright.runtime.ops import (
    attention_where,
    scaled_dot_product_attention,
    split_attention,
)
from shardwright.runtime.ops.attention_dropout import SQUARE, WeightDropout
from shardwright.runtime.ops.random import RngState
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.runs import Run, dealt

LENGTH = 2 * SQUARE + 88
CPU = torch.device("cpu")


def drop(layout: str, mesh: Mesh | None = None, **coords: int) -> WeightDropout:
    rng = RngState(1, "plan_independent", mesh, coords)
    return WeightDropout.of(0.5, (), rng.draw("weights", layout=layout))


def test_tiles_are_parts_of_one_draw() -> None:
    """A rank has two of four heads, and queries in zigzag; keys come in pieces."""
    everything: tuple[Run, ...] = ((0, LENGTH),)
    whole = drop(f"[1, 4, {LENGTH}, {LENGTH}]").kept((0, 1), everything, everything, CPU)
    # Each square is drawn for itself.
    assert not torch.equal(whole[..., :SQUARE, :SQUARE], whole[..., SQUARE:-88, :SQUARE])
    mesh = Mesh((("cp", 2), ("tp", 2)), (("cp", 1),))
    for cp, tp in itertools.product(range(2), repeat=2):
        own = drop(f"[1, 4/tp, {LENGTH}/cp, {LENGTH}]", mesh, cp=cp, tp=tp)
        rows = dealt(LENGTH, 2, cp, turns=1)
        queries = torch.cat([torch.arange(start, start + n) for start, n in rows])
        heads = whole[:, 2 * tp : 2 * tp + 2, queries]
        for column in ((0, 250), (250, LENGTH - 250)):
            found = own.kept((0, 1), rows, (column,), CPU)
            assert torch.equal(found, heads.narrow(-1, *column))


def test_the_random_state_of_a_draw_stays() -> None:
    """Backward may run when the step is another one."""
    rng = RngState(1)
    dropout = WeightDropout.of(0.5, (1, 2, 8, 8), rng.draw("weights"))
    tile = ((0, 1), ((0, 8),), ((0, 8),), CPU)
    first = dropout.kept(*tile)
    rng.next_step()
    assert torch.equal(dropout.kept(*tile), first)


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_fast_draws_are_the_same_in_backward(probability: float) -> None:
    """The output is linear in the values: with their gradient it gives the same number twice. Ranks
    drop different weights, and each half of them.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 1, 40, 4, generator=generator, dtype=torch.float64)

    def rank(index: int) -> tuple[float, float, Tensor]:
        axis = RankMesh(Mesh((("cp", 2),))).axis("cp")
        own = [x[:, :, 20 * index :][:, :, :20].clone() for x in (query, key, value)]
        ones = torch.ones_like(own[2]).requires_grad_()
        rng = RngState(0, "fast", Mesh((("cp", 2),)), {"cp": index})
        out = scaled_dot_product_attention(
            own[0],
            own[1],
            ones,
            dropout_p=probability,
            draw=rng.draw("weights", "cp"),
            query_axes=(axis,),
            key_axes=(axis,),
            lengths=(40, 40),
        )
        rng.next_step()
        out.sum().backward()
        assert ones.grad is not None
        return out.sum().item(), ones.grad.sum().item(), out.detach()

    found = run_ranks(2, rank)
    total = sum(out for out, _, _ in found)
    assert sum(grad for _, grad, _ in found) == pytest.approx(total, rel=1e-12)
    assert total == pytest.approx(2 * 40 * 4 if probability < 1 else 0.0, rel=0.1)
    assert torch.equal(found[0][2], found[1][2]) == (probability == 1)


def test_without_dropout_the_keys_go_round_all_the_same() -> None:
    """Evaluation: the rate is 0 then."""
    query, key, value = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)

    def rank(index: int) -> tuple[Tensor, Tensor]:
        axis = RankMesh(Mesh((("cp", 2),))).axis("cp")
        own = [x[:, :, 3 * index :][:, :, :3] for x in (query, key, value)]
        places = {"query_axes": (axis,), "key_axes": (axis,), "lengths": (6, 6)}
        drawn = scaled_dot_product_attention(*own, draw=RngState(0).draw("a"), **places)
        return drawn, split_attention(*own, **places)

    for drawn, plain in run_ranks(2, rank):
        assert torch.equal(drawn, plain)


@pytest.mark.parametrize("blind", ["zeros", "mean"])
def test_weights_of_capped_scores_with_sinks_are_dropped_as_written_out(blind: str) -> None:
    """Output and gradients, of a window: a sink has its part of the weights, and is not dropped."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 9, 4), (2, 2, 9, 4), (2, 2, 9, 4), (4,)]
    given = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    sinks_too = blind == "zeros"
    place = torch.arange(9)
    counts = place != 0  # the first query sees nothing
    draw = RngState(1, "plan_independent").draw("weights", layout="[2, 4, 9, 9]")

    def ours(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        marks = (place.view(1, 1, 9, 1), place.view(1, 1, 9, 1) - 4, True)
        of_keys = (place.view(1, 1, 1, 9), place.view(1, 1, 1, 9), counts.view(1, 1, 1, 9))
        return attention_where(
            query, key, value, marks, of_keys, ("le", "gt", "eq"), sinks if sinks_too else None,
            cap=2.0, blind=blind, dropout_p=0.5, draw=draw,
        )  # fmt: skip

    def written_out(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        seen = (place <= place[:, None]) & (place > place[:, None] - 4) & counts
        scores = 2.0 * torch.tanh(query @ key.transpose(-1, -2) / 2 / 2.0)
        scores = scores + torch.zeros(9, 9, dtype=scores.dtype).masked_fill(~seen, -1e38)
        if sinks_too:
            scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 9, 1)], -1)
        weights = scores.softmax(-1)[..., :9]
        return drop("[2, 4, 9, 9]").dropped(weights) @ value

    results = []
    for function in (ours, written_out):
        leaves = [x.clone().requires_grad_() for x in given]
        out = function(*leaves)
        out.cos().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves[: 3 + sinks_too])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_fast_draws_of_blocks_are_the_same_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of capped scores, of some queries at a time: as above."""
    monkeypatch.setattr("shardwright.runtime.ops.attention_written_out.MOST_SCORES", 100)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 40, 4, generator=generator, dtype=torch.float64)
    ones = torch.ones(2, 3, 40, 4, dtype=torch.float64, requires_grad=True)
    marks = [(torch.arange(40).view(1, 1, 40, 1),), (torch.arange(40).view(1, 1, 1, 40),)]
    rng = RngState(0)
    draw = rng.draw("weights")
    out = attention_where(query, key, ones, *marks, ("le",), cap=2.0, dropout_p=0.5, draw=draw)
    rng.next_step()
    out.sum().backward()
    assert ones.grad is not None
    assert ones.grad.sum().item() == pytest.approx(out.sum().item(), rel=1e-12)
    # Each weight is dropped for itself.
    assert out.sum().item() == pytest.approx(2 * 3 * 40 * 4, rel=0.1)
    assert len(out[..., 0].unique()) > 200
