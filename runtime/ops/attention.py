"""Attention with dropout on its weights: written out, as PyTorch's kernels draw their masks from
the global generator. Where keys go round it is computed in tiles, and weights are never whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.attention_dropout import WeightDropout
from shardwright.runtime.ops.axes import Axes, Length, communicating, piece_runs, whole_length
from shardwright.runtime.ops.dropout import dropout
from shardwright.runtime.ops.random import Draw
from shardwright.runtime.ops.split_attention import split_attention
from shardwright.runtime.runs import Run


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    draw: Draw,
    query_axes: Axes = (),
    key_axes: Axes = (),
    lengths: tuple[Length, Length] = (0, 0),
    query_unit: int = 1,
) -> Tensor:
    """``F.scaled_dot_product_attention``; ``draw`` is that of the attention weights ``[..., L,
    S]``. ``query_axes``, ``key_axes``, ``lengths``, ``query_unit``: as in :func:`split_attention`,
    if the rank has a part of the queries, and ``is_causal`` or keys that go round.

    query ``[..., L, E]``, key ``[..., S, E]``, value ``[..., S, Ev]``; with ``enable_gqa`` the head
    dim (-3) of key and value is smaller, and each of their heads serves a run of query heads.
    """
    if communicating(key_axes):
        dropped = None
        if dropout_p:
            # Of the weights; each head of queries has its own.
            heads = query.shape[-3] if query.ndim > 2 else 1
            shape = (heads, query.shape[-2], whole_length(lengths[1]))
            dropped = WeightDropout.of(dropout_p, shape, draw)
        return split_attention(
            query,
            key,
            value,
            attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            query_axes=query_axes,
            key_axes=key_axes,
            lengths=lengths,
            query_unit=query_unit,
            dropout=dropped,
        )
    if is_causal and query_axes:
        runs = piece_runs(query_axes, lengths[0], query_unit)
        attn_mask, is_causal = _causal_mask(key, runs), False
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        repeats = query.shape[-3] // max(key.shape[-3], 1)
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    # [..., L, S].
    scores = (
        query
        @ key.transpose(-2, -1)
        * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    )
    if is_causal:
        attn_mask = _causal_mask(key, ((0, query.shape[-2]),))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # A row without any key gives zeros, as PyTorch's own kernels have it, where a plain softmax
        # gives nan.
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
        weights = scores.masked_fill(attn_mask.any(-1, keepdim=True).logical_not(), 0.0).softmax(-1)
        weights = weights.masked_fill(attn_mask.logical_not(), 0.0)
    else:
        weights = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
    if draw.layout is None:
        return dropout(weights, dropout_p, draw=draw) @ value
    # The numbers that a ring draws tile by tile.
    whole = WeightDropout.of(dropout_p, weights.shape, draw)
    return whole.dropped(weights) @ value


def _causal_mask(key: Tensor, queries: Sequence[Run]) -> Tensor:
    """``[L, S]``: which keys each of the queries at these places sees, those up to its own."""
    columns = torch.arange(key.shape[-2], device=key.device)
    rows = [torch.arange(start, start + size, device=key.device) for start, size in queries]
    place = torch.cat(rows) if rows else columns[:0]
    return columns <= place.unsqueeze(-1)
