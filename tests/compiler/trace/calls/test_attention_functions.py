"""``flex_attention`` and ``varlen_attn``: recorded as attention that can be split, against their
definitions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torch.nn.attention.varlen import varlen_attn
from tracing import traced

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.trace import trace
from shardwright.frontend.verification.dense_attention import dense_attention
from shardwright.runtime.errors import InputError, TraceError

LENGTH = 13
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [3] * 9 + [7] * 4])
STARTS = torch.tensor([0, 4, 9, 13], dtype=torch.int32)
AHEAD = torch.tensor([0, 6, 9, 13], dtype=torch.int32)
X = torch.randn(2, 4, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
compiled = torch.compile(flex_attention)


class Attention(nn.Module):
    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))
        self.attend = attend

    def forward(self, x: Tensor, documents: Tensor) -> Any:
        keys = x[:, ::2] * self.slopes[1]
        return self.attend(x * self.slopes[0], keys, documents, self.slopes)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def within(documents: Tensor) -> Any:
    """A block mask of earlier keys of the same document."""
    same = lambda b, h, q, k: documents[b, q] == documents[b, k]  # noqa: E731
    return create_block_mask(and_masks(causal, same), 2, None, LENGTH, LENGTH, "cpu")


def no_mask(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    return flex_attention(q, x, x, enable_gqa=True)


def only_causal(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu")
    return compiled(q, x, x, block_mask=mask, enable_gqa=True)


def packed(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    return compiled(q, x, x, block_mask=within(documents), enable_gqa=True)


def capped(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    cap = lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0)  # noqa: E731
    return compiled(q, x, x, cap, within(documents), enable_gqa=True)


def hidden(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    """Scores that hide keys by themselves, all of those of the first queries."""
    later = lambda score, b, h, q, k: torch.where(q > k, score, -torch.inf)  # noqa: E731
    return compiled(q, x, x, later, enable_gqa=True)


def sloped(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    """ALiBi, with slopes that are learned, and what attention says of its scores."""
    bias = lambda score, b, h, q, k: score + slopes[h] * (k - q)  # noqa: E731
    out, aux = flex_attention(
        q, x, x, bias, within(documents), enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


def biased(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    """Slopes are a bias of the operator."""
    bias = lambda score, b, h, q, k: score + slopes[h] * (k - q)  # noqa: E731
    return flex_attention(q, x, x, bias, within(documents), enable_gqa=True)


def chained(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    """Indices one after the other would read another thing of all positions at once."""
    same = lambda score, b, h, q, k: torch.where(  # noqa: E731
        documents[b][q] == documents[b][k], score, -torch.inf
    )
    return flex_attention(q, x, x, same, enable_gqa=True)


def rows(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    """Documents end to end, with a window."""
    rows, keys = (y[0].transpose(0, 1) for y in (q, x))
    ends = STARTS + documents[0, 0]
    return varlen_attn(rows, keys, keys, ends, ends, 5, 5, window_size=(2, 0), enable_gqa=True)


def ahead(q: Tensor, x: Tensor, documents: Tensor, slopes: Tensor) -> Any:
    """Documents with other numbers of keys than of queries."""
    rows, keys = (y[0].transpose(0, 1) for y in (q, x))
    ends = STARTS + documents[0, 0], AHEAD + documents[0, 0]
    return varlen_attn(rows, keys, keys, *ends, 5, 6, window_size=(-1, 0), enable_gqa=True)


def attention_of(attend: Callable[..., Any]) -> IROp | None:
    """The operator of attention in the graph, after it was held to the definition."""
    with dense_attention():
        graph = traced(Attention(attend), {"x": X, "documents": DOCUMENTS}, exact=False)
    found = [op for op in plans.annotated(graph).ops if "attention" in op.target]
    return found[0] if found else None


SHARED_HEADS = pytest.mark.skipif(
    "enable_gqa" not in inspect.signature(varlen_attn).parameters,
    reason="varlen_attn of torch 2.11 has no enable_gqa",
)
CAUSAL = (0, LENGTH, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("attend", "target", "arguments"),
    [
        (no_mask, "scaled_dot_product_attention", {"is_causal": None}),
        (only_causal, "scaled_dot_product_attention", {"is_causal": True, "enable_gqa": True}),
        (packed, "attention_where", {"bands": (CAUSAL,), "comparisons": ("eq",)}),
        (capped, "attention_where", {"bands": (CAUSAL,), "cap": 2.0, "blind": None}),
        (hidden, "attention_where", {"bands": ((1, LENGTH, 0, 1, 0, 1),), "blind": None}),
        (sloped, None, {}),
        (biased, "scaled_dot_product_attention", {"is_causal": None, "enable_gqa": True}),
        (chained, "scaled_dot_product_attention", {"is_causal": None, "enable_gqa": True}),
        pytest.param(rows, "attention_where", {"comparisons": ("eq",)}, marks=SHARED_HEADS),
        pytest.param(ahead, "attention_where", {"comparisons": ("eq", "le")}, marks=SHARED_HEADS),
    ],
)
def test_functions_of_attention_are_read(
    attend: Callable[..., Any], target: str | None, arguments: dict[str, object]
) -> None:
    """Masks of functions become marks and bands. What cannot be said so is written out."""
    op = attention_of(attend)
    assert (op.target if op else None) == target
    assert {name: op.arg(name) for name in arguments} == arguments if op else not arguments


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return flex_attention(x * self.scale, x, x, block_mask=mask).square().mean()


def test_a_block_mask_is_an_argument(tmp_path: Path) -> None:
    """What its function reads is an input: the call has other documents than the example."""
    with dense_attention():
        inputs = {"x": X, "mask": within(DOCUMENTS)}
        graph = plans.traced(Given(), inputs)
        (op,) = (op for op in plans.annotated(graph).ops if "attention" in op.target)
        assert (op.target, op.arg("comparisons")) == ("attention_where", ("eq",))
        compiled = plans.compile_with(graph, "cp", 2, pas_config={"cp_mode": "ring"})
        others = {"x": X, "mask": within(DOCUMENTS.flip(1))}
        reference = plans.reference_run(Given(), [others], steps=1)
        plans.check(Given(), others, compiled, tmp_path, reference)
        later = lambda b, h, q, k: q > k  # noqa: E731
        wrong = create_block_mask(later, 2, None, LENGTH, LENGTH, "cpu")
        with pytest.raises(InputError, match=r"'mask.mask_mod.code' is '.*, but was compiled as"):
            plans.check(Given(), {"x": X, "mask": wrong}, compiled, tmp_path / "wrong", reference)


class Documents:
    """A function of masks that is an object."""

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k


def with_default(b: Tensor, h: Tensor, q: Tensor, k: Tensor, window: int = 4) -> Tensor:
    return q - k < window


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Documents(), "its function is of type Documents"),
        (with_default, "its function has arguments with defaults"),
        ((lambda hidden: lambda b, h, q, k: hidden(b, h, q, k))(Documents()), "'hidden' is of"),
    ],
)
def test_a_block_mask_whose_function_hides_what_it_reads_is_refused(
    function: Any, why: str
) -> None:
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu")
    mask.mask_mod = function
    text = (
        f"argument of forward contains a BlockMask(.|\n)*{why}(.|\n)*create_block_mask in forward"
    )
    with pytest.raises(TraceError, match=text):
        trace(Given(), {"x": X, "mask": mask})
