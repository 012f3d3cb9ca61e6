"""What the tables put into local calls: group counts, offsets, global counts, the layouts of random
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.compiler.ir.op import IROp, WhenTraining
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.prover import prove


def rand(*shape: int) -> Tensor:
    return torch.rand(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def source(call: Call) -> str:
    """The call of one rank when a factor is split."""
    report = prove(call.function, call.args, call.kwargs, num_ranks=(call.over,))
    wanted = {"a": f"split:{call.split}" if call.split else "R"}
    (found,) = [trial.source for trial in report.trials if trial.assignment == wanted]
    return found


@dataclass(frozen=True)
class Call:
    function: Any
    args: tuple[Any, ...]
    split: str
    over: int
    kwargs: dict[str, Any]


def call(function: Any, *args: Any, split: str, over: int = 2, **kwargs: Any) -> Call:
    return Call(function, args, split, over, kwargs)


X, IMAGE = rand(4, 6), rand(4, 6, 3, 3)
LOGITS, TARGET = rand(4, 7), torch.tensor([0, 6, -100, 3])
IDS, TABLE = torch.tensor([[0, 3, 6]]), rand(7, 4)
DRAWN = 'draw=self.draw("call", layout='


@pytest.mark.parametrize(
    ("split_call", "expected"),
    [
        (call(torch.mean, X, 1, split="r1"), "mean(x0, dim=1, count=6)"),
        (call(torch.mean, X, 1, split="a0"), "torch.mean(x0, dim=1)"),
        (call(F.mse_loss, X, X, split="b1"), "mse_loss(x0, x1, count=24)"),
        (
            call(F.kl_div, X, X, split="b0", reduction="batchmean"),
            'kl_div(x0, x1, reduction="batchmean", count=4)',
        ),
        (call(F.group_norm, IMAGE, 3, split="g", over=3), "F.group_norm(x0, 1)"),
        (call(F.group_norm, IMAGE, 3, split="g"), "F.group_norm(x0, a.local_size(3))"),
        (
            call(F.conv2d, IMAGE, rand(4, 3, 3, 3), split="g", groups=2),
            "F.conv2d(x0, x1, groups=1)",
        ),
        (
            call(F.conv2d, IMAGE, rand(4, 3, 3, 3), split="o", groups=2),
            "F.conv2d(x0, x1, groups=2)",
        ),
        (
            call(F.embedding, IDS, TABLE, split="v"),
            "embedding(x0, x1, vocab_axes=(a,), start=a.offset(7), num_embeddings=7)",
        ),
        (call(F.embedding, IDS, TABLE, split="h"), "F.embedding(x0, x1)"),
        (
            call(F.cross_entropy, LOGITS, TARGET, split="c"),
            "cross_entropy(x0, x1, class_axes=(a,), start=a.offset(7), num_classes=7, count=4)",
        ),
        (
            call(F.cross_entropy, LOGITS, TARGET, split="n"),
            "cross_entropy(x0, x1, row_axes=(a,), num_classes=7, count=4)",
        ),
        (
            call(F.cross_entropy, LOGITS, TARGET, split="n", reduction="sum"),
            'F.cross_entropy(x0, x1, reduction="sum")',
        ),
        (call(F.softmax, X, -1, split="c"), "softmax(x0, dim=-1, dim_axes=(a,))"),
        (
            call(F.batch_norm, IMAGE, None, None, split="y0", training=True),
            "batch_norm(x0, None, None, training=True, batch_axes=(a,), count=36)",
        ),
        (call(F.dropout, X, split="*0"), f'dropout(x0, {DRAWN}"[4/a, 6]"))'),
        (call(F.dropout, X, split=""), f'dropout(x0, {DRAWN}"[4, 6]"))'),
        (call(F.dropout2d, IMAGE, split="*2"), f'dropout2d(x0, {DRAWN}"[4, 6, 1, 1]"))'),
        (call(F.dropout2d, IMAGE, split="*1"), f'dropout2d(x0, {DRAWN}"[4, 6/a, 1, 1]"))'),
        (call(F.dropout1d, rand(4, 6, 3), split="*1"), f'dropout1d(x0, {DRAWN}"[4, 6/a, 1]"))'),
        (
            call(F.feature_alpha_dropout, IMAGE, training=True, split="*0"),
            f'feature_alpha_dropout(x0, training=True, {DRAWN}"[4/a, 6, 1, 1]"))',
        ),
        (
            call(
                F.scaled_dot_product_attention,
                IMAGE,
                rand(4, 6, 5, 3),
                rand(4, 6, 5, 2),
                dropout_p=0.5,
                split="b1",
            ),
            f'scaled_dot_product_attention(x0, x1, x2, dropout_p=0.5, {DRAWN}"[4, 6/a, 3, 5]"))',
        ),
        (
            call(torch.rand, 4, 6, split="a0", over=3),
            f'rand(a.local_size(4), 6, {DRAWN}"[4/a, 6]"))',
        ),
    ],
)
def test_local_calls(split_call: Call, expected: str) -> None:
    assert source(split_call) == expected


def rule_of(function: Any, training: Any) -> Any:
    found = registry.find(function)
    assert found is not None
    x = IRValue("x", (4, 6), torch.float64, True)
    op = IROp("op", found[0].name, (("input", x), ("training", training)), (x,))
    return instantiate(found[0], op)


def test_dropout_draws_only_where_it_may_train() -> None:
    assert rule_of(F.dropout, WhenTraining(True, False)).random
    assert not rule_of(F.dropout, False).random
    assert not rule_of(F.dropout, WhenTraining(False, False)).random


def test_running_statistics_are_updates() -> None:
    stats = (rand(6), rand(6))
    assert prove(
        F.batch_norm, (IMAGE.clone().requires_grad_(), *stats), {"training": True}
    ).rule.updates == (1, 2)
    assert prove(F.batch_norm, (IMAGE.clone().requires_grad_(), *stats)).rule.updates == ()


def test_causal_attention_is_told_where_its_queries_lie() -> None:
    report = prove(F.scaled_dot_product_attention, (IMAGE, IMAGE, IMAGE), {"is_causal": True})
    assert report.ok, report
    splits = {"split:b0", "split:b1", "split:q", "split:e"}
    others = {"R", "G", "linear:0", "exchange:k>q"}
    assert {trial.assignment["a"] for trial in report.trials} == {*others, *splits}


def test_attention_leaves_no_rank_without_heads() -> None:
    query, bias = rand(5, 2, 3, 3).requires_grad_(), rand(1, 2, 3, 3).requires_grad_()
    report = prove(
        F.scaled_dot_product_attention, (query, query, query), {"attn_mask": bias}, num_ranks=(2, 3)
    )
    assert report.ok, report
    assert {t.name for t in report.trials if t.assignment["a"] == "split:b1" and not t.skipped} == {
        "split:b1 over 2"
    }


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_losses_that_torch_does_not_compute_without_rows(loss: Any) -> None:
    target = torch.tensor([[3, 0, -1, 1, 2, 1], [0, -1, 1, 2, 3, 4]])
    report = prove(
        loss, (X[:2], target[:, 0] if loss is F.multi_margin_loss else target), num_ranks=(2, 3)
    )
    names = {trial.name for trial in report.trials if not trial.skipped}
    assert report.ok and names == {
        "R over 2",
        "G over 2",
        "split:n0 over 2",
        "R over 3",
        "G over 3",
    }


def test_old_arguments_of_losses() -> None:
    report = prove(F.mse_loss, (X, X), {"size_average": False})
    assert report.trials[0].source == 'F.mse_loss(x0, x1, reduction="sum")'


def test_unbiased_becomes_correction() -> None:
    assert (
        prove(torch.Tensor.var, (X, 1, False)).trials[0].source
        == "torch.var(x0, dim=1, correction=0)"
    )
    assert prove(torch.var, (X, False)).trials[0].source == "torch.var(x0, correction=0)"
    assert (
        prove(torch.std, (X,), {"dim": 0, "unbiased": True}).trials[0].source
        == "torch.std(x0, dim=0)"
    )


@pytest.mark.parametrize(
    ("target", "before", "after", "num_linear"),
    [
        ("sum", torch.float32, torch.int64, 0),  # rounded, each summand by itself
        ("cumsum", torch.float32, torch.float64, 1),
        ("sum", torch.int32, torch.int64, 1),
        ("sum", torch.uint8, torch.int64, 0),  # 255 + 1 is 0 there
        ("clone", torch.uint8, torch.uint8, 1),
    ],
)
def test_partial_sums_that_another_dtype_would_change(
    target: str, before: torch.dtype, after: torch.dtype, num_linear: int
) -> None:
    opdef = registry.get(target)
    assert opdef is not None
    args = {"input": IRValue("x", (4,), before), **({} if target == "clone" else {"dim": 0})}
    shape = () if target == "sum" else (4,)
    op = IROp("call", target, tuple(args.items()), (IRValue("y", shape, after),))
    assert len(instantiate(opdef, op).linear_sets) == num_linear
