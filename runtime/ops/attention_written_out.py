"""Blocks of attention that no kernel of torch serves: as products, exponentials and sums, for some
queries at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.runtime.ops.attention_blocks import (
    Block,
    BlockGrads,
    common_gradient,
    enough_to_measure,
    merging_dtype,
)
from shardwright.runtime.runs import Run

MOST_SCORES = 2**22
"""The most scores that are written out at a time, of all samples and heads."""


class WrittenOut:
    """Scores as a tensor ``[batch, key heads, r, queries, keys]``, where no kernel serves: of as
    many queries at a time as make :data:`MOST_SCORES`.
    """

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        shape, dtype = block.query.shape[:3], block.query.dtype
        out = block.value.new_empty(*shape, block.value.shape[3])
        lse = block.query.new_empty(shape, dtype=merging_dtype(dtype))
        for part in enough_to_measure(block.query, _parts(block), _num_queries):
            its_out, its_lse = self._forward(part)
            out.narrow(2, *part.queries).copy_(its_out)
            lse.narrow(2, *part.queries).copy_(its_lse)
        return out, lse

    def _forward(self, part: _Part) -> tuple[Tensor, Tensor]:
        scores = part.scores(part.products())
        lse = scores.logsumexp(-1)
        weights = part.dropped((scores - _finite(lse)[..., None]).exp()).to(part.value.dtype)
        out = torch.einsum("bgrqk,bgkd->bgrqd", weights, part.value)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> BlockGrads:
        of_query, of_key, of_value = (
            torch.zeros_like(x, memory_format=torch.contiguous_format)
            for x in (block.query, block.key, block.value)
        )
        of_bias = None
        if block.wants_bias and block.bias is not None:
            of_bias = torch.zeros_like(block.bias, memory_format=torch.contiguous_format)
        delta = common_gradient(grad, out, lse)
        for part in enough_to_measure(block.query, _parts(block), _num_queries):
            own = (x.narrow(2, *part.queries) for x in (grad, lse, delta))
            found = self._backward(part, *own)
            of_query.narrow(2, *part.queries).copy_(found.query)
            of_key.narrow(2, *part.keys).add_(found.key)
            of_value.narrow(2, *part.keys).add_(found.value)
            if of_bias is not None and found.bias is not None:
                view = part.of_bias(of_bias)
                view.add_(found.bias.sum_to_size(view.shape))
        return BlockGrads(of_query, of_key, of_value, of_bias)

    def _backward(self, part: _Part, grad: Tensor, lse: Tensor, delta: Tensor) -> BlockGrads:
        block, heads = part.block, part.key.shape[1]
        query, grad, lse, delta = (
            torch.unflatten(x, 1, (heads, -1)) for x in (part.query, grad, lse, delta)
        )
        products = part.products()
        # Backward of softmax attention (Dao et al., "FlashAttention", algorithm 4). With weights W,
        # dW = dO V' and dS = W * (dW - delta); b: batch, g: key heads, r: query heads of each, q,
        # k: positions. Weights that were dropped have no part in dW; delta is the same sum.
        weights = (part.scores(products) - lse[..., None]).exp()
        of_weights = torch.einsum("bgrqd,bgkd->bgrqk", grad, part.value)
        kept = part.factors(weights)
        if kept is not None:
            of_weights = of_weights * kept
        of_scores = weights * (of_weights - delta[..., None])
        of_products = of_scores
        if block.flat == "constant":
            of_products = torch.zeros_like(of_scores)
        elif block.cap is not None:
            # scores = cap * tanh(products / cap), whose derivative is 1 - tanh².
            of_products = of_scores * (1 - (products / block.cap).tanh().square())
        scaled = (of_products * block.scale).to(query.dtype)
        if kept is not None:
            weights = weights * kept
        return BlockGrads(
            torch.einsum("bgrqk,bgkd->bgrqd", scaled, part.key).flatten(1, 2),
            torch.einsum("bgrqk,bgrqd->bgkd", scaled, query),
            torch.einsum("bgrqk,bgrqd->bgkd", weights.to(grad.dtype), grad),
            of_scores.flatten(1, 2) if block.wants_bias else None,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries of a block, and the keys that some of these see."""

    block: Block
    queries: Run
    keys: Run

    @property
    def query(self) -> Tensor:
        return self.block.query.narrow(2, *self.queries)

    @property
    def key(self) -> Tensor:
        return self.block.key.narrow(2, *self.keys)

    @property
    def value(self) -> Tensor:
        return self.block.value.narrow(2, *self.keys)

    def of_bias(self, bias: Tensor) -> Tensor:
        """The part of a bias of the block, as a view."""
        rows = bias.narrow(2, *self.queries) if bias.shape[2] > 1 else bias
        return rows.narrow(3, *self.keys) if bias.shape[3] > 1 else rows

    def products(self) -> Tensor:
        """Queries times keys, scaled."""
        query = torch.unflatten(self.query, 1, (self.block.key.shape[1], -1))
        products = torch.einsum("bgrqd,bgkd->bgrqk", query, self.key)
        return products.to(merging_dtype(query.dtype)) * self.block.scale

    def scores(self, products: Tensor) -> Tensor:
        """What softmax is taken of."""
        block, scores = self.block, products
        heads = block.key.shape[1]
        if block.flat is not None:
            return torch.full_like(scores, math.nan if block.flat == "nan" else 0.0)
        if block.cap is not None:
            # The cap comes before bias and masks, as in Gemma 2: a mask of -inf would become -cap.
            scores = block.cap * (scores / block.cap).tanh()
        if block.bias is not None:
            scores = scores + _by_group(self.of_bias(block.bias), heads)
        if block.alike is not None:
            scores = scores - _by_group(self.of_bias(block.alike), heads)
        if block.causal or block.flipped:
            rows = torch.arange(self.queries[1], device=scores.device)[:, None] + self.queries[0]
            columns = torch.arange(self.keys[1], device=scores.device) + self.keys[0]
            hidden = columns > rows if block.causal else columns < rows
            scores = scores.masked_fill(hidden, -math.inf)
        return scores

    def factors(self, weights: Tensor) -> Tensor | None:
        """What dropout multiplies these weights by."""
        dropout = self.block.dropout
        if dropout is None:
            return None
        factors = dropout.factors(self.queries, self.keys, weights)
        return torch.unflatten(factors, 1, (self.block.key.shape[1], -1))

    def dropped(self, weights: Tensor) -> Tensor:
        """The weights behind dropout."""
        factors = self.factors(weights)
        return weights if factors is None else weights * factors


def _parts(block: Block) -> list[_Part]:
    """A block in parts of at most :data:`MOST_SCORES` scores, or of one query each."""
    samples, heads, num_queries, _ = block.query.shape
    num_keys = block.key.shape[2]
    rows = max(1, MOST_SCORES // max(1, samples * heads * num_keys))
    parts = []
    for start in range(0, num_queries, rows):
        count = min(rows, num_queries - start)
        first = min(start, num_keys - 1) if block.flipped else 0
        end = min(start + count, num_keys) if block.causal else num_keys
        parts.append(_Part(block, (start, count), (first, end - first)))
    return parts


def _num_queries(part: _Part) -> int:
    return part.queries[1]


def _by_group(x: Tensor, heads: int) -> Tensor:
    """``[batch, query heads or 1, ...]`` with the dim of heads in two, as scores have it."""
    return torch.unflatten(x, 1, (heads, -1)) if x.shape[1] > 1 else x.unsqueeze(1)


def _finite(lse: Tensor) -> Tensor:
    """An lse to subtract: any number serves where all scores are minus infinity."""
    return lse.masked_fill(lse == -math.inf, 0.0)
