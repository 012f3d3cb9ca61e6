"""Attention whose keys go round, against attention on one device: numbers, and what is sent. That
it is right for every kind of operands, the rule prover shows.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import astuple
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest import MonkeyPatch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.compiler.cost.fake.live_bytes import LiveBytes
from shardwright.runtime.layout import Mesh
from shardwright.runtime.marks import Seen
from shardwright.runtime.ops import attention_where, attention_written_out, split_attention
from shardwright.runtime.ops.attend_blocks import (
    attend,
    attend_backward,
    kernel_for,
    parts_of_backward,
)
from shardwright.runtime.ops.attention_blocks import Block
from shardwright.runtime.ops.attention_moves import moves_of
from shardwright.runtime.ops.attention_written_out import WrittenOut
from shardwright.runtime.ranks.counters import CommunicationCounters
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.runs import common, dealt, joined, without
from shardwright.runtime.visible_keys import EVEN, MOST_GUESTS, Band, earlier_keys, pairs

LENGTH = 24
split_attention_module = sys.modules[split_attention.__module__]  # its name is that of the function


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


def test_kernels_and_the_written_out_form_agree(monkeypatch: MonkeyPatch) -> None:
    kernel = on_ranks(2, 3, torch.float64, causal=True)
    monkeypatch.setattr(split_attention_module, "kernel_for", lambda *args, **drops: WrittenOut())
    # Two queries at a time, of 2 samples with 4 heads.
    monkeypatch.setattr(attention_written_out, "MOST_SCORES", 2 * 4 * 2 * 4)
    written = on_ranks(2, 3, torch.float64, causal=True)
    for (found, _), (expected, _) in zip(written, kernel, strict=True):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sees", ["all", "causal", "flipped", "bias"])
@pytest.mark.parametrize(("of_keys", "of_values"), [(8, 5), (5, 8)])
def test_keys_and_values_of_two_widths_take_a_kernel(
    sees: str, of_keys: int, of_values: int
) -> None:
    """It gives what the written-out form gives, though it takes one width alone."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in (
            (2, 4, 9, of_keys),
            (2, 2, 9, of_keys),
            (2, 2, 9, of_values),
            (2, 4, 9, of_values),
            (1, 1, 9, 9),
        )
    )
    given: dict[str, Any] = {"all": {}, "bias": {"bias": bias}}.get(sees, {sees: True})
    block = Block(query, key, value, 0.3, **given)
    kernel = kernel_for(query, key, value, None)
    assert not isinstance(kernel, WrittenOut)
    found, expected = [], []
    for form, results in ((kernel, found), (WrittenOut(), expected)):
        out, lse = attend(form, block)
        grads = attend_backward(form, block, grad, out, lse)
        results += [out, lse, grads.query, grads.key, grads.value]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sees", ["causal", "flipped"])
def test_gradients_of_causal_blocks_are_computed_in_parts(
    sees: str, monkeypatch: MonkeyPatch
) -> None:
    """The CPU's kernel computes hidden keys: 300 queries are seven parts, where calls cost nothing,
    and one where they cost more than they save. A flipped block is one.
    """
    query, key, value, grad = (torch.randn(1, heads, 300, 8).double() for heads in (4, 2, 2, 4))
    block = Block(query, key, value, 0.3, **{sees: True})  # type: ignore[arg-type]
    kernel = kernel_for(query, key, value, None)
    assert len(parts_of_backward(kernel, block)) == 1
    monkeypatch.setitem(split_attention_module.CALL_FLOP, "cpu", 0)
    out, lse = attend(kernel, block)
    whole = attend_backward(kernel, block, grad, out, lse)
    parts = parts_of_backward(kernel, block)
    assert len(parts) == (7 if sees == "causal" else 1)
    sums = [torch.zeros_like(x) for x in (query, key, value)]
    for part in parts:
        given = (x.narrow(2, *part.queries) for x in (grad, out, lse))
        found = attend_backward(kernel, part.block, *given)
        runs = (part.queries, part.keys, part.keys)
        for total, run, more in zip(sums, runs, (found.query, found.key, found.value), strict=True):
            total.narrow(2, *run).add_(more)
    for total, one in zip(sums, (whole.query, whole.key, whole.value), strict=True):
        torch.testing.assert_close(total, one, rtol=1e-12, atol=1e-12)


