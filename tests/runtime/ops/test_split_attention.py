"""Attention whose keys go round, against attention on one device: numbers, and what is sent. That
it is right for every kind of operands, the rule prover shows.
"""

from __future__ import annotations

import itertools
import sys
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.layout import Mesh
from shardwright.runtime.ops import attention_blocks, attention_where, split_attention
from shardwright.runtime.ops.attention_blocks import WrittenOut
from shardwright.runtime.ranks.counters import CommunicationCounters
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.runs import dealt, joined
from shardwright.runtime.visible_keys import earlier_keys, pairs

LENGTH = 24


def operands(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key, value, with two query heads to a key head, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, LENGTH, 8) for heads in (4, 2, 2, 4)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def own_places(size: int, index: int, turns: int) -> Tensor:
    runs = dealt(LENGTH, size, index, turns=turns)
    return torch.tensor([i for start, n in runs for i in range(start, start + n)])


def on_ranks(
    size: int, turns: int, dtype: torch.dtype, causal: bool
) -> list[tuple[list[Tensor], CommunicationCounters]]:
    """Output and gradients of every rank, and what it received."""

    def rank(index: int) -> tuple[list[Tensor], CommunicationCounters]:
        mesh = Mesh((("cp", size),), (("cp", turns),) if turns else ())
        axis = RankMesh(mesh).axis("cp")
        at = own_places(size, index, turns)
        *given, grad = (x[:, :, at].clone() for x in operands(dtype))
        given = [x.requires_grad_() for x in given]
        with count_communication() as counted:
            out = split_attention(
                *given,
                is_causal=causal,
                enable_gqa=True,
                query_axes=(axis,),
                key_axes=(axis,),
                lengths=(LENGTH, LENGTH),
            )
            out.backward(grad)
        # Models join heads and width behind it: in this order of dims that is a view.
        assert out.transpose(1, 2).is_contiguous()
        return [out.detach(), *(x.grad for x in given if x.grad is not None)], counted

    return run_ranks(size, rank)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("turns", [0, 1])
def test_counters_equal_the_formulas(size: int, turns: int) -> None:
    """Each rank receives, on average, the share of all keys and values that its queries see."""
    key, value = operands(torch.float64)[1:3]
    whole = key.numel() + value.numel()
    others = Fraction(size - 1, size)
    for causal in (False, True):
        needed = others
        if causal:
            needed *= Fraction(3, 4) if turns else Fraction(1, 2)
        found = [counted for _, counted in on_ranks(size, turns, torch.float64, causal)]
        for phase, times in (("forward", 1), ("backward", 2)):
            received = sum(c.total("all_to_all", phase=phase).received for c in found)
            assert Fraction(received) / size == times * needed * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    """Blocks are merged in float32: the error is that of one device, within a small factor."""
    exact = _whole(operands(torch.float64))
    rounded = _whole(operands(dtype))
    for index, (parts, _) in enumerate(on_ranks(3, 2, dtype, causal=True)):
        at = own_places(3, index, turns=2)
        for part, one, true in zip(parts, rounded, exact, strict=True):
            own = (one.double() - true).abs().max()
            assert part.dtype == dtype
            assert (part.double() - true[:, :, at]).abs().max() <= 3 * own


def _whole(given: tuple[Tensor, ...]) -> list[Tensor]:
    query, key, value, grad = (x.clone() for x in given)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def test_kernels_and_the_written_out_form_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = on_ranks(2, 3, torch.float64, causal=True)
    module = sys.modules[split_attention.__module__]  # its name is that of the function
    monkeypatch.setattr(module, "kernel_for", lambda *args, **drops: WrittenOut())
    # Two queries at a time, of 2 samples with 4 heads.
    monkeypatch.setattr(attention_blocks, "MOST_SCORES", 2 * 4 * 2 * 4)
    written = on_ranks(2, 3, torch.float64, causal=True)
    for (found, _), (expected, _) in zip(written, kernel, strict=True):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


class _Largest(TorchDispatchMode):
    """Notes the most elements that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_capped_scores_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in parts of 1,024 scores is what it is written out, and no tensor is larger."""
    length, cap = 96, 3.0
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, heads, length, 4, generator=generator, dtype=torch.float64)
        for heads in (2, 1, 1, 2)
    )
    leaves = [x.requires_grad_() for x in (query, key, value)]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    scores = cap * (query @ key.transpose(2, 3) * 0.5 / cap).tanh()
    written = scores.masked_fill(causal.logical_not(), -torch.inf).softmax(-1) @ value
    expected = [written.detach(), *torch.autograd.grad(written, leaves, grad)]

    monkeypatch.setattr(attention_blocks, "MOST_SCORES", 1024)
    with _Largest() as largest:
        bands = ((0, length, 0, 1, 0, 1),)
        out = attention_where(query, key, value, bands=bands, scale=0.5, cap=cap)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert largest.elements <= 1024


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_all_ranks_the_same_work(size: int) -> None:
    length = 4096
    bands = earlier_keys(length, length)
    work = {
        turns: [
            pairs(bands, joined(dealt(length, size, rank, turns=turns))) for rank in range(size)
        ]
        for turns in (0, 1, 8)
    }
    mean = sum(work[1]) / size
    assert max(work[1]) / mean < 1.001
    assert max(work[8]) / mean < 1.001
    assert max(work[0]) / mean > 2 - 1.01 / size


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize(("count", "size"), list(itertools.product((0, 1, 5, 8, 13), (1, 2, 3, 5))))
def test_zigzag_deals_everything_once(count: int, size: int, turns: int) -> None:
    dealt_out = [dealt(count, size, rank, turns=turns) for rank in range(size)]
    plain = [dealt(count, size, rank, turns=0) for rank in range(size)]
    assert sorted(i for runs in dealt_out for s, n in runs for i in range(s, s + n)) == list(
        range(count)
    )
    for runs, ((_, length),) in zip(dealt_out, plain, strict=True):
        assert sum(n for _, n in runs) == length
        assert list(runs) == sorted(runs)


def test_turns_deal_boustrophedon() -> None:
    assert dealt(8, 2, 0, turns=1) == ((0, 2), (6, 2))
    assert dealt(8, 2, 0, turns=2) == ((0, 1), (3, 1), (4, 1), (7, 1))
    assert dealt(8, 2, 1, turns=2) == ((1, 1), (2, 1), (5, 1), (6, 1))
