"""What an optimizer keeps for each element of a parameter, and among how many ranks it is split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.compiler.cost.local_calls import estimated_size, local_shape
from shardwright.compiler.cost.optimizers.optimizer_state import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_step import STEP_TEMPORARIES, StepProduct
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import ZERO, Layout, Mesh
from shardwright.runtime.zero.settings import ReductionSettings


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer keeps for each local element of a parameter that it updates.

    ``num_moments``: numbers of the dtype it updates, as torch's optimizers make them: that of the
    parameter, or that of the config's masters. Adam has two (by default), SGD with momentum one.
    ``own_bytes_per_element``: state in dtypes of its own beside them, such as masters that it makes
    itself. ``grad_bytes_per_element``: of a gradient, where neither config nor the dtype of its
    parameter says it. ``named``: an optimizer whose own state, by shape and dtype, counts in the
    place of moments.
    """

    num_moments: float = 2.0
    own_bytes_per_element: float = 0.0
    grad_bytes_per_element: float | None = None
    named: NamedOptimizer | None = None

    def temporary_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The most that it makes and lets go of again while it updates a tensor."""
        found = None if self.named is None else self.named.step(tuple(shape), dtype).temporary_bytes
        if found is not None:
            return found
        keeps_state = (
            self.moments_bytes((2, 2), torch.float32) > 0 or self.own_bytes_per_element > 0
        )
        return STEP_TEMPORARIES * math.prod(shape) * dtype.itemsize if keeps_state else 0

    def products(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[StepProduct]:
        """The matrix products of updating a tensor."""
        return (
            ()
            if self.named is None or self.is_elementwise
            else self.named.step(tuple(shape), dtype).products
        )

    @property
    def is_elementwise(self) -> bool:
        """Whether it treats every element by itself, so that it works on pieces, and ZeRO gives it
        parts of them.
        """
        return self.named is None or self.named.is_elementwise

    def moments_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Of a tensor that it updates."""
        if self.named is not None:
            return self.named.state_bytes(tuple(shape), dtype)
        return self.num_moments * dtype.itemsize * math.prod(shape)


ADAM = OptimizerMemory()

REMAINDER_BYTES = 2
"""Of a float32 master of a bfloat16 parameter, what that lacks."""


def state_bytes(
    optimizer: OptimizerMemory, shape: Sequence[int], dtype: torch.dtype, config: ComputeConfig
) -> float:
    """What is kept of a piece ``shape`` of a parameter of ``dtype`` that a rank updates: state and
    any master.
    """
    settings = ReductionSettings(table=config.optimizer_table)
    updated = settings.state_dtype(dtype)
    master = 0 if updated == dtype else updated.itemsize
    if settings.stores_remainders and dtype == torch.bfloat16:
        master = REMAINDER_BYTES
    beside = optimizer.own_bytes_per_element + master
    return optimizer.moments_bytes(shape, updated) + math.prod(shape) * beside


def gradient_bytes(optimizer: OptimizerMemory, dtype: torch.dtype, config: ComputeConfig) -> float:
    """Of one element of the gradient of a parameter of ``dtype``, while it is accumulated."""
    if optimizer.grad_bytes_per_element is not None:
        return optimizer.grad_bytes_per_element
    settings = ReductionSettings(table=config.optimizer_table)
    return (settings.gradient_dtype(dtype) if settings.contiguous_gradients else dtype).itemsize


def num_copies(layout: Layout, mesh: Mesh, config: ComputeConfig, num_stages: int = 1) -> int:
    """The ranks among which the gradient of a parameter is summed. ``mesh``: on which it is stored;
    ``num_stages``: of a pipeline, on as many meshes alike.
    """
    units = config.num_units
    units //= mesh.axis_size(ZERO) if ZERO in layout.cut_axes else 1
    return (
        units
        * num_stages
        * math.prod(mesh.axis_size(a) for a in layout.grad_partial if a in mesh.names)
    )


SumGroup = tuple[tuple[str, ...], bool, tuple[tuple[int, ...], ...]]
"""What a gradient is summed over, equal where the ranks are: mesh axes, whether units too, and the
ranks of other stages.
"""


def sum_group(
    layout: Layout, mesh: Mesh, config: ComputeConfig, elsewhere: Sequence[tuple[int, ...]] = ()
) -> SumGroup:
    """What the gradient of a parameter is summed over. ``mesh``: on which it is stored;
    ``elsewhere``: the unit ranks of other stages that hold it.
    """
    axes = tuple(axis for axis, size in mesh.axes if axis in layout.grad_partial and size > 1)
    pieces = mesh.axis_size(ZERO) if ZERO in layout.cut_axes else 1
    return axes, config.num_units > pieces, tuple(elsewhere)


def num_shards(layout: Layout, mesh: Mesh, config: ComputeConfig, num_stages: int = 1) -> int:
    """Into how many parts ZeRO splits the optimizer state of a parameter."""
    if config.use_zero not in (1, 2):  # stage 3 cuts the parameter itself
        return 1
    return max(1, num_copies(layout, mesh, config, num_stages) // config.zero_ngroups)


def exchanged_over(
    layout: Layout, mesh: Mesh, optimizer: OptimizerMemory
) -> tuple[tuple[str, int], ...]:
    """The axes, and their sizes, over which the pieces of a parameter come together on one rank, as
    the optimizer needs the whole; none where it takes the pieces.
    """
    if optimizer.is_elementwise:
        return ()
    return tuple((axis, size) for axis, size in mesh.axes if axis in layout.cut_axes and size > 1)


def num_pieces(layout: Layout, mesh: Mesh, optimizer: OptimizerMemory) -> int:
    """From how many ranks the pieces of a parameter come together on one; 1 where they do not."""
    return math.prod(size for _, size in exchanged_over(layout, mesh, optimizer))


@dataclass(frozen=True, slots=True)
class Updated:
    """What a rank updates of a parameter: the ``share`` of a tensor of ``shape``, on average over
    the ranks among which it is shared out.
    """

    shape: tuple[int, ...]
    share: float

    @classmethod
    def of(
        cls,
        layout: Layout,
        mesh: Mesh,
        config: ComputeConfig,
        optimizer: OptimizerMemory,
        num_stages: int = 1,
    ) -> Updated:
        """Its piece, the whole where the optimizer needs it, or of either what ZeRO leaves."""
        pieces, shards = (
            num_pieces(layout, mesh, optimizer),
            num_shards(layout, mesh, config, num_stages),
        )
        shape = (
            tuple(map(estimated_size, layout.shape)) if pieces > 1 else local_shape(layout, mesh)
        )
        return cls(shape, 1 / (pieces * shards))

    @property
    def num_elements(self) -> float:
        return self.share * math.prod(self.shape)


def kept_bytes(
    optimizer: OptimizerMemory,
    layout: Layout,
    dtype: torch.dtype,
    mesh: Mesh,
    config: ComputeConfig,
    num_stages: int = 1,
) -> float:
    """What a rank keeps of a parameter to update it, state and any master, on average: see
    :class:`Updated`.
    """
    updated = Updated.of(layout, mesh, config, optimizer, num_stages)
    return updated.share * state_bytes(optimizer, updated.shape, dtype, config)


def summed_dtype(settings: ReductionSettings, dtype: torch.dtype, shards: int) -> torch.dtype:
    """In which the optimizer's gradient of a parameter of ``dtype`` is held when it is summed."""
    return settings.gradient_dtype(dtype) if settings.updates_shards(dtype, shards) else dtype
