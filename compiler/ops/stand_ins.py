"""Functions that the tracer records in the place of what a user wrote, for operators that torch has
no function for.

The runtime has the operators themselves, under the same names; a trace only needs something to
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def only_finite(input: Tensor) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.only_finite`."""
    return _dispatched(only_finite, input)


def unclamped(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.unclamped`."""
    return _dispatched(unclamped, input, min, max)


def any_chosen(mask: Tensor) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.any_chosen`."""
    return _dispatched(any_chosen, mask)


def all_chosen(input: Tensor, mask: Tensor) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.all_chosen`."""
    return _dispatched(all_chosen, input, mask)


def rows_of_expert(mask: Tensor) -> tuple[Tensor, ...]:
    """Stands for the places where a mask of the tokens of one expert is true, until the loop over
    all experts is one dispatch.
    """
    raise NotImplementedError


def dispatch(
    x: Tensor, chosen: Tensor, weights: Tensor | None = None, *, num_experts: int
) -> tuple[Tensor, ...]:
    """Stands for :func:`shardwright.runtime.ops.dispatch`: a row for every pair of an expert and a
    token.
    """
    given = [x, chosen] if weights is None else [x, chosen, weights]
    if has_torch_function(given):
        made: tuple[Tensor, ...] = handle_torch_function(
            dispatch, given, *given, num_experts=num_experts
        )
        return made
    rows = x.repeat(num_experts, 1)
    routing = chosen.new_zeros(num_experts, x.shape[0])
    gains = () if weights is None else (weights[:, :1].reshape(-1).repeat(num_experts),)
    return rows, *gains, routing


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    routing: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    autocast: bool = False,
) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.grouped_linear`."""
    given = [rows, weight, routing] if bias is None else [rows, weight, routing, bias]
    if has_torch_function(given):
        options: Any = {"transposed": transposed, "autocast": autocast}
        result: Tensor = handle_torch_function(grouped_linear, given, *given, **options)
        return result
    # Any expert's matrix has the right shape, and shapes are all that a stand-in is for.
    matrix = weight[0] if transposed else weight[0].T
    device = rows.device.type
    casts = autocast and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if casts else weight.dtype
    out = rows.to(dtype) @ matrix.to(dtype)
    return out if bias is None else out + bias[0].to(dtype)


def combine(rows: Tensor, routing: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.combine`."""
    if has_torch_function((rows, routing)):
        given = rows, routing
        options: Any = {} if dtype is None else {"dtype": dtype}
        result: Tensor = handle_torch_function(combine, given, *given, **options)
        return result
    return rows.view(*routing.shape, *rows.shape[1:]).sum(0, dtype=dtype or rows.dtype)


def attention_where(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_marks: Sequence[Tensor | int] = (),
    key_marks: Sequence[Tensor | int] = (),
    comparisons: Sequence[str] = (),
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Stands for :func:`shardwright.runtime.ops.attention_where`."""
    others = [x for x in (*query_marks, *key_marks, sinks, attn_mask) if isinstance(x, Tensor)]
    given = [query, key, value, *others]
    arguments = (query, key, value, query_marks, key_marks, comparisons, sinks, attn_mask)
    if has_torch_function(given):
        result: Tensor = handle_torch_function(attention_where, given, *arguments, **options)
        return result
    return query.new_zeros(*query.shape[:-1], value.shape[-1])


def _dispatched(function: Any, input: Tensor, *args: Any) -> Tensor:
    """Let modes and tensor subclasses see the call, as they see those of torch's own functions."""
    tensors = (input, *(arg for arg in args if isinstance(arg, Tensor)))
    if not has_torch_function(tensors):
        return input
    result: Tensor = handle_torch_function(function, tensors, input, *args)
    return result
