"""Functions whose own form does not run on fake tensors, although the shape of the result follows
from the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Torch's rule for fake tensors refuses float32, its CPU kernel does not."""
    if offs is None or (a.ndim == 3 and b.ndim == 3):
        return torch.bmm(a, b)
    return a @ b[0] if b.ndim == 3 else torch.stack([a @ b] * offs.shape[0])


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """The real one looks whether variances are negative."""
    if isinstance(var, Tensor) and var.ndim == input.ndim - 1:
        var = var.unsqueeze(-1)
    loss = input - target + var
    return loss if reduction == "none" else loss.sum()


def _ctc_loss(
    log_probs: Tensor,  # [T, N, C] or [T, C]
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The real one looks at the lengths."""
    loss = log_probs.sum((0, -1))
    return loss if reduction == "none" else loss.sum()


def _evenly_spaced(start: Any, end: Any, steps: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The real ones take the number of steps as a number, also where it is a dynamic size."""
    return torch.empty(
        (steps,),
        **{name: kwargs[name] for name in ("dtype", "device", "requires_grad") if name in kwargs},
    )


def _getitem(x: Tensor, index: Any) -> Tensor:
    """Read ``x[index]``. A place in the index that is a tensor without dims counts as a number, and
    so does one that follows from dynamic sizes.
    """
    return x[_with_places(index)]


def _setitem(x: Tensor, index: Any, value: Any) -> None:
    """Write ``x[index]``, with the index as in :func:`_getitem`."""
    x[_with_places(index)] = value


def _with_places(index: Any) -> Any:
    """An index in which each place that is no number yet is one."""
    return tuple(map(_place, index)) if isinstance(index, tuple) else _place(index)


def _place(item: Any) -> Any:
    if isinstance(item, torch.SymInt):
        return 0
    is_place = (
        isinstance(item, Tensor) and item.ndim == 0 and item.dtype not in (torch.bool, torch.uint8)
    )
    return 0 if is_place else item


FAKE_FORMS: dict[Any, Callable[..., Any]] = {
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.ctc_loss: _ctc_loss,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.linspace: _evenly_spaced,
    torch.logspace: _evenly_spaced,
}
"""What to run in a function's place while tracing: it gives a tensor of the right shape, dtype and
gradient.
"""

GROUPED_PRODUCTS: dict[Any, Callable[..., Any]] = {
    getattr(home, name): _grouped_mm
    for home, name in ((F, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(home, name)
}
"""What runs in the place of products of groups: one product of as many operations."""

FAKE_FORMS |= GROUPED_PRODUCTS
