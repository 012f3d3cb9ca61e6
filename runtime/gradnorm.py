"""The global norm of gradients: every distinct element of every parameter counted once, under any layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shardwright.runtime.communicator import Communicator
from shardwright.runtime.groups import RankMesh
from shardwright.runtime.layout import Layout


def counts_here(layout: Layout, ranks: RankMesh) -> bool:
    """Whether this rank counts its piece of a tensor: it is the first of those that hold the same piece."""
    cut = layout.cut_axes
    return ranks.is_member and ranks.unit == 0 and all(index == 0 for axis, index in ranks.coords.items() if axis not in cut)


def global_norm(counted: Iterable[Tensor], everyone: Communicator, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 2-norm of all gradients as a scalar of ``dtype``, the same on all ranks. Collective.

    ``counted``: the tensors whose ``grad`` this rank counts, see :func:`counts_here`; gradients must have been summed.
    """
    norms = [
        torch.linalg.vector_norm(tensor.grad, dtype=dtype)
        for tensor in counted
        if tensor.grad is not None and tensor.grad.numel()
    ]
    # Squares in float64: a sum of squares overflows float32 long before the norm does.
    squares = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    return everyone.all_reduce(squares, phase="gradients").sqrt().to(dtype)


def norm_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """The widest dtype among the parameters, at least float32."""
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype
