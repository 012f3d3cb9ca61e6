"""Attention of some queries to some keys, as a part of attention to all keys.

A block gives its output and, of every query, the logarithm of the sum of the exponentials of its
scores (``lse``). Two blocks of the same queries are merged by these (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"). The gradient of a block is exact with the merged
output and lse in the place of its own (Liu et al. 2023, "Ring attention").

Tensors: query ``[batch, heads, queries, width]``, key and value ``[batch, key heads, keys,
width]``, lse ``[batch, heads, queries]``. Key head ``g`` serves query heads ``g * r`` to
``g * r + r - 1``.

How blocks are computed: :mod:`~shardwright.runtime.ops.attend_blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.runtime.ops.attention_dropout import TileDropout
from shardwright.runtime.runs import Run

HOPELESS = -1e4
"""A mask whose best value for a query is less than this hides all keys from it alike."""


Flat = Literal["mean", "constant", "nan"]
"""What a query without keys gets of all keys and values.

``mean``: the mean of all values, as where a number was added to all scores beside which they are
lost in rounding; gradients reach the scores all the same. ``constant``: the same mean, as where the
number took the place of all scores; no gradient reaches these. ``nan``: where minus infinity was
added.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries, keys and values, and what the queries see. ``causal``: query ``i`` sees the first
    ``i + 1`` keys. ``flipped``: it sees all but the first ``i``. ``bias``: what is added to the
    scores, with dims that may be 1, and minus infinity where a key is not seen. ``alike``: what of
    it concerns all keys of a query, and is taken off the sum. ``cap``: scores ``s`` become ``cap *
    tanh(s / cap)`` before the bias is added. ``flat``: what queries without keys get, if these are
    such queries. ``dropout``: which weights are dropped. ``wants_bias``: the bias gets a gradient.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False
    flipped: bool = False
    bias: Tensor | None = None
    alike: Tensor | None = None
    cap: float | None = None
    flat: Flat | None = None
    dropout: TileDropout | None = None
    wants_bias: bool = False

    def of_one_width(self) -> Block:
        """The block with zeros behind the narrower of keys and values, as kernels take one width
        alone. They change no score, and give zeros behind the output.
        """
        width = max(self.query.shape[3], self.value.shape[3])
        if self.key.shape[3] == self.value.shape[3] == width:
            return self
        query, key, value = (widened(x, width) for x in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def turned(self) -> Block:
        """A flipped block read backwards, which is a causal one."""
        query, key, value = (x.flip(2) for x in (self.query, self.key, self.value))
        return Block(query, key, value, self.scale, causal=True, cap=self.cap)


@dataclass(frozen=True, slots=True)
class BlockGrads:
    """The gradients of a block; that of the bias if it wants one."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None


class Kernel(Protocol):
    """How blocks are computed."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """The output and its lse, whatever they are for queries that see no key."""

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> BlockGrads:
        """The gradients. ``grad``, ``out``, ``lse``: of the merged output."""


def merging_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which outputs and their lse are merged."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def common_gradient(grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """What all weights of a query have in common in the gradient of its scores, ``[batch, heads,
    queries]``: the sum of ``grad * out`` of the merged output. So a block needs no other block's
    weights (Dao, "FlashAttention-2", 2023).
    """
    return (grad.to(lse.dtype) * out).sum(-1)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add what a block gave to ``out`` and ``lse``, in place. Queries that saw no key so far have
    an lse of minus infinity.
    """
    # The part of all weights that the block has, exp(more_lse) / (exp(lse) + exp(more_lse)). Two
    # infinities of one sign have no difference.
    part = (more_lse - lse).sigmoid_().masked_fill_(more_lse == -math.inf, 0.0)
    out.lerp_(more.to(out.dtype), part.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, more_lse))


def hidden_alike(mask: Tensor) -> Tensor | None:
    """What a floating mask, which is for all keys, takes from all keys of a query alike, ``[..., L,
    1]``, if that is much. Beside it scores are lost in rounding, as on one device; without it an
    lse has digits left.
    """
    if mask.dtype == torch.bool or not mask.shape[-1]:
        return None
    best = mask.detach().amax(-1, keepdim=True)
    return best.masked_fill((best >= HOPELESS) | (best == -math.inf), 0.0)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of ``F.scaled_dot_product_attention`` as a bias: minus infinity where a boolean one is
    false.
    """
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask.to(dtype)


def widened(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros behind its last dim."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


class _OfKeys(Protocol):
    """A part of attention, to so many keys."""

    @property
    def keys(self) -> Run: ...


Piece = TypeVar("Piece", bound=_OfKeys)


def enough_to_measure(
    query: Tensor, parts: Sequence[Piece], form: Callable[[Piece], object]
) -> Sequence[Piece]:
    """All parts; of attention of fake queries two of each form, by ``form``, with the most keys.

    Fake tensors are asked for memory alone, and parts of one form take the same. It needs two, as
    the first may still be there while the next one is made. A short window over 100,000 queries
    has 1,600 parts of three forms.
    """
    if not isinstance(query, FakeTensor):
        return parts
    forms: dict[object, list[int]] = {}
    for index, part in enumerate(parts):
        forms.setdefault(form(part), []).append(index)
    largest = (sorted(some, key=lambda i: parts[i].keys[1])[-2:] for some in forms.values())
    return [parts[index] for index in sorted(index for some in largest for index in some)]
