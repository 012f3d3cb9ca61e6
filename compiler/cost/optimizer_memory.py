"""What an optimizer keeps for each element of a parameter, and among how many ranks it is split."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import ZERO, Layout, Mesh


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer keeps for each local element of a parameter, in bytes.

    ``state_bytes_per_element``: its state (two float32 moments of Adam by default). ``master_bytes_per_element``: a copy of
    the parameter in higher precision, if it keeps one. ``grad_bytes_per_element``: of a gradient, where that has not the
    dtype of its parameter.
    """

    state_bytes_per_element: float = 8.0
    master_bytes_per_element: float = 0.0
    grad_bytes_per_element: float | None = None

    def gradient_bytes(self, element_bytes: float) -> float:
        """Of one element, for a parameter of ``element_bytes`` an element."""
        return element_bytes if self.grad_bytes_per_element is None else self.grad_bytes_per_element

    @property
    def kept_bytes(self) -> float:
        """State and master copy of one element."""
        return self.state_bytes_per_element + self.master_bytes_per_element


ADAM = OptimizerMemory()


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
