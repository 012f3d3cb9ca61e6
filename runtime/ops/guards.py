"""Checks of what a traced branch took for granted. Each gives back its first argument.

On a GPU, which is not waited for, a check that fails is a failed assertion of a kernel, as with
indices out of range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.runtime.errors import InputError


def only_finite(input: Tensor) -> Tensor:
    """``input``, whose numbers are finite.

    Raises :class:`InputError` if one is not: forward asks for that and goes another way then, which
    was not compiled.
    """
    _require(
        torch.isfinite(input.detach()).all(),
        "a number is infinite or no number where forward branches on that",
        "the branch for finite numbers is compiled, the other one mends what overflows",
        "scale the loss down, train in bfloat16 or float32, or look for what diverges",
    )
    return input


def unclamped(input: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """``input``, a parameter that is not smaller than ``min`` nor larger than ``max``.

    Raises :class:`InputError` if a number of it is: forward would clamp the parameter in place,
    which only optimizers change.
    """
    # Looked at without a trace in autograd's graph.
    value = input.detach()
    inside = torch.ones((), dtype=torch.bool, device=value.device)
    inside = inside if min is None else inside & (value >= min).all()
    inside = inside if max is None else inside & (value <= max).all()
    _require(
        inside,
        f"a parameter has left the range from {min} to {max} that forward clamps it to",
        "forward would change the parameter in place, and the compiled module leaves that to "
        "the optimizer",
        "clamp it after optimizer.step(), or take smaller steps",
    )
    return input


def all_chosen(input: Tensor, mask: Tensor) -> Tensor:
    """``input``, of which ``mask`` chooses every element.

    Raises :class:`InputError` if it does not: the dummy arguments had no other, and sizes follow
    from that.
    """
    _require(
        mask.all(),
        "a mask leaves out elements that it chose when the module was compiled",
        "how many elements it chooses decides sizes, and the mask of the dummy arguments is "
        "true everywhere",
        "pass inputs without padding there, or compile another module for these",
    )
    return input


def any_chosen(mask: Tensor) -> Tensor:
    """``mask [..., keys]``, which chooses a key for each sample.

    Raises :class:`InputError` if it does not.
    """
    _require(
        mask.any(-1).all(),
        "a mask of attention hides all keys of a sample",
        "the kernel of attention that is compiled in the place of softmax has no exact gradients "
        "for a sample without keys",
        "leave samples without keys out of the batch, or let each have one",
    )
    return mask


def _require(holds: Tensor, what: str, why: str, hint: str) -> None:
    try:
        torch._assert_async(holds, f"{what}: {why}")
    except RuntimeError as error:
        raise InputError(what, why=why, hint=hint) from error
