"""The stack of weights of which each lies whole on one rank of an axis, and is empty on the others:
experts that are modules of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stacked(tensors: Sequence[Tensor], dim: int = 0, *, shape: Sequence[int]) -> Tensor:
    """The weights that this rank has, as one tensor of ``shape [weights, ...]``, which says how
    large it is where the rank has none. All of ``tensors`` get a gradient, if an empty one.
    """
    assert dim == 0
    return torch.cat(list(tensors)).view(*shape)
