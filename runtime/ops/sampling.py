"""Operators whose result is random: PyTorch's factories and samplers with the draws of
:mod:`shardwright.runtime.ops.random`.

Sizes are local ones. ``draw`` says which numbers are drawn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.runtime.ops.random import Draw

Device = torch.device | str | None


def _device(device: Device) -> torch.device:
    return torch.device(device) if device is not None else torch.get_default_device()


def rand(
    *size: int,
    dtype: torch.dtype | None = None,
    device: Device = None,
    draw: Draw,
) -> Tensor:
    """``torch.rand``."""
    return draw.uniform(size, _device(device), dtype or torch.get_default_dtype())


def randn(
    *size: int,
    dtype: torch.dtype | None = None,
    device: Device = None,
    draw: Draw,
) -> Tensor:
    """``torch.randn``."""
    return draw.normal(size, _device(device), dtype or torch.get_default_dtype())


def randint(
    low: int,
    high: int,
    size: tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: Device = None,
    *,
    draw: Draw,
) -> Tensor:
    """``torch.randint``: integers from ``low`` to ``high - 1``."""
    target = _device(device)
    return draw.piece(
        size,
        target,
        lambda shape, g: torch.randint(
            low, high, shape, generator=g, dtype=dtype or torch.int64, device=target
        ),
    )


def rand_like(
    input: Tensor,
    dtype: torch.dtype | None = None,
    device: Device = None,
    *,
    draw: Draw,
) -> Tensor:
    """``torch.rand_like``."""
    return draw.uniform(input.shape, _like(input, device), dtype or input.dtype)


def randn_like(
    input: Tensor,
    dtype: torch.dtype | None = None,
    device: Device = None,
    *,
    draw: Draw,
) -> Tensor:
    """``torch.randn_like``."""
    return draw.normal(input.shape, _like(input, device), dtype or input.dtype)


def randint_like(
    input: Tensor,
    low: int,
    high: int,
    dtype: torch.dtype | None = None,
    device: Device = None,
    *,
    draw: Draw,
) -> Tensor:
    """``torch.randint_like``."""
    shape, target = tuple(input.shape), _like(input, device)
    return randint(
        low,
        high,
        shape,
        dtype or input.dtype,
        target,
        draw=draw,
    )


def _like(input: Tensor, device: Device) -> torch.device:
    return torch.device(device) if device is not None else input.device


def bernoulli(
    input: Tensor,
    p: float | Tensor | None = None,
    *,
    draw: Draw,
) -> Tensor:
    """``torch.bernoulli(input)``: ones with the probabilities in ``input``; or
    ``input.bernoulli_(p)`` as a new tensor.
    """
    # In double precision, so that probabilities close to 0 and 1 are not rounded.
    chance = draw.uniform(input.shape, input.device, torch.float64)
    return (chance < (input.detach() if p is None else p)).to(input.dtype)


def normal(
    mean: Tensor | float,
    std: Tensor | float = 1.0,
    size: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    device: Device = None,
    *,
    draw: Draw,
) -> Tensor:
    """``torch.normal``: of tensors and numbers, broadcast, or of two numbers and a ``size``."""
    like = mean if isinstance(mean, Tensor) else std
    if isinstance(like, Tensor):
        both = torch.as_tensor(mean + std)
        numbers = draw.normal(both.shape, like.device, like.dtype)
        # PyTorch does not differentiate the draw: the gradients of mean and std are zeros.
        never = torch.zeros((), dtype=torch.bool, device=like.device)
        with torch.no_grad():
            sample = mean + std * numbers
        return torch.where(never, both, sample)
    return mean + std * draw.normal(size or (), _device(device), dtype or torch.get_default_dtype())


def normal_like(
    input: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    draw: Draw,
) -> Tensor:
    """``input.normal_(mean, std)``, as a new tensor."""
    return mean + std * draw.normal(input.shape, input.device, input.dtype)


def uniform_like(
    input: Tensor,
    low: float = 0.0,
    high: float = 1.0,
    *,
    draw: Draw,
) -> Tensor:
    """``input.uniform_(low, high)``, as a new tensor."""
    return low + (high - low) * draw.uniform(input.shape, input.device, input.dtype)


def exponential_like(
    input: Tensor,
    lambd: float = 1.0,
    *,
    draw: Draw,
) -> Tensor:
    """``input.exponential_(lambd)``, as a new tensor."""
    return draw.exponential(input.shape, input.device, input.dtype) / lambd


def multinomial(
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    draw: Draw,
) -> Tensor:
    """``torch.multinomial``: indices drawn from the weights in each row of ``input`` ``[rows,
    categories]``.
    """
    weights, num_categories = input.detach().double(), input.shape[-1]
    if replacement:
        shape = (*input.shape[:-1], num_samples)
        # Inverse of the distribution function. Scaled below the total, so that a draw never falls
        # behind the last category that has weight.
        steps = weights.cumsum(-1)
        level = draw.uniform(shape, input.device, torch.float64) * steps[..., -1:]
        return torch.searchsorted(steps, level.contiguous(), right=True).clamp_(
            max=num_categories - 1
        )
    # Exponential races: the k first arrivals at rates `weights` are a sample without replacement.
    race = draw.with_dim(-1, num_categories)
    arrival = race.exponential(input.shape, input.device, torch.float64) / weights
    return arrival.topk(num_samples, dim=-1, largest=False).indices


def randperm(
    n: int,
    dtype: torch.dtype | None = None,
    device: Device = None,
    *,
    draw: Draw,
) -> Tensor:
    """``torch.randperm``; it is never cut."""
    target = _device(device)
    return draw.piece(
        (n,),
        target,
        lambda shape, g: torch.randperm(
            shape[0], generator=g, dtype=dtype or torch.int64, device=target
        ),
    )


def gumbel_softmax(
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    dim: int = -1,
    *,
    draw: Draw,
) -> Tensor:
    """``F.gumbel_softmax``; ``dim`` is whole."""
    noise = -draw.exponential(logits.shape, logits.device, logits.dtype).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    one_hot = torch.zeros_like(logits).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return one_hot - soft.detach() + soft


def rrelu(
    input: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    *,
    draw: Draw,
) -> Tensor:
    """``F.rrelu``: negative elements are scaled by a random slope between ``lower`` and
    ``upper``.
    """
    if not training:
        return F.rrelu(input, lower, upper, training=False)
    slope = lower + (upper - lower) * draw.uniform(input.shape, input.device, input.dtype)
    return torch.where(input <= 0, input * slope, input)
