"""Attention with dropout on its weights: written out, as PyTorch's kernels draw their masks from
the global generator; and causal attention of a part of the queries.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.dropout import dropout
from shardwright.runtime.ops.random import NamedSizes, RngState


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
    rng: RngState,
    draw: str,
    layout: str,
    sizes: NamedSizes = (),
    query_start: int | None = None,
) -> Tensor:
    """``F.scaled_dot_product_attention``; ``layout`` is that of the attention weights ``[..., L,
    S]``. ``query_start``: where this rank's queries start, if it has a part of them and
    ``is_causal``.

    query ``[..., L, E]``, key ``[..., S, E]``, value ``[..., S, Ev]``; with ``enable_gqa`` the head
    dim (-3) of key and value is smaller, and each of their heads serves a run of query heads.
    """
    if is_causal and query_start is not None:
        attn_mask, is_causal = _causal_mask(query, key, query_start), False
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
        attn_mask = _causal_mask(query, key, 0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # A row without any key gives zeros, as PyTorch's own kernels have it, where a plain softmax
        # gives nan.
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
        weights = scores.masked_fill(attn_mask.any(-1, keepdim=True).logical_not(), 0.0).softmax(-1)
        weights = weights.masked_fill(attn_mask.logical_not(), 0.0)
    else:
        weights = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
    return dropout(weights, dropout_p, rng=rng, draw=draw, layout=layout, sizes=sizes) @ value


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    query_start: int = 0,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with ``is_causal`` for the queries ``[..., L, E]`` from
    position ``query_start`` on; keys ``[..., S, E]`` and values ``[..., S, Ev]`` are whole.
    ``attn_mask`` and ``dropout_p`` are as the operator has them: none and 0; so is ``is_causal``,
    which may be false in training or in evaluation.

    The mask ``[L, S]`` is a tensor, also where a rank has the first queries: ranks run the same
    kernels, as the last has to.
    """
    mask = _causal_mask(query, key, query_start) if is_causal else None
    return F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=enable_gqa
    )


def _causal_mask(query: Tensor, key: Tensor, start: int) -> Tensor:
    """``[L, S]``: which keys each query sees, those up to its own position."""
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril(
        start
    )
