"""What an optimizer keeps for each element of a parameter, and among how many ranks it is split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import ZERO, Layout, Mesh
from shardwright.runtime.zero.settings import ReductionSettings


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer keeps for each local element of a parameter that it updates.

    ``num_moments``: numbers of the dtype it updates, as torch's optimizers make them: that of the parameter, or that of the
    config's masters. Adam has two (by default), SGD with momentum one. ``own_bytes_per_element``: state in dtypes of its own
    beside them, such as masters that it makes itself. ``grad_bytes_per_element``: of a gradient, where neither config nor the
    dtype of its parameter says it.
    """

    num_moments: float = 2.0
    own_bytes_per_element: float = 0.0
    grad_bytes_per_element: float | None = None

    @property
    def keeps_state(self) -> bool:
        return self.num_moments > 0 or self.own_bytes_per_element > 0


ADAM = OptimizerMemory()

REMAINDER_BYTES = 2
"""Of a float32 master of a bfloat16 parameter, what that lacks."""


def state_bytes(optimizer: OptimizerMemory, dtype: torch.dtype, config: ComputeConfig) -> float:
    """What is kept of one element that a rank updates of a parameter of ``dtype``: state, and the master if there is one."""
    settings = ReductionSettings(table=config.optimizer_table)
    updated = settings.state_dtype(dtype)
    master = 0 if updated == dtype else updated.itemsize
    if settings.stores_remainders and dtype == torch.bfloat16:
        master = REMAINDER_BYTES
    return optimizer.num_moments * updated.itemsize + optimizer.own_bytes_per_element + master


def gradient_bytes(optimizer: OptimizerMemory, dtype: torch.dtype, config: ComputeConfig) -> float:
    """Of one element of the gradient of a parameter of ``dtype``, while it is accumulated."""
    if optimizer.grad_bytes_per_element is not None:
        return optimizer.grad_bytes_per_element
    settings = ReductionSettings(table=config.optimizer_table)
    return (settings.gradient_dtype(dtype) if settings.contiguous_gradients else dtype).itemsize


def num_copies(layout: Layout, mesh: Mesh, config: ComputeConfig) -> int:
    """The ranks among which the gradient of a parameter is summed. ``mesh``: on which it is stored."""
    units = config.num_units
    units //= mesh.axis_size(ZERO) if ZERO in layout.cut_axes else 1
    return units * math.prod(mesh.axis_size(a) for a in layout.grad_partial if a in mesh.names)


def num_shards(layout: Layout, mesh: Mesh, config: ComputeConfig) -> int:
    """Into how many parts ZeRO splits the optimizer state of a parameter."""
    if config.use_zero not in (1, 2):  # stage 3 cuts the parameter itself
        return 1
    return max(1, num_copies(layout, mesh, config) // config.zero_ngroups)
