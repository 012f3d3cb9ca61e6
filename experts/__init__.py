"""Experts in a model of your own: the operators that split over ranks as those of known models do.

    from shardwright.experts import combine, dispatch, grouped_linear

    weights, chosen = self.router(x).softmax(-1).topk(2)                 # x [tokens, hidden]
    rows, gains, routing = dispatch(x, chosen, weights, num_experts=8)
    rows = F.silu(grouped_linear(rows, self.experts.up, routing))        # up [8, inner, hidden]
    rows = grouped_linear(rows, self.experts.down, routing)              # down [8, hidden, inner]
    y = combine(rows * gains.unsqueeze(-1), routing)

On one device they are ordinary functions, with gradients. What stands between the first and the
last must treat every row by itself. A loop over experts that asks which of them got tokens cannot
be traced; written so it can.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.runtime import ops as on_one_device
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, InputError, brief
from shardwright.runtime.ops.indices import check_indices
from shardwright.runtime.ops.routing import checked_routing

MOST_EXPERTS = 2**20
"""More are a slip, and would fill the memory."""

__all__ = ["combine", "dispatch", "grouped_linear", "within_capacity"]


@checked
def dispatch(
    x: Tensor, chosen: Tensor, weights: Tensor | None = None, *, num_experts: int
) -> tuple[Any, ...]:
    """The rows of tokens for the experts that were chosen for them, sorted by expert.

    ``x [tokens, hidden]``; ``chosen [tokens, top_k]``: different experts of each token, as integers
    from 0 to ``num_experts - 1``; ``weights [tokens, top_k]``. Returns ``(rows, gains, routing)``:
    the rows, the weight of each, and what the other two functions are told of them. Without weights
    there are no gains. Raises :class:`InputError` for an expert that does not exist.
    """
    if isinstance(x, FakeTensor):
        return _traced().dispatch(x, chosen, weights, num_experts=num_experts)  # type: ignore[no-any-return]
    _check_number(num_experts)
    _check(x, "x", x.ndim == 2, "[tokens, hidden]")
    _check(chosen, "chosen", chosen.ndim == 2 and len(chosen) == len(x), "[tokens, top_k]")
    _check(chosen, "chosen", not (chosen.is_floating_point() or chosen.is_complex()), "integers")
    if weights is not None:
        _check(weights, "weights", weights.shape == chosen.shape, "[tokens, top_k], like chosen")
    return on_one_device.dispatch(x, chosen, weights, num_experts=num_experts)


@checked
def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    routing: Any,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    autocast: bool = True,
) -> Tensor:
    """Each row times the matrix of its expert.

    ``weight [experts, out, in]``, or ``[experts, in, out]`` if ``transposed``; ``bias [experts,
    out]``. ``autocast``: whether it follows autocast, as ``F.linear`` does.
    """
    options = {"transposed": transposed, "autocast": autocast}
    module = _traced() if isinstance(rows, FakeTensor) else on_one_device
    if module is on_one_device:
        num_experts, num_rows = _sizes(routing)
        _check(rows, "rows", rows.ndim == 2 and len(rows) == num_rows, f"[{num_rows}, in]")
        fits = weight.ndim == 3 and len(weight) == num_experts
        fits = fits and weight.shape[1 if transposed else 2] == rows.shape[1]
        order = "[experts, in, out]" if transposed else "[experts, out, in]"
        _check(weight, "weight", fits, f"{order} of {num_experts} experts and rows [rows, in]")
        if bias is not None:
            out = weight.shape[2 if transposed else 1]
            _check(bias, "bias", bias.shape == (num_experts, out), f"[{num_experts}, {out}]")
    return module.grouped_linear(rows, weight, routing, bias, **options)  # type: ignore[no-any-return]


@checked
def combine(rows: Tensor, routing: Any, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of the rows of each token, ``[tokens, hidden]``.

    ``dtype``: of the result, and of the sums that ranks send each other (default: that of the
    rows). Rows of float32 in a model of bfloat16 are summed in float32, and sent in half the bytes.
    """
    module = _traced() if isinstance(rows, FakeTensor) else on_one_device
    if module is on_one_device:
        num_rows = _sizes(routing)[1]
        _check(rows, "rows", rows.ndim > 0 and len(rows) == num_rows, f"[{num_rows}, ...]")
    return module.combine(rows, routing, dtype=dtype)  # type: ignore[no-any-return]


