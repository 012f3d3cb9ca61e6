"""Rows of chosen experts as dense tensors, for the proof of rules.

A rule speaks of a row for every pair of an expert and a token, and operators store the chosen ones.
Here a call is given dense tensors, and gives dense ones: rows that are not chosen are zeros, and
routing is a mask ``[experts, tokens]`` of zeros and ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.compiler.ops.rule import Densities
from shardwright.runtime.layout import Density
from shardwright.runtime.ops.routing import Routing


def stored(operands: Sequence[Tensor], densities: Sequence[Density | None]) -> list[Any]:
    """The operands as the operator takes them."""
    masks = [x for x, d in zip(operands, densities, strict=True) if d is not None and d.dims == 2]
    found: list[Any] = []
    for x, density in zip(operands, densities, strict=True):
        if density is None:
            found.append(x)
        elif density.dims == 2:
            found.append(_routing(x))
        else:
            found.append(x[masks[0].reshape(-1).bool()])
    return found


def dense(results: Sequence[Any], operands: Sequence[Any], densities: Densities) -> list[Tensor]:
    """The results as the rule speaks of them. ``operands``: as :func:`stored` gives them."""
    # Which expert gets which token, as the operator itself has told it.
    routing = next(x for x in (*results, *operands) if isinstance(x, Routing))
    mask = _mask(routing)
    found: list[Tensor] = []
    for y, density in zip(results, densities[1], strict=True):
        if density is None:
            found.append(y)
        elif density.dims == 2:
            found.append(mask)
        # The rows that are there lie in their places of ``[experts x tokens, hidden]``, among
        # zeros.
        else:
            whole = y.new_zeros(mask.numel(), *y.shape[1:])
            found.append(whole.index_put((mask.reshape(-1).nonzero().squeeze(1),), y))
    return found


def _routing(mask: Tensor) -> Routing:
    _, token = mask.nonzero(as_tuple=True)  # by expert, then by token
    return Routing(token, mask.sum(1).cumsum(0).int(), mask.shape[1], 0)


def _mask(routing: Routing) -> Tensor:
    num_experts = routing.ends.numel()
    expert = torch.arange(num_experts).repeat_interleave(routing.counts)
    mask = torch.zeros(num_experts, routing.num_tokens, dtype=torch.int64)
    return mask.index_put((expert, routing.token), torch.tensor(1))
