"""``flex_attention`` and ``varlen_attn`` on a CPU, forward and backward, by their definitions:
torch's own do not train there, and have no float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

FLEX = "torch.nn.attention.flex_attention"
VARLEN = "torch.nn.attention.varlen"


@contextmanager
def dense_attention() -> Iterator[None]:
    """Attention of these modules computes all scores, and nothing is compiled."""
    with ExitStack() as stack:
        if VARLEN in sys.modules:
            ops: Any = torch.ops.torch_attn
            stack.enter_context(patch.object(ops, "_varlen_attn", _by_document))
        flex: Any = sys.modules.get(FLEX)
        if flex is not None:
            for name, new in {
                "flex_attention_hop": _by_position(flex._vmap_for_bhqkv),
                "_validate_device": lambda query, key, value: None,
                "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
            }.items():
                stack.enter_context(patch.object(flex, name, new))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _by_position(mapped: Callable[..., Any]) -> Callable[..., Any]:
    """Flex attention. ``mapped`` makes a function of one position one of all positions."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor],
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.transpose(-2, -1) * scale
        places = [torch.arange(size, device=query.device) for size in scores.shape]
        with TransformGetItemToIndex():
            scores = mapped(score_mod, prefix=(0,))(scores, *places)
            seen = mapped(block_mask[-1], prefix=())(*places)
        scores = scores.masked_fill(~seen, -math.inf)
        weights = torch._safe_softmax(scores, -1)
        return weights @ value, scores.logsumexp(-1) / math.log(2), scores.amax(-1)

    return attention


def _by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
    window_size: tuple[int, int],
    *settings: Any,
) -> tuple[Tensor, None, None]:
    """``varlen_attn`` of rows ``[T, heads, width]``, without what it may return besides."""
    ends = [cu.tolist() for cu in (cu_seq_q, cu_seq_q if cu_seq_k is None else cu_seq_k)]
    parts = []
    for (start, stop), (first, last) in zip(*map(pairwise, ends), strict=True):
        q, k, v = (
            x.transpose(0, 1) for x in (query[start:stop], key[first:last], value[first:last])
        )
        # The last of the queries and of the keys are at one position.
        away = torch.arange(last - first) - torch.arange(stop - start).unsqueeze(1)
        away = away - (last - first) + (stop - start)
        before, after = window_size
        seen = torch.ones_like(away, dtype=torch.bool)
        if before >= 0:
            seen &= away >= -before
        if after >= 0:
            seen &= away <= after
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts), None, None
