"""What is kept for the backward, against what autograd really keeps of every operator."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from example_ops import all_calls, example_op, run_op, tensors_of
from fake_attention import rows_are_float32
from in_shares import Named, check_each, shares
from op_examples import Call

from shardwright.compiler.cost.fake.saved_tensors import (
    Saved,
    attributed,
    saved_for_backward,
    saving_to,
)
from shardwright.runtime.config import RngMode
from shardwright.runtime.layout import Mesh


def really_saved(call: Call) -> Saved:
    """Run the plain call on real tensors and look."""
    op, operands = example_op(call)
    operands = [x.detach().clone().requires_grad_(x.requires_grad) for x in operands]  # none twice
    kept: list[torch.Tensor] = []
    with saving_to(kept), torch.random.fork_rng(devices=[]):
        results = tensors_of(run_op(op, operands))
    return attributed(kept, operands, results)


DIFFERENT_BUFFERS = {
    # Fake tensors have one offset less, or a copy of the input in the place of a view: not the same
    # tensors, but their bytes.
    "tables-4": 8,
    "tables-5": 8,
    "tables-6": 8,
    "tables-7": 8,
    "recurrent-1": 0,
}

ESTIMATED = ("fourier-26",)
"""Calls that look at values, as ``istft`` does at its window: fake tensors cannot tell what they
keep.
"""


@pytest.mark.parametrize("calls", spread(shares(all_calls()), 3))
def test_every_operator_against_autograd(calls: Sequence[Named]) -> None:
    check_each(calls, check_saved)


def check_saved(name: str, call: Call) -> None:
    op, operands = example_op(call)
    found = saved_for_backward(op)
    assert op.rule is not None
    if op.rule.densities is not None:  # which rows there are is no tensor
        assert not found.exact
        return
    # A rank draws in another way, which keeps other tensors than torch's own call.
    if op.rule.random:
        assert found.exact
        return
    real = really_saved(call)
    if name in ESTIMATED:
        assert not found.exact and set(found.operands) >= set(real.operands)
        return
    if name.startswith("attention-") and found != real and rows_are_float32():  # the last tensor
        real = replace(real, internal=(*real.internal[:-1], real.internal[-1] // 2))
    if name not in DIFFERENT_BUFFERS:
        assert found == real
        return

    def num_bytes(saved: Saved) -> int:
        return saved.internal_bytes + sum(
            operands[i].untyped_storage().nbytes() for i in saved.operands
        )

    assert found.exact and abs(num_bytes(found) - num_bytes(real)) <= DIFFERENT_BUFFERS[name]


def saved(function: Any, *args: Any, split: str | None = None, **kwargs: Any) -> Saved:
    op, _ = example_op((function, args, kwargs))
    return saved_for_backward(op, {"tp": f"split:{split}"} if split else {}, Mesh((("tp", 2),)))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def asked(*args: Any, **kwargs: Any) -> Callable[[], Saved]:
    """:func:`saved` when a test runs, not when it is collected."""
    return functools.partial(saved, *args, **kwargs)


LOGITS, LABELS = randn(6, 8), torch.zeros(6, dtype=torch.long)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (asked(F.linear, randn(4, 8), randn(6, 8), randn(6)), Saved((0, 1), (), (), (None,))),
        (asked(F.linear, randn(4, 8).detach(), randn(6, 8)), Saved((0,), (), (), (None,))),
        (asked(F.linear, randn(4, 8), randn(6, 8).detach()), Saved((1,), (), (), (None,))),
        (asked(torch.exp, randn(4, 8)), Saved((), (0,), (), (None,))),
        (asked(torch.add, randn(4, 8), randn(4, 8)), Saved((), (), (), (None,))),
        (asked(torch.Tensor.view, randn(4, 8), 8, 4), Saved((), (), (), (0,))),
        (asked(torch.chunk, randn(4, 8), 2), Saved((), (), (), (0, 0))),
        (asked(F.cross_entropy, LOGITS, LABELS), Saved((1,), (), (6 * 8 * 4, 4), (None,))),
        (  # softmax, local classes, who has them, which rows count and how much, number of rows
            asked(F.cross_entropy, LOGITS, LABELS, split="c"),
            Saved((), (), (6 * 4 * 4, 6 * 8, 6, 6, 6 * 4, 4), (None,)),
        ),
        (asked(F.dropout, randn(4, 8), 0.5), Saved((), (), (4 * 8 * 4,), (None,))),
        (asked(F.dropout, randn(4, 8), 0.5, split="*0"), Saved((), (), (2 * 8 * 4,), (None,))),
    ],
)
def test_by_hand(found: Callable[[], Saved], expected: Saved) -> None:
    assert found() == expected


def test_what_cannot_be_run_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.compiler.cost.fake import saved_tensors as module

    monkeypatch.setattr(module, "REAL_BYTES", 0)
    op, _ = example_op((F.gaussian_nll_loss, (randn(4, 8), randn(4, 8), torch.ones(4, 8)), {}))
    assert saved_for_backward(op) == Saved((0, 1, 2), (0,), (), (None,), exact=False)


@pytest.mark.parametrize(("rng", "mask_bytes"), [("fast", 4), ("plan_independent", 1)])
def test_a_mask_of_attention_is_kept_as_the_rank_draws_it(rng: RngMode, mask_bytes: int) -> None:
    """It is kept as factors where a rank draws its piece, and as bools where every plan draws the
    same tiles. Beside it the weights before and after are kept.
    """
    call = F.scaled_dot_product_attention, [randn(2, 2, 4, 8) for _ in range(3)], {"dropout_p": 0.5}
    weights = 2 * 2 * 4 * 4
    kept = Saved((0, 1, 2), (), (4 * weights, mask_bytes * weights, 4 * weights), (None,))
    assert saved_for_backward(example_op(call)[0], rng=rng) == kept