def _sizes(routing: Any) -> tuple[int, int]:
    """The numbers of experts and of rows."""
    found = checked_routing(routing)
    return len(found.counts), len(found.token)


def _check_number(num_experts: int) -> None:
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ConfigError(f"num_experts={brief(num_experts)} is no number of experts")


def _check(x: Tensor, name: str, fits: bool, expected: str) -> None:
    if not fits:
        raise InputError(
            f"experts: {name} is {expected}", why=f"it is {x.dtype} of shape {list(x.shape)}"
        )


@checked
def within_capacity(
    chosen: Tensor,
    weights: Tensor,
    *,
    num_experts: int,
    factor: float,
    min_capacity: int = 1,
    drop: Literal["probability", "position"] = "probability",
    groups: int = 1,
) -> Tensor:
    """The weights of choices, 0 for those beyond the capacity of their expert.

    ``chosen``, ``weights [tokens, top_k]``, as :func:`dispatch` takes them. Each of ``num_experts``
    experts keeps ``tokens * top_k / num_experts * <factor>`` choices, rounded up, at least
    ``min_capacity``: those of the largest weights, or with ``drop="position"`` those of the first
    tokens.

    Tokens are those of the whole batch. With ``groups`` they are cut in so many equal parts, each
    of which is counted by itself: as many groups as data-parallel ranks is how Megatron-LM counts.
    The groups are a part of the model, so that results do not depend on the plan.

    Raises :class:`InputError` for tokens that the groups do not divide, a factor that is no number
    above 0, or a negative ``min_capacity``.
    """
    _check(chosen, "chosen", chosen.ndim == 2, "whole numbers of shape [tokens, top_k]")
    _check(weights, "weights", weights.shape == chosen.shape, "of the shape of chosen")
    _check_number(num_experts)
    if not isinstance(chosen, FakeTensor):
        check_indices((chosen >= 0) & (chosen < num_experts), "a chosen expert", num_experts)
    num_tokens, top_k = chosen.shape
    if groups < 1 or num_tokens % groups:
        raise InputError(
            f"{num_tokens} tokens cannot be counted in {groups} groups",
            why="all groups have the same capacity, and so as many tokens",
            hint="a number of groups that divides the tokens of a batch",
        )
    if factor <= 0 or not math.isfinite(factor):
        raise InputError(
            f"experts cannot have a capacity factor of {brief(factor)}",
            why="each keeps its even share of the choices times this factor",
            hint="a factor above 0, about 1 to 2; without within_capacity nothing is dropped",
        )
    if min_capacity < 0:
        raise InputError(
            f"experts cannot keep at least {brief(min_capacity)} choices",
            hint="min_capacity=0, or how many an expert keeps of even the smallest batch",
        )
    size = num_tokens // groups
    share = size * top_k / num_experts * factor
    # For the largest factors the share is infinite: nothing is dropped.
    capacity = max(min_capacity, math.ceil(share) if math.isfinite(share) else size)
    # [groups, tokens of a group, experts]: a cut of the batch into so many pieces cuts groups only.
    wanted = F.one_hot(chosen, num_experts).sum(1).view(groups, size, num_experts)
    if drop == "position":
        kept = wanted * (wanted.cumsum(1) <= capacity)
    else:
        # What no token chose comes last, and is not wanted where it is among the best all the same.
        scores = weights.new_full((num_tokens, num_experts), -math.inf)
        scores = scores.scatter(1, chosen, weights.detach()).view(groups, size, num_experts)
        best = scores.topk(min(capacity, size), dim=1).indices
        kept = wanted * torch.zeros_like(wanted).scatter(1, best, 1)
    kept = kept.reshape(num_tokens, num_experts).gather(1, chosen)
    return weights * kept.to(weights.dtype)


def _traced() -> Any:
    """What a trace records in their place."""
    from shardwright.compiler.ops import stand_ins

    return stand_ins
