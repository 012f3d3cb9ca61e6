"""Attention whose mask is read: what becomes ``attention_where``, and what stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import plans
import pytest
import torch
import torch.nn.functional as F
from covers import spread
from sequence_models import get
from torch import Tensor, nn

from shardwright.compiler.ir.op import IROp, WhenTraining
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.rule import ATTENTION
from shardwright.runtime.errors import InputError
from shardwright.runtime.ops import any_chosen

WINDOW = ((0, 3, 0, 1, 0, 1), (3, 11, 1, 4, 1, 1))
CAUSAL = ((0, 11, 0, 1, 0, 1),)
DROPS = WhenTraining(0.3, 0.0)


def attention(name: str) -> list[IROp]:
    graph = plans.annotated(plans.traced(get(name).build(), get(name).inputs()))
    return [op for op in graph.ops if op.target == "attention_where"]


@pytest.mark.parametrize(
    ("name", "bands", "others"),
    spread(
        [
            ("gemma2", [WINDOW, CAUSAL], {"cap": 50.0}),
            ("gemma2-padded", [WINDOW, CAUSAL], {"cap": 50.0, "blind": "mean"}),
            ("gpt-oss", [WINDOW, CAUSAL], {"blind": None}),
            ("llama-packed", [None, None], {"comparisons": ("eq", "le"), "blind": None}),
            ("packed-dropout", [None, None], {"comparisons": ("eq", "le"), "dropout_p": DROPS}),
            ("window-dropout", [WINDOW, WINDOW], {"blind": "mean", "dropout_p": DROPS}),
        ],
        2,
        first=1,
    ),
)
def test_masks_of_models_are_read(
    name: str, bands: list[object], others: dict[str, object]
) -> None:
    found = attention(name)
    assert [op.arg("bands") for op in found] == bands
    for op in found:
        assert {key: op.arg(key) for key in others} == others
        assert op.operands[1].shape[1] == 2  # heads of keys as they were before they were repeated
        assert op.has_arg("sinks") == (name == "gpt-oss")


def test_masks_are_read_under_autocast_too() -> None:
    """Bands are known there as well: positions are integers, which are not cast, and so is the
    number that hides a key.
    """
    entry = get("gemma2")
    with torch.autocast("cpu", torch.bfloat16):
        graph = plans.annotated(plans.traced(entry.build().float(), entry.inputs()))
    found = [op.arg("bands") for op in graph.ops if op.target == "attention_where"]
    assert found == [WINDOW, CAUSAL]


class Attention(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.attend = attend
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, counts: Tensor) -> object:
        return self.attend(x * self.scale, counts)


def earlier(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[-2])
    return place[None, :] <= place[:, None]


def written_out(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    scores = x @ x.transpose(2, 3) * 0.5 + torch.where(mask, 0.0, -1e38)
    weights = scores.softmax(-1)
    return weights @ x, weights


def capped(x: Tensor, bias: Tensor | float) -> Tensor:
    return (4.0 * (x @ x.transpose(2, 3) * 0.5 / 4.0).tanh() + bias).softmax(-1) @ x


@pytest.mark.parametrize(
    "attend",
    [
        lambda x, counts: F.scaled_dot_product_attention(x, x, x, earlier(x) | counts),
        lambda x, counts: F.scaled_dot_product_attention(x, x, x, torch.randn(6, 6).to(x.dtype)),
        lambda x, counts: written_out(x, earlier(x)),  # the weights are an output
    ],
)
def test_other_attention_stays(attend: Callable[[Tensor, Tensor], object]) -> None:
    inputs = {"x": torch.randn(2, 3, 6, 4), "counts": torch.ones(2, 1, 1, 6, dtype=torch.bool)}
    graph = plans.annotated(plans.traced(Attention(attend), inputs))
    assert not [op for op in graph.ops if op.target == "attention_where"]


def test_scores_with_a_cap_and_no_mask_are_attention() -> None:
    def attend(x: Tensor, counts: Tensor) -> Tensor:
        return (4.0 * (x @ x.transpose(2, 3) * 0.5 / 4.0).tanh()).softmax(-1) @ x

    (op,) = attention_of(attend)
    assert op.target == "attention_where"
    assert {"cap": 4.0, "scale": 0.5}.items() <= dict(op.args).items()


def test_attention_written_out_is_torchs_operator() -> None:
    """The plain causal triangle; dropout in training and a bias of two summands as T5 has it. Heads
    of keys are repeated in both.
    """

    def causal(x: Tensor, counts: Tensor) -> Tensor:
        key = x[:, :1].repeat_interleave(3, 1)
        return (x @ key.mT / 2).masked_fill(~earlier(x), -torch.inf).softmax(-1) @ key

    (op,) = attention_of(causal)
    assert (op.target, op.operands[1].shape) == ("scaled_dot_product_attention", (2, 1, 6, 4))
    assert {"is_causal": True, "enable_gqa": True, "scale": 0.5}.items() <= dict(op.args).items()

    def attend(x: Tensor, counts: Tensor) -> Tensor:
        key = x[:, :1].repeat_interleave(3, 1)
        bias = x.new_ones(1, 3, 6, 6) * x.mean()
        hidden = torch.where(counts, x.new_zeros(()), -1e38)
        weights = F.dropout((x @ key.transpose(2, 3) + bias + hidden).softmax(-1), 0.1)
        return weights @ key

    (op,) = attention_of(attend)
    assert op.target == "scaled_dot_product_attention"
    assert op.operands[1].shape == (2, 1, 6, 4)
    assert {"dropout_p": 0.1, "enable_gqa": True, "scale": 1.0}.items() <= dict(op.args).items()
    mask = op.arg("attn_mask")
    assert isinstance(mask, IRValue) and mask.shape == (2, 3, 6, 6) and mask.requires_grad


def padded(x: Tensor, counts: Tensor) -> Tensor:
    """Padding and later keys are hidden one by one: a query behind padding sees no key."""
    later = torch.where(earlier(x), x.new_zeros(()), -1e30)
    hidden = (1.0 - counts.to(x.dtype)) * -1e30
    return (x @ x.mT + hidden + later).softmax(-1) @ x


@pytest.mark.parametrize(
    "attend",
    [
        padded,
        lambda x, counts: (x @ x.mT + (~counts).to(x.dtype) * -1e9).softmax(-1) @ x,
        lambda x, counts: capped(x, (~counts).to(x.dtype) * -1e9),
        lambda x, counts: (
            (x @ x.mT + (~counts).to(x.dtype) * -1e9).masked_fill(~earlier(x), -1e30).softmax(-1)
            @ x
        ),
        # Each leaves a query a key, but not the same one.
        lambda x, counts: (
            (
                x @ x.mT + torch.where(earlier(x), 0.0, -1e30) + torch.where(earlier(x), -1e30, 0.0)
            ).softmax(-1)
            @ x
        ),
    ],
)
def test_attention_that_may_hide_all_keys_by_a_number_stays(
    attend: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The backward of torch's kernel would be wrong for a query without keys."""
    assert not attention_of(attend)