class _Count(TorchDispatchMode):
    """Counts operators."""

    operators = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cap", [None, 3.0])
def test_fake_tensors_say_what_many_tiles_take_by_a_few(
    cap: float | None, monkeypatch: MonkeyPatch
) -> None:
    """The peaks of forward and backward are those of real tensors. Four times as many tiles, or
    parts of scores, take no operator more.
    """
    monkeypatch.setattr(attention_written_out, "MOST_SCORES", 2**16)
    monkeypatch.setitem(split_attention_module.CALL_FLOP, "cpu", 0)

    def measured(length: int, mode: Any) -> tuple[int, int, int]:
        window = earlier_keys(length, length, 16)
        with mode, _Count() as count:
            leaves = [
                torch.zeros(2, heads, length, width, requires_grad=True)
                for heads, width in ((4, 8), (2, 8), (2, 6))
            ]
            with LiveBytes(leaves) as live:
                bands = tuple(astuple(band) for band in window)
                out = attention_where(*leaves, sinks=torch.zeros(4), bands=bands, cap=cap)
                forward = live.peak
                live.restart()
                torch.autograd.grad(out, leaves, torch.zeros_like(out))
        return forward, live.peak, count.operators

    fake = measured(1024, FakeTensorMode())
    real = measured(1024, nullcontext())
    assert fake[:2] == real[:2]
    assert measured(4096, FakeTensorMode())[2] == fake[2]


