"""The dropout family. ``draw`` says which mask is drawn. Without training, or with ``p=0``, the
input itself comes back.

Channel-wise forms have masks whose spatial dims have size 1, so that a channel is kept or dropped
as a whole: for ``input [N, C, H, W]`` the mask is ``[N, C, 1, 1]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwright.runtime.errors import InputError
from shardwright.runtime.ops.random import Draw

# Of SELU: alpha dropout sets what it drops to the value SELU saturates at (Klambauer et al. 2017,
# section 3).
_SELU_SATURATION = 1.7580993408473766


def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    draw: Draw,
    mask_shape: Sequence[int] | None = None,
) -> Tensor:
    """``F.dropout``: elements are zeroed with probability ``p``, the others scaled by ``1 / (1 -
    p)``.
    """
    check_probability(p)
    if not training or p == 0:
        return input
    if p == 1:
        return input * 0.0
    shape = input.shape if mask_shape is None else mask_shape
    return input * draw.kept(shape, input.device, input.dtype, 1 - p).div_(1 - p)


def alpha_dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    draw: Draw,
    mask_shape: Sequence[int] | None = None,
) -> Tensor:
    """``F.alpha_dropout``: keeps mean and variance of a SELU network's activations."""
    check_probability(p)
    if not training or p == 0:
        return input
    if p == 1:
        return input * 0.0
    shape = input.shape if mask_shape is None else mask_shape
    kept = draw.kept(shape, input.device, input.dtype, 1 - p)
    # Klambauer et al., "Self-Normalizing Neural Networks": what is dropped becomes the saturation
    # value, then scale and shift restore mean 0 and variance 1.
    scale = 1 / math.sqrt((_SELU_SATURATION**2 * p + 1) * (1 - p))
    shift = (kept - 1) * (_SELU_SATURATION * scale) + _SELU_SATURATION * scale * p
    return input * (kept * scale) + shift


def _of_channels(
    function: Callable[..., Tensor], num_shared: int | None = None
) -> Callable[..., Tensor]:
    """``function`` with a mask that is the same along the last ``num_shared`` dims of the input;
    ``None``: along all dims after the second.
    """

    @functools.wraps(function)
    def of_channels(input: Tensor, *args: Any, **keywords: Any) -> Tensor:
        num_kept = min(2, input.ndim) if num_shared is None else input.ndim - num_shared
        mask_shape = (*input.shape[:num_kept], *[1] * (input.ndim - num_kept))
        return function(input, *args, **keywords, mask_shape=mask_shape)

    return of_channels


dropout1d, dropout2d, dropout3d = (_of_channels(dropout, num) for num in (1, None, 3))
feature_alpha_dropout = _of_channels(alpha_dropout)


def check_probability(p: float) -> None:
    """Raise :class:`InputError` for what is no probability."""
    if not 0 <= p <= 1:
        raise InputError("a dropout probability lies between 0 and 1", why=f"it is {p}")
