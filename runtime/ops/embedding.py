"""Embedding with a split vocabulary: no communication, the result is a summand."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.axes import Axes, communicating
from shardwright.runtime.ops.indices import check_indices


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    vocab_axes: Axes = (),
    start: int = 0,
    num_embeddings: int | None = None,
) -> Tensor:
    """``F.embedding``; ``weight`` holds the rows from ``start`` on, and ids outside give zero rows.

    ``input``: global ids, ``padding_idx``: a global index (not negative where the vocabulary is
    split). ``num_embeddings``: of all ranks; ids that none of them has are then refused.
    """
    if not communicating(vocab_axes):
        return F.embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    assert max_norm is None and not scale_grad_by_freq and not sparse, (
        "these need the whole vocabulary"
    )
    if num_embeddings is not None:
        check_indices(
            (input >= 0) & (input < num_embeddings),
            "an id that an embedding looks up",
            num_embeddings,
        )
    num_local = weight.shape[0]
    if num_local == 0:
        # Zeros, with a gradient to the empty weight.
        return weight.sum(0).expand(*input.shape, weight.shape[1]).contiguous()
    # Row 0 here is row ``start`` of the table.
    index = input - start
    outside = (index < 0) | (index >= num_local)
    local_padding = (
        None
        if padding_idx is None or not 0 <= padding_idx - start < num_local
        else padding_idx - start
    )
    # Ids of other ranks look up any row, and give zeros.
    return F.embedding(index.masked_fill(outside, 0), weight, local_padding).masked_fill(
        outside.unsqueeze(-1), 0.0
    )
