"""Functions that the tracer records in the place of what a user wrote, for operators that torch has no function for.

The runtime has the operators themselves, under the same names; a trace only needs something to call.
"""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def only_finite(input: Tensor) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.only_finite`."""
    return input


def unclamped(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.unclamped`."""
    return input


def all_chosen(input: Tensor, mask: Tensor) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.all_chosen`."""
    if has_torch_function((input, mask)):
        return handle_torch_function(all_chosen, (input, mask), input, mask)  # type: ignore[no-any-return]
    return input
