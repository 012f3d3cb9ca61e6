"""Derivatives of derivatives, which autograd functions of the runtime do not have.

Their backward exchanges values with other ranks, or computes from what forward has kept, in ways
that autograd does not follow. torch's own ``once_differentiable`` refuses a second derivative only
where the gradient that comes in depends on something. So in

    (grad,) = torch.autograd.grad(cross_entropy(logits, labels), logits, create_graph=True)

whose incoming gradient is the number 1, ``grad`` would pass for a constant, and a penalty on it
would silently lack a term. Here it is refused when the first derivative is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwright.runtime.errors import UsageError


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the ``backward`` of an autograd function that has no derivative of its own.

    With ``create_graph=True`` it raises :class:`UsageError`.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        # Without a graph torch's wrapper has nothing to do.
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        refuse_second()
        return once(ctx, *grads)

    return refusing


def refuse_second() -> None:
    """Raise :class:`UsageError` in a backward of which a graph is recorded."""
    # Autograd enables gradients in backward where it is to record a graph, and nowhere else.
    # torch.compile traces backward ahead of time, with them enabled.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError(
            "a parallel module has no gradients of gradients",
            why="create_graph=True was asked for, and in backward ranks exchange values, which "
            "autograd does not follow",
            hint="leave out create_graph=True; penalties on gradients, and optimizers that "
            "need second derivatives, are computed where no operator is split: with "
            "plan_ngpus=1, without ZeRO-3",
        )
