"""``varlen_attn`` while tracing: attention of rows that hold documents end to end.

torch has one kernel for it, on GPUs. Here it is attention with a mask that compares documents and
positions, which a plan can split and which is never whole (``compiler/passes/mask_marks.py``).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VARLEN = "torch.nn.attention.varlen"
"""The module of ``varlen_attn``."""


@contextmanager
def varlen_attention_traced(replaced: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """Record ``varlen_attn`` as operators that a plan can split. ``replaced`` replaces an attribute
    for the time of a ``with`` block.
    """
    module: Any = sys.modules.get(VARLEN)
    if module is None:
        yield
        return
    original = torch.ops.torch_attn._varlen_attn
    signature = inspect.signature(module._varlen_attn._init_fn)

    def varlen_attn(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        # Keys in pages, or fewer than there is room for, are of caches: their kernel serves them.
        if any(call.get(name) is not None for name in ("seqused_k", "block_table")):
            return original(*args, **kwargs)
        return _attention(
            call["query"],
            call["key"],
            call["value"],
            (call["cu_seq_q"], call["cu_seq_k"]),
            call.get("scale"),
            call.get("window_size") or ((-1, 0) if call.get("is_causal") else (-1, -1)),
        )

    with replaced(torch.ops.torch_attn, "_varlen_attn", _InPlaceOf(original, varlen_attn)):
        yield


class _InPlaceOf:
    """A function in the place of an operator of torch, whose attributes it keeps: torch walks all
    operators when it first imports its compiler, which a model may cause.
    """

    def __init__(self, operator: Any, function: Callable[..., Any]) -> None:
        self._operator, self._function = operator, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor | None],
    scale: float | None,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[T, heads, width]``, the logarithm of the sum of exponentials ``[heads, T]``, and
    what a kernel without dropout has no use for.
    """
    groups = query.shape[1] // key.shape[1]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    mask = _mask((query.shape[2], key.shape[2]), ends, window)
    out = F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=groups > 1
    )
    # Dropped from the graph, unless it is asked for.
    working = torch.promote_types(query.dtype, torch.float32)
    repeated = key if groups == 1 else key.repeat_interleave(groups, 1)
    scores = (query @ repeated.transpose(-2, -1)).to(working) * scale
    lse = scores.masked_fill(mask.logical_not(), -math.inf).logsumexp(-1)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0), torch.zeros(2, dtype=torch.int64)


def _mask(
    lengths: tuple[int, int], ends: tuple[Tensor, Tensor | None], window: tuple[int, int]
) -> Tensor:
    """Which keys the queries see, ``[queries, keys]``: of their own document, and of these those
    within the window.
    """
    is_one_row = ends[1] is None or ends[1] is ends[0]
    of_queries = ends[0].to(torch.int64)
    of_keys = of_queries if ends[1] is None or is_one_row else ends[1].to(torch.int64)
    places = [torch.arange(length) for length in lengths]
    documents = [
        torch.bucketize(place, starts, right=True)
        for place, starts in zip(places, (of_queries, of_keys), strict=True)
    ]
    query, key = places
    if not is_one_row:
        # Where a document has more keys than queries, the last of both are at one position.
        behind = [
            place - F.pad(starts, (0, 1))[document]
            for place, starts, document in zip(
                places, (of_queries, of_keys), documents, strict=True
            )
        ]
        query, key = behind
    query, key = query.unsqueeze(1), key.unsqueeze(0)
    mask = documents[0].unsqueeze(1) == documents[1].unsqueeze(0)
    before, after = window
    if after >= 0:
        mask = mask & (key <= query + after)
    if before >= 0:
        mask = mask & (key >= query - before)
    return mask