def test_numbers_behind_padding_are_those_of_one_device(tmp_path: Path) -> None:
    """Compiled with a mask that hides nothing, called with one that does."""
    model = Attention(lambda x, counts: padded(x, counts).square().sum()).double()
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    inputs = {"x": x, "counts": torch.ones(2, 1, 1, 6, dtype=torch.bool)}
    compiled = plans.compile_with(plans.traced(model, inputs), "tp", 2)
    plans.write(tmp_path, compiled, model)
    inputs["counts"] = torch.arange(6) > torch.tensor([1, 4]).view(2, 1, 1, 1)
    outcome = plans.run_once(tmp_path, compiled, inputs)
    loss = model(**inputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    assert model.scale.grad is not None
    torch.testing.assert_close(outcome.gradients["scale"], model.scale.grad, rtol=1e-12, atol=1e-12)


def test_a_sample_without_keys_is_refused_beside_a_learned_bias() -> None:
    with pytest.raises(InputError, match="hides all keys of a sample"):
        any_chosen(torch.tensor([[True, False], [False, False]]))


def test_a_query_without_keys_is_nan_where_scores_are_filled_with_infinity() -> None:
    def attend(x: Tensor, counts: Tensor) -> Tensor:
        return (x @ x.transpose(2, 3)).masked_fill(counts, -torch.inf).softmax(-1) @ x

    inputs = {"x": torch.randn(2, 3, 6, 4), "counts": torch.ones(2, 1, 1, 6, dtype=torch.bool)}
    graph = plans.annotated(plans.traced(Attention(attend), inputs))
    *_, attention, sees, out = graph.ops
    assert [attention.target, sees.target] == ["scaled_dot_product_attention", "any"]
    assert out.target == "where" and math.isnan(out.arg("other"))


def filled(x: Tensor, counts: Tensor, least: float, rate: float = 0.0) -> Tensor:
    """Scores with slopes of heads, filled by a mask that may leave a query no key."""
    slopes = torch.arange(1.0, 4).to(x.dtype)[:, None, None] * torch.arange(6)
    scores = (x @ x.transpose(2, 3) + slopes).masked_fill(~(earlier(x) & counts), least)
    return F.dropout(scores.softmax(-1), rate) @ x


def test_a_query_without_keys_beside_a_bias() -> None:
    """It has the mean of all values where scores are filled with a number, and is nan with
    infinity.
    """
    inputs = {"x": torch.randn(2, 3, 6, 4), "counts": torch.ones(2, 1, 1, 6, dtype=torch.bool)}

    def ops_of(least: float, rate: float = 0.0) -> list[IROp]:
        module = Attention(lambda x, counts: filled(x, counts, least, rate))
        return list(plans.annotated(plans.traced(module, inputs)).ops)

    *_, mean, attention, out = ops_of(-1e38)
    assert [mean.target, attention.target] == ["mean", "scaled_dot_product_attention"]
    assert out.target == "where" and out.arg("other") == mean.results[0]
    *_, attention, out = ops_of(-torch.inf)
    assert attention.target == "scaled_dot_product_attention"
    assert out.target == "where" and math.isnan(out.arg("other"))
    # The mean of what dropout leaves of values is another one.
    assert not [op for op in ops_of(-1e38, rate=0.1) if op.target in ATTENTION]


def test_what_is_no_attention_keeps_its_spelling() -> None:
    """Beside attention that is found, whose product has another order of dims."""

    def attend(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.einsum("bhqd,bhkd->bhqk", x, x).masked_fill(~earlier(x), -1e38).softmax(-1)
        found = torch.einsum("bhqk,bhkd->bqhd", weights, x)
        return found, torch.einsum("bhqd,bhkd->bqhk", x, x).masked_fill(~counts, 0.0)

    inputs = {"x": torch.randn(2, 3, 6, 4), "counts": torch.ones(2, 1, 1, 6, dtype=torch.bool)}
    graph = plans.annotated(plans.traced(Attention(attend), inputs))
    targets = [op.target for op in graph.ops if op.target not in ("mul", "bitwise_not")]
    assert targets == ["scaled_dot_product_attention", "permute", "einsum", "masked_fill"]
    assert graph.ops[1].arg("is_causal") is True
    assert [value.shape for value in graph.outputs] == [(2, 6, 3, 4), (2, 6, 3, 6)]


def test_samples_and_heads_in_one_dim_are_attention(tmp_path: Path) -> None:
    """Products as ``bmm`` and ``baddbmm`` want them, with a bias for each sample and head, for all
    of them, or none.
    """

    def scores(x: Tensor, bias: Tensor | None, beta: float = 1.0) -> Tensor:
        joined = x.reshape(6, 6, 4)
        if bias is None:
            return torch.bmm(joined, joined.mT).view(2, 3, 6, 6)
        product = bias.baddbmm(joined, joined.mT, beta=beta, alpha=0.5)
        return product.view(2, 3, 6, 6) + torch.where(earlier(x), 0.0, -1e38)

    def attended(x: Tensor, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1).view(6, 6, 6)
        return torch.bmm(weights, x.reshape(6, 6, 4)).view(2, 3, 6, 4)

    def slopes(x: Tensor, counts: Tensor) -> Tensor:
        bias = torch.arange(1.0, 4).to(x.dtype)[:, None, None] * torch.arange(6)
        return attended(x, scores(x, bias.repeat(2, 1, 1), beta=2.0))

    (op,) = attention_of(slopes)
    assert (op.target, op.arg("scale")) == ("scaled_dot_product_attention", 0.5)
    assert op.arg("attn_mask").shape == (2, 3, 6, 6)
    model = Attention(lambda x, counts: slopes(x, counts).square().sum()).double()
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    plans.check_policy(model, {"x": x, "counts": x}, "tp", 2, tmp_path)
    (op,) = attention_of(lambda x, counts: attended(x, scores(x, x.new_ones(1, 6, 6))))
    assert op.arg("attn_mask").shape == (1, 1, 6, 6)
    (op,) = attention_of(lambda x, counts: attended(x, scores(x, x.new_ones(6, 6), beta=0.0)))
    assert (op.arg("is_causal"), op.arg("attn_mask")) == (True, None)
    (op,) = attention_of(lambda x, counts: attended(x, scores(x, None)))
    assert (op.arg("attn_mask"), op.arg("scale")) == (None, 1.0)
    # Scores, or weights, that somebody else reads are no attention, and stay as they are written.
    graph = plans.annotated(
        plans.traced(
            Attention(lambda x, counts: (y := scores(x, x.new_ones(6, 6)), attended(x, y))),
            {"x": torch.randn(2, 3, 6, 4), "counts": torch.ones(2, 1, 1, 6, dtype=torch.bool)},
        )
    )
    products = [op.target for op in graph.ops if op.target in ("baddbmm", "matmul", *ATTENTION)]
    assert products == ["baddbmm", "matmul"]


def attention_of(attend: Callable[[Tensor, Tensor], object]) -> list[IROp]:
    inputs = {"x": torch.randn(2, 3, 6, 4), "counts": torch.ones(2, 1, 1, 6, dtype=torch.bool)}
    graph = plans.annotated(plans.traced(Attention(attend), inputs))
    return [op for op in graph.ops if op.target in ATTENTION]


def test_a_mask_by_size_is_read_whatever_makes_it() -> None:
    """Two sides of a window, by a difference that no comparison of vectors has."""

    def attend(x: Tensor, counts: Tensor) -> Tensor:
        place = torch.arange(6)
        near = (place[None, :] - place[:, None]).abs() <= 1
        return F.scaled_dot_product_attention(x, x, x, near & counts)

    inputs = {"x": torch.randn(2, 3, 6, 4), "counts": torch.ones(2, 1, 1, 6, dtype=torch.bool)}
    graph = plans.annotated(plans.traced(Attention(attend), inputs))
    (op,) = (op for op in graph.ops if op.target == "attention_where")
    assert op.arg("bands") == ((0, 2, 0, 2, 0, 1), (2, 5, 1, 4, 1, 1), (5, 6, 4, 6, 0, 0))
    assert op.arg("comparisons") == ("eq",)
