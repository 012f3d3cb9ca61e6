"""Convolutions of images and sequences that are cut along space."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.edges import CutDim, EdgeWords, cut_dims, trimmed, windows

Numbers = int | tuple[int, ...]
"""One number for all dims of space, or one for each."""

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def per_dim(numbers: Numbers, num_dims: int) -> tuple[int, ...]:
    """One number for each dim of space."""
    given = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return given * num_dims if len(given) == 1 else given


def _paddings(
    padding: Numbers | str, kernel: Sequence[int], dilation: Numbers
) -> list[tuple[int, int]]:
    """The zeros before and behind each dim of space. ``same`` puts the odd one behind."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        dilations = per_dim(dilation, len(kernel))
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    assert not isinstance(padding, str), padding
    return [(n, n) for n in per_dim(padding, len(kernel))]


def _convolution(num_dims: int) -> Callable[..., Tensor]:
    plain = _CONVOLUTIONS[num_dims]

    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Numbers = 1,
        padding: Numbers | str = 0,
        dilation: Numbers = 1,
        groups: int = 1,
        *,
        edges: Sequence[EdgeWords] = (),
    ) -> Tensor:
        cuts = cut_dims(edges)
        x = windows(input, cuts)
        paddings = _paddings(padding, weight.shape[2:], dilation)
        first = input.ndim - num_dims
        for cut in cuts:  # the window has the padding
            paddings[cut.edge.dim - first] = (0, 0)
        if any(before != behind for before, behind in paddings):
            x = F.pad(x, [n for pair in reversed(paddings) for n in pair])
            # A padding that differs at both ends is given as values, as ``F.conv2d`` takes one
            # number a dim.
            paddings = [(0, 0)] * num_dims
        both = tuple(before for before, _ in paddings)
        return trimmed(plain(x, weight, bias, stride, both, dilation, groups), cuts)

    conv.__name__ = f"conv{num_dims}d"
    conv.__doc__ = f"""``F.conv{num_dims}d``; dims of space are cut as ``edges`` say. The gradients
    of weight and bias are summands.
    """
    return conv


def _transposed(num_dims: int) -> Callable[..., Tensor]:
    plain = _TRANSPOSED[num_dims]

    def conv_transpose(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Numbers = 1,
        padding: Numbers = 0,
        output_padding: Numbers = 0,
        groups: int = 1,
        dilation: Numbers = 1,
        *,
        edges: Sequence[EdgeWords] = (),
    ) -> Tensor:
        cuts = cut_dims(edges)
        x = windows(input, cuts)
        first = input.ndim - num_dims
        strides, paddings = per_dim(stride, num_dims), list(per_dim(padding, num_dims))
        behind = list(per_dim(output_padding, num_dims))
        # Padding of a transposed convolution takes rows away from the result. Along a cut dim only
        # the ranks at its ends may do so, hence no call pads there and _own cuts afterwards.
        whole = list(paddings)
        for cut in cuts:
            paddings[cut.edge.dim - first] = behind[cut.edge.dim - first] = 0
        y = plain(x, weight, bias, stride, tuple(paddings), tuple(behind), groups, dilation)
        for cut in cuts:
            at = cut.edge.dim - first
            y = _own(y, cut, strides[at], whole[at])
        return y

    conv_transpose.__name__ = f"conv_transpose{num_dims}d"
    conv_transpose.__doc__ = f"""``F.conv_transpose{num_dims}d``; dims of space are cut as ``edges``
    say. The gradients of weight and bias are summands.
    """
    return conv_transpose


def _own(y: Tensor, cut: CutDim, stride: int, padding: int) -> Tensor:
    """What this rank makes, of the places that its window reaches."""
    start, stop = cut.made
    # Place ``p`` of the operand is added at ``p * stride - padding`` and behind: so the first place
    # that the call made is that of the first place read.
    offset = start - (cut.read[0] * stride - padding) if stop > start else 0
    return y.narrow(cut.edge.dim, offset, stop - start)


conv1d, conv2d, conv3d = map(_convolution, (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_transposed, (1, 2, 3))
