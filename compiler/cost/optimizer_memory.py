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
    """What an optimizer keeps for each local element of a parameter, in bytes.

    ``state_bytes_per_element``: its state (two float32 moments of Adam by default); where a config says the dtype of the state,
    what it would be in float32. ``master_bytes_per_element``: a copy of the parameter in higher precision, if it keeps one
    itself; those of the config count beside it. ``grad_bytes_per_element``: of a gradient, where neither config nor the dtype
    of its parameter says it.
    """

    state_bytes_per_element: float = 8.0
    master_bytes_per_element: float = 0.0
    grad_bytes_per_element: float | None = None


ADAM = OptimizerMemory()

REMAINDER_BYTES = 2
"""Of a float32 master of a bfloat16 parameter, what that lacks."""


def state_bytes(optimizer: OptimizerMemory, dtype: torch.dtype, config: ComputeConfig) -> float:
    """What is kept of one element that a rank updates of a parameter of ``dtype``: state, and the master if there is one."""
    own = optimizer.master_bytes_per_element
    if config.optimizer_table is None:
        return optimizer.state_bytes_per_element + own
    settings = ReductionSettings(table=config.optimizer_table)
    updated = settings.state_dtype(dtype)
    master = 0 if updated == dtype else updated.itemsize
    if settings.stores_remainders and dtype == torch.bfloat16:
        master = REMAINDER_BYTES
    return optimizer.state_bytes_per_element * updated.itemsize / torch.float32.itemsize + own + master


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
