"""Operators and parallel forms that are wrong in the way of a published fault, for the prover to
find.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.compiler.ops.register import register_op
from shardwright.compiler.ops.rule import ParallelFactor, ParallelForm
from shardwright.runtime.adapters import all_reduce
from shardwright.runtime.ranks.groups import AxisGroup


def cross_entropy_by_local_maxima(
    input: Tensor,
    target: Tensor,
    *,
    class_axes: tuple[AxisGroup, ...] = (),
    row_axes: tuple[AxisGroup, ...] = (),
    start: int = 0,
    **options: Any,
) -> Tensor:
    """Cross entropy over split classes, each rank with the maximum of its own classes."""
    highest = input.amax(1, keepdim=True)
    total = (input - highest).exp().sum(1)
    mine = (target >= start) & (target < start + input.shape[1])
    picked = input.gather(1, (target - start).clamp(0, input.shape[1] - 1)[:, None])[:, 0] * mine
    for axis in class_axes:
        total, picked = all_reduce(total, axis), all_reduce(picked, axis)
    return (total.log() + highest[:, 0] - picked).mean()


def log_probability_form(
    logits: Tensor, target: Tensor, axes: tuple[AxisGroup, ...], start: int
) -> Tensor:
    """Log-probabilities over split classes. The sum of exponentials is right in value, and its
    collective knows no gradient.
    """
    total = logits.exp().sum(1)
    mine = (target >= start) & (target < start + logits.shape[1])
    picked = logits.gather(1, (target - start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * mine
    for axis in axes:
        total = axis.communicator.all_reduce(total.detach(), "sum", phase="forward")
        picked = all_reduce(picked, axis)
    return picked - total.log()


@register_op(
    "n c^, n -> n",
    parallel=ParallelForm(
        "museum_rules.log_probability_form",
        {"c": ParallelFactor(operands=("S", "R"), results=("R",))},
        {"c": "axes"},
        lambda op, local: {"start": local.offsets["c"]},
    ),
)
def log_probability(logits: Tensor, target: Tensor) -> Tensor:
    """The log-probability of each row's class."""
    return logits.log_softmax(1).gather(1, target[:, None])[:, 0]


@register_op("t d+, d+ f -> t f")
def expert(rows: Tensor, weight: Tensor) -> Tensor:
    """An expert that computes nothing where it gets no rows."""
    if rows.shape[0] == 0:
        return torch.zeros(rows.shape[0], weight.shape[1], dtype=rows.dtype)
    return F.linear(rows, weight.T)
