"""Means over split dims: the local sum over the global count. No communication, the result is a
summand.

Each function takes PyTorch's arguments by their names, in their order, and ``count``; whatever
``reduction`` says, the result is the sum divided by ``count``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.axes import accumulation_dtype


def mean(
    input: Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    count: int,
) -> Tensor:
    """``torch.mean`` where ``count`` elements of all ranks make one of the result."""
    result_dtype = dtype if dtype is not None else input.dtype
    # The sum of half-precision numbers may overflow where their mean does not.
    total = torch.sum(input, dim, keepdim, dtype=accumulation_dtype(result_dtype))
    return (total / count).to(result_dtype)


def _mean_of(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    names = [
        name
        for name in inspect.signature(loss).parameters
        if name not in ("size_average", "reduce")
    ]

    def over_count(*args: object, count: int, **kwargs: object) -> Tensor:
        # A rank that took the mean of its own piece would weigh its elements by the size of the
        # piece.
        arguments = {**dict(zip(names, args, strict=False)), **kwargs, "reduction": "sum"}
        return loss(**arguments) / count

    over_count.__name__ = over_count.__qualname__ = loss.__name__
    over_count.__doc__ = f"``F.{loss.__name__}({', '.join(names)})`` as its sum over ``count``."
    return over_count


mse_loss = _mean_of(F.mse_loss)
l1_loss = _mean_of(F.l1_loss)
smooth_l1_loss = _mean_of(F.smooth_l1_loss)
huber_loss = _mean_of(F.huber_loss)
binary_cross_entropy = _mean_of(F.binary_cross_entropy)
binary_cross_entropy_with_logits = _mean_of(F.binary_cross_entropy_with_logits)
kl_div = _mean_of(F.kl_div)
poisson_nll_loss = _mean_of(F.poisson_nll_loss)
gaussian_nll_loss = _mean_of(F.gaussian_nll_loss)
soft_margin_loss = _mean_of(F.soft_margin_loss)
hinge_embedding_loss = _mean_of(F.hinge_embedding_loss)
margin_ranking_loss = _mean_of(F.margin_ranking_loss)
cosine_embedding_loss = _mean_of(F.cosine_embedding_loss)
triplet_margin_loss = _mean_of(F.triplet_margin_loss)
multi_margin_loss = _mean_of(F.multi_margin_loss)
multilabel_margin_loss = _mean_of(F.multilabel_margin_loss)
multilabel_soft_margin_loss = _mean_of(F.multilabel_soft_margin_loss)
