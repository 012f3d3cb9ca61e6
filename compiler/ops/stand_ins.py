"""Functions that the tracer records in the place of what a user wrote, for operators that torch has
no function for.

The runtime has the operators themselves, under the same names; a trace only needs something to
call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def only_finite(input: Tensor) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.only_finite`."""
    return _dispatched(only_finite, input)


def unclamped(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.unclamped`."""
    return _dispatched(unclamped, input, min, max)


def all_chosen(input: Tensor, mask: Tensor) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.all_chosen`."""
    return _dispatched(all_chosen, input, mask)


def _dispatched(function: Any, input: Tensor, *args: Any) -> Tensor:
    """Let modes and tensor subclasses see the call, as they see those of torch's own functions."""
    tensors = (input, *(arg for arg in args if isinstance(arg, Tensor)))
    if not has_torch_function(tensors):
        return input
    result: Tensor = handle_torch_function(function, tensors, input, *args)
    return result
