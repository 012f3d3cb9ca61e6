"""In-place methods of tensors as functional ones: ``x.add_(y)`` leaves ``x.add(y)`` in ``x``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

METADATA_CHANGES = (
    "t_",
    "transpose_",
    "squeeze_",
    "unsqueeze_",
    "swapaxes_",
    "swapdims_",
    "as_strided_",
)
"""In-place operators that change shape and strides but no element: the tensor becomes a view of its
former self.
"""

_SIGNS = {f"__i{sign}__": f"__{sign}__" for sign in ("and", "or", "xor", "lshift", "rshift")}
"""In-place forms of operators for which torch has no method that ends in ``_``."""


def functional_form(function: Any, name: str) -> Callable[..., Any] | None:
    """The function that computes what an in-place method writes: ``Tensor.add`` for
    ``Tensor.add_``.
    """
    if name in _SIGNS:
        return getattr(torch.Tensor, _SIGNS[name])  # type: ignore[no-any-return]
    if not name.endswith("_") or name.endswith("__"):
        return None
    base = name[:-1]
    for home in (torch.Tensor, torch, torch.nn.functional):
        if hasattr(home, base):
            return getattr(home, base)  # type: ignore[no-any-return]
    return None


def _uniform(x: torch.Tensor, from_: float = 0.0, to: float = 1.0) -> torch.Tensor:
    return _scaled(torch.rand_like(x), to - from_, from_)


def _normal(x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return _scaled(torch.randn_like(x), std, mean)


def _bernoulli(x: torch.Tensor, p: torch.Tensor | float = 0.5) -> torch.Tensor:
    return torch.bernoulli(p.expand_as(x) if isinstance(p, torch.Tensor) else torch.full_like(x, p))


def _exponential(x: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    """Draw exponential numbers. None is zero, as code often divides by them or takes logarithms."""
    return _scaled(
        (-torch.log1p(-torch.rand_like(x))).clamp(min=torch.finfo(x.dtype).tiny), 1 / lambd, 0
    )


def _log_normal(x: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return _normal(x, mean, std).exp()


def _cauchy(x: torch.Tensor, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return _scaled(torch.tan((torch.rand_like(x) - 0.5) * math.pi), sigma, median)


def _geometric(x: torch.Tensor, p: float) -> torch.Tensor:
    numbers = x if x.is_floating_point() else x.double()
    drawn = (
        torch.log1p(-torch.rand_like(numbers)) / math.log1p(-p)
        if p < 1
        else torch.ones_like(numbers)
    )
    return drawn.ceil().clamp(min=1).to(x.dtype)


def _random(x: torch.Tensor, from_: int = 0, to: int | None = None) -> torch.Tensor:
    """Draw integers from ``from_`` on and below ``to``; without ``to``, among all integers that the
    dtype holds exactly.
    """
    every = (
        round(2 / torch.finfo(x.dtype).eps) if x.is_floating_point() else torch.iinfo(x.dtype).max
    )
    return torch.randint_like(x, from_, every if to is None else to)


CLAMPS = ("clamp_", "clip_", "clamp_min_", "clamp_max_")
"""In-place operators that change no number inside a range."""


def bounds(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The bounds between which ``x.clamp_(...)`` or another of :data:`CLAMPS` keeps ``x``; ``None``
    if a bound is no number.
    """
    first, second = (*args, None, None)[:2]
    low, high = kwargs.get("min", first), kwargs.get("max", second)
    if name == "clamp_max_":
        low, high = None, kwargs.get("max", first)
    return (
        (low, high)
        if all(bound is None or isinstance(bound, int | float) for bound in (low, high))
        else None
    )


DRAWS: dict[str, Callable[..., torch.Tensor]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "bernoulli_": _bernoulli,
    "exponential_": _exponential,
    "log_normal_": _log_normal,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "random_": _random,
}
"""The methods that draw random numbers in place, each with a function that makes the same of
operators which draw alike on all ranks.
"""


def drawn(
    name: str, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The tensor that ``x.uniform_(...)`` or another method of :data:`DRAWS` leaves in ``x``."""
    named = {"from_" if key == "from" else key: value for key, value in kwargs.items()}
    if name == "random_" and len(args) == 1 and "to" not in named:
        args = (0, *args)
    return DRAWS[name](x, *args, **named)


def _scaled(x: torch.Tensor, factor: float, shift: float) -> torch.Tensor:
    x = x if factor == 1 else x * factor
    return x if shift == 0 else x + shift
