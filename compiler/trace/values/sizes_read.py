"""Which tensors of a call are read as sizes: ``n`` of ``x[:n]``, ``sizes`` of ``sizes.tolist()``.

An integer input that sizes are read from becomes a constant without being declared. A truth value
is no size: ``if lengths.max() > 3`` by itself makes no constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from shardwright.compiler.trace.calls.call_arguments import tensors_in
from shardwright.compiler.trace.calls.normalise import FACTORIES
from shardwright.compiler.trace.values.constants import SIZED
from shardwright.compiler.trace.values.values_needed import TRUTH_VALUES

_NO_SIZES = TRUTH_VALUES | {"__format__", "__complex__"}


def sizes_read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call needs the values of, as sizes, lengths or places. The call has failed
    without these values.
    """
    if name in _NO_SIZES:
        return
    if name in ("__getitem__", "__setitem__"):
        yield from _bounds(args[1])
    elif name == "repeat_interleave":
        # Of the elements of another tensor, or alone: ``repeat_interleave(repeats)``.
        yield from tensors_in((*args[1:2], kwargs.get("repeats")) if args[1:] or kwargs else args)
    elif name in SIZED and name not in FACTORIES:
        yield from tensors_in((args[1:], kwargs))
    else:
        yield from tensors_in((args, kwargs))


def _bounds(index: Any) -> Iterator[torch.Tensor]:
    """The tensors among the bounds of the slices of an index."""
    items = index if isinstance(index, tuple) else (index,)
    slices = (item for item in items if isinstance(item, slice))
    yield from chain.from_iterable(tensors_in((s.start, s.stop, s.step)) for s in slices)
