"""What is asked of all gradients together: their norm, every distinct element counted once under
any layout, and whether they are finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Layout
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.failures import concerning
from shardwright.runtime.ranks.groups import RankMesh


def counts_here(layout: Layout, ranks: RankMesh) -> bool:
    """Whether this rank counts its piece of a tensor: it is the first of those that hold the same
    piece.
    """
    cut = layout.cut_axes
    return (
        ranks.is_member
        and ranks.unit == 0
        and all(index == 0 for axis, index in ranks.coords.items() if axis not in cut)
    )


def global_norm(
    counted: Iterable[Tensor],
    everyone: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    order: float = 2.0,
) -> Tensor:
    """The norm of all gradients as a scalar of ``dtype``, the same on all ranks. Collective.

    ``counted``: the tensors whose ``grad`` this rank counts, see :func:`counts_here`; gradients
    must have been summed.
    ``order``: of the norm, above 0; with infinity it is the largest absolute value.

    Raises :class:`UsageError` for another order.
    """
    if not order > 0:
        raise UsageError(
            f"the norm of order {order:g} of gradients that lie on several ranks is not computed",
            why="it is no norm of one vector: torch takes it of each tensor, and then of the "
            "results",
            hint="use norm_type=2.0, another positive order, or infinity",
        )
    # One norm for each tensor, then the norm of these.
    norms = []
    for tensor in counted:
        grad = tensor.grad
        if grad is not None and grad.numel():
            wide = torch.promote_types(dtype, grad.dtype)
            norms.append(torch.linalg.vector_norm(grad, order, dtype=wide))
    # In float64: a sum of squares overflows float32 long before the norm does.
    mine = (
        torch.stack(norms).double() if norms else torch.zeros(1, dtype=torch.float64, device=device)
    )
    with concerning("the norm of all gradients"):
        if math.isinf(order):
            return everyone.all_reduce(mine.max(), "max", phase="gradients").to(dtype)
        powers = everyone.all_reduce(mine.pow(order).sum(), phase="gradients")
    return powers.pow(1 / order).to(dtype)


def norm_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """The widest dtype among the parameters, at least float32; of complex ones that of their
    parts.
    """
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype.to_real())
    return dtype


def unscale(gradients: Iterable[Tensor], factor: float, device: torch.device) -> Tensor:
    """Multiply gradients in place; a scalar on ``device`` that is above 0 if one of them was
    infinite or not a number.

    Raises :class:`UsageError` for float16 ones.
    """
    # torch's function takes tensors of one device and dtype.
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient.detach())
    if any(dtype == torch.float16 for _, dtype in by_kind):
        raise UsageError(
            "gradients are float16, and dividing them by the scale would lose what it was for",
            why="the parameters are float16 and the optimizer updates them directly",
            hint="keep float32 parameters and compute in autocast, or let the optimizer keep "
            "float32 masters: "
            "ComputeConfig(distributed_optimizer={})",
        )
    total = torch.zeros((), dtype=torch.float32, device=device)
    for (place, _), alike in by_kind.items():
        found = torch.zeros(1, dtype=torch.float32, device=place)
        torch._amp_foreach_non_finite_check_and_unscale_(
            alike, found, torch.full((1,), factor, device=place)
        )
        # Only added up, and not looked at: asking for the value would wait for the device.
        total += found.to(device).squeeze(0)
    return total
