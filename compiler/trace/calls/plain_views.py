"""Where in the memory of a tensor an indexed part of it lies, without running the index.

Fake tensors take a millisecond for ``x[:, t, None]``, as that is three operators of torch. An index
of numbers, slices, ``None`` and ``...`` is known at once: it chooses strides and a beginning.

    x [4, 512, 64], strides (32768, 64, 1)
    x[:, 7, None]   [4, 1, 64], strides (32768, 64, 1), begins 448 elements behind x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor's memory. ``offset``: how many elements behind the tensor's own beginning
    it begins.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def indexed_part(x: torch.Tensor, index: Any) -> Part | None:
    """The part that ``x[index]`` is; ``None`` for what is no view, or out of range."""
    items = list(index) if isinstance(index, tuple) else [index]
    # By type: tensors do not say whether they are equal, and ``True`` is a mask.
    consumed = sum(type(item) in (int, slice) for item in items)
    ellipses = sum(item is Ellipsis for item in items)
    if consumed > x.ndim or ellipses > 1:
        return None
    whole = [slice(None)] * (x.ndim - consumed)
    if ellipses:
        place = next(at for at, item in enumerate(items) if item is Ellipsis)
        items[place : place + 1] = whole
    else:
        items += whole
    sizes, strides = x.shape, x.stride()
    shape: list[int] = []
    stride: list[int] = []
    offset, dim = 0, 0
    for item in items:
        if item is None:
            # As unsqueeze has it: the stride of a dim in front of the next one.
            shape.append(1)
            stride.append(sizes[dim] * strides[dim] if dim < x.ndim else 1)
            continue
        if type(item) is int:
            if not -sizes[dim] <= item < sizes[dim]:
                return None
            offset += (item % sizes[dim]) * strides[dim]
        elif type(item) is slice:
            if not all(type(bound) in (int, type(None)) for bound in _bounds(item)):
                return None
            if item.step is not None and item.step < 1:
                return None
            start, stop, step = item.indices(sizes[dim])
            shape.append(max(0, -(-(stop - start) // step)))
            stride.append(strides[dim] * step)
            offset += start * strides[dim]
        else:
            return None
        dim += 1
    return Part(tuple(shape), tuple(stride), offset)


def _bounds(item: slice) -> tuple[Any, Any, Any]:
    return item.start, item.stop, item.step