class _Largest(TorchDispatchMode):
    """Notes the most elements that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_capped_scores_are_never_whole(monkeypatch: MonkeyPatch) -> None:
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

    monkeypatch.setattr(attention_written_out, "MOST_SCORES", 1024)
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


ROWS = ((3, 21), (24,), (13, 2, 9), (1, 1, 22))
"""Lengths of documents."""


@pytest.mark.parametrize(
    ("size", "turns", "ring", "rows"),
    [
        (2, 0, True, ROWS[:2]),
        (3, 0, True, ROWS[2:]),
        (4, 1, True, ROWS[1:3]),
        (3, 1, False, ROWS[2:]),
        (4, 1, True, ()),
        (2, 1, False, ()),
        (4, 0, False, ()),
    ],
)
def test_queries_move_to_ranks_with_less_to_do(
    size: int, turns: int, ring: bool, rows: Sequence[Sequence[int]], monkeypatch: MonkeyPatch
) -> None:
    """Queries of documents move. So do those of a window of half of the positions, in zigzag.
    Numbers are those of one device, sinks included, and messages those of the moves.
    """
    monkeypatch.setitem(split_attention_module.CALL_FLOP, "cpu", 0)
    window = earlier_keys(LENGTH, LENGTH, LENGTH // 2)
    marks: dict[str, Any] = {"bands": tuple(astuple(band) for band in window)}
    seen: tuple[Seen, ...] = (Seen((0, 2), window),)
    if rows:
        lengths = [torch.tensor(row) for row in rows]
        document = torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in lengths])
        place = torch.arange(LENGTH)
        marks = {
            "query_marks": (document[:, None, :, None], place[None, None, :, None]),
            "key_marks": (document[:, None, None], place[None, None, None]),
            "comparisons": ("eq", "le"),
        }
        seen = tuple(
            Seen((sample, 1), documents_of(row), exact=True) for sample, row in enumerate(rows)
        )
    *whole, grad = operands(torch.float64)
    whole.append(torch.linspace(-1, 1, 4, dtype=torch.float64))
    cut = (True, ring, ring, False)

    def rank(index: int) -> tuple[list[Tensor], CommunicationCounters]:
        axis = RankMesh(Mesh((("cp", size),), (("cp", turns),) if turns else ())).axis("cp")
        at = own_places(size, index, turns)
        leaves = [
            (x[:, :, at] if is_cut else x).clone().requires_grad_()
            for x, is_cut in zip(whole, cut, strict=True)
        ]
        with count_communication() as counted:
            out = attention_where(
                *leaves[:3],
                **marks,
                sinks=leaves[3],
                query_axes=(axis,),
                key_axes=(axis,) if ring else (),
                lengths=(LENGTH, LENGTH),
            )
            out.backward(grad[:, :, at])
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)], counted

    leaves = [x.clone().requires_grad_() for x in whole]
    out = attention_where(*leaves[:3], **marks, sinks=leaves[3])
    expected = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    found = run_ranks(size, rank)
    for number, (true, is_cut) in enumerate(zip(expected, (True, *cut), strict=True)):
        parts = [results[number] for results, _ in found]
        if is_cut:
            for index, part in enumerate(parts):
                own = true[:, :, own_places(size, index, turns)]
                torch.testing.assert_close(part, own, rtol=1e-12, atol=1e-12)
        else:
            # Whole keys, and sinks, have summands of their gradients on all ranks.
            torch.testing.assert_close(sum(parts), true, rtol=1e-12, atol=1e-12)
    queries = tuple(joined(dealt(LENGTH, size, rank, turns=turns)) for rank in range(size))
    moves = moves_of(seen, queries, 0) if rows or turns else ()
    assert bool(moves) == bool(rows or turns)
    if not ring:
        # A query goes and its output comes; backward the same with their gradients.
        moved = sum(move.samples[1] * move.queries[1] for move in moves)
        for phase in ("forward", "backward"):
            received = sum(c.total("all_to_all", phase=phase).received for _, c in found)
            assert received == moved * 4 * (8 + 8)


def documents_of(lengths: Sequence[int]) -> tuple[Band, ...]:
    """What is seen in a row of documents that are causal."""
    ends = list(itertools.accumulate(lengths))
    return tuple(
        Band(end - n, end, end - n, end - n + 1, 0, 1) for n, end in zip(lengths, ends, strict=True)
    )


@pytest.mark.parametrize(("length", "size"), [(32768, 4), (32768, 8), (4096, 7)])
def test_moves_even_out_documents_with_a_long_tail_of_lengths(length: int, size: int) -> None:
    """Two rows of them, whose lengths are log-normal: no rank has 2 % more pairs than the mean,
    each query is computed once, and few move.
    """
    generator = torch.Generator().manual_seed(0)
    queries = tuple(joined(dealt(length, size, rank, turns=1)) for rank in range(size))
    for _ in range(10):
        seen = []
        for sample in range(2):
            shares = torch.randn(33, generator=generator).exp()
            lengths = (shares / shares.sum() * (length - 33)).long() + 1
            lengths[0] += length - lengths.sum()
            seen.append(Seen((sample, 1), documents_of(lengths.tolist())))
        work, moved = [0] * size, 0
        moves = moves_of(tuple(seen), queries, 0)
        for some in seen:
            for rank, own in enumerate(queries):
                mine = [move for move in moves if move.samples == some.samples]
                given = joined(move.queries for move in mine if move.source == rank)
                taken = joined(move.queries for move in mine if move.target == rank)
                assert common(own, given) == given and not common(own, taken)
                computed = joined((*without(own, given), *taken))
                work[rank] += pairs(some.bands, computed)
                moved += sum(n for _, n in taken)
        assert sum(work) == sum(pairs(some.bands, ((0, length),)) for some in seen)
        assert max(work) * size <= EVEN * sum(work)
        assert moved < 0.3 * 2 * length
    assert moves_of(tuple(seen), queries, sum(work)) == ()


def test_a_rank_that_waits_for_guests_keeps_no_other_from_going_on() -> None:
    """Ranks are threads: the second must reach its own, as the first waits for it."""
    began, sent = threading.Event(), threading.Event()

    def waits() -> list[int]:
        began.set()
        return [int(sent.wait(10))]

    first, second = (split_attention_module._OfAll(0, make) for make in (waits, list))
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(lambda: first.guests)
        assert began.wait(10) and threads.submit(lambda: second.guests).result(5) == []
        sent.set()
        assert waiting.result() == [1]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("part", [1, 1.5, 2, 3, 4, 8, 64])
def test_moves_even_out_what_a_window_leaves(size: int, part: float) -> None:
    """A window that is ``1 / part`` of 4,099 positions, dealt in zigzag. All of them, which is
    causal attention, is even as it is, to the pairs of one query.
    """
    length = 4099
    bands = earlier_keys(length, length, int(length / part))
    queries = tuple(dealt(length, size, rank, turns=1) for rank in range(size))
    work = [pairs(bands, own) for own in queries]
    assert part > 1 or max(work) - min(work) <= length
    moves = moves_of((Seen((0, 1), bands),), queries, 0)
    assert bool(moves) == (max(work) * size > EVEN * sum(work)) == (1 < part < 64)
    for move in moves:
        moved = pairs(bands, (move.queries,))
        work[move.source] -= moved
        work[move.target] += moved
    assert max(work) * size <= EVEN * sum(work)


@pytest.mark.parametrize("blind", ["mean", "constant", "nan"])
def test_a_query_without_keys_gets_what_one_device_makes_of_it(blind: str) -> None:
    """Scores are replaced by a large number, or one is added, or minus infinity: values alike, or
    nan; gradients reach scores only where something was added.
    """
    query, key, value = (torch.randn(2, 3, 6, 4, dtype=torch.float64) for _ in range(3))
    counts = torch.arange(6) >= torch.tensor([[2], [0]])
    place = torch.arange(6)
    seen = (place[None, :] <= place[:, None]) & counts[:, None, None]

    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores, least = query @ key.mT / 2, torch.finfo(query.dtype).min
        if blind == "constant":
            scores = scores.masked_fill(~seen, least)
        else:
            added = query.new_full((), -torch.inf if blind == "nan" else least)
            scores = scores + torch.where(seen, query.new_zeros(()), added)
        return scores.softmax(-1) @ value

    def in_tiles(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query_marks, key_marks = (place[:, None], 1), (place, counts[:, None, None])
        return attention_where(query, key, value, query_marks, key_marks, ("le", "eq"), blind=blind)

    found = []
    for form in (by_hand, in_tiles):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = form(*leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert bool(found[0][0].isnan().any()) is (blind == "nan")
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_no_rank_takes_more_queries_than_half_of_its_own() -> None:
    """The first of 4 ranks has single tokens, the others documents of 64: that it computes 0.7
    times its own queries for others would even out their work.
    """
    documents = (*(1,) * 512, *(64,) * 48, *(1,) * 512)
    queries = tuple(joined(dealt(4096, 4, rank, turns=1)) for rank in range(4))
    for samples in (1, 3):
        moves = moves_of((Seen((0, samples), documents_of(documents)),), queries, 0)
        taken = sum(move.samples[1] * move.queries[1] for move in moves)
        assert {move.target for move in moves} == {0}
        # Samples that see alike move together, so that a few queries may not fit.
        assert 0 <= MOST_GUESTS * samples * 1024 - taken < samples


@pytest.mark.slow
def test_masks_are_made_inside_of_a_graph() -> None:
    """What is remembered of marks stays outside of the graphs of torch's compiler."""

    def attend(query: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return attention_where(
            query,
            query,
            query,
            (1,),
            (counts[:, None, None],),
            ("eq",),
            bands=((0, 6, 0, 1, 0, 1),),
        )

    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    for samples in (4, 6, 2):
        query = torch.randn(samples, 2, 6, 4, dtype=torch.float64)
        counts = (torch.arange(6) < torch.arange(samples)[:, None] + 1).long()
        torch.testing.assert_close(compiled(query, counts), attend(query, counts), rtol=0, atol=0)
