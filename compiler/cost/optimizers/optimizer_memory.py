"""What an optimizer keeps for each element of a parameter, and among how many ranks it is split.

Example: Adam keeps two moments. A float32 parameter of 1000 elements takes 8000 bytes of state; a
bfloat16 one with float32 masters takes 8000 for the moments and 4000 for the master. With ZeRO-1
over 4 ranks each rank keeps a quarter of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.compiler.cost.local_calls import estimated_size, local_shape
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_step import STEP_TEMPORARIES, StepProduct
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.zero.settings import ReductionSettings


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer keeps for each local element of a parameter that it updates.

    - ``num_moments``: how many numbers it keeps, in the dtype that it updates (that of the
      parameter, or of the config's masters). Adam keeps two, SGD with momentum one.
    - ``own_bytes_per_element``: state in dtypes of its own, such as masters that it makes itself.
    - ``grad_bytes_per_element``: the bytes of a gradient, if neither the config nor the dtype of
      the parameter says them.
    - ``named``: an optimizer that is asked for its state by shape and dtype, in the place of
      ``num_moments``.
    - ``fused``: its step is one kernel, which reads and writes everything once. Torch's own form
      runs one operator after the other.
    - ``products_add``: the product that makes the gradient of a matrix adds it to that of the
      microbatches before. Our programs add by a kernel of its own; Megatron and NeMo do not
      (``gradient_accumulation_fusion``).
    """

    num_moments: float = 2.0
    own_bytes_per_element: float = 0.0
    grad_bytes_per_element: float | None = None
    named: NamedOptimizer | None = None
    fused: bool = False
    products_add: bool = False

    def temporary_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The most bytes that it makes and lets go of again while it updates a tensor."""
        found = None if self.named is None else self.named.step(tuple(shape), dtype).temporary_bytes
        if found is not None:
            return found
        keeps_state = (
            self.moments_bytes((2, 2), torch.float32) > 0 or self.own_bytes_per_element > 0
        )
        return STEP_TEMPORARIES * math.prod(shape) * dtype.itemsize if keeps_state else 0

    def products(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[StepProduct]:
        """The matrix products of updating a tensor."""
        if self.named is None or self.is_elementwise:
            return ()
        return self.named.step(tuple(shape), dtype).products

    @property
    def is_elementwise(self) -> bool:
        """Whether it treats every element by itself, so that it works on pieces, and ZeRO gives it
        parts of them.
        """
        return self.named is None or self.named.is_elementwise

    def moments_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """The bytes of the moments of a tensor that it updates."""
        if self.named is not None:
            return self.named.state_bytes(tuple(shape), dtype)
        return self.num_moments * dtype.itemsize * math.prod(shape)


ADAM = OptimizerMemory()

REMAINDER_BYTES = 2
"""The bytes that a bfloat16 parameter lacks of its float32 master."""


def state_bytes(
    optimizer: OptimizerMemory, shape: Sequence[int], dtype: torch.dtype, config: ComputeConfig
) -> float:
    """The bytes that a rank keeps to update a piece of ``shape`` of a parameter of ``dtype``:
    state, and a master if there is one.
    """
    settings = ReductionSettings(table=config.optimizer_table)
    updated = settings.state_dtype(dtype)
    master = 0 if updated == dtype else updated.itemsize
    if settings.stores_remainders and dtype == torch.bfloat16:
        master = REMAINDER_BYTES
    beside = optimizer.own_bytes_per_element + master
    return optimizer.moments_bytes(shape, updated) + math.prod(shape) * beside


def gradient_bytes(optimizer: OptimizerMemory, dtype: torch.dtype, config: ComputeConfig) -> float:
    """The bytes of one element of a gradient while it is accumulated. ``dtype``: that of the
    parameter.
    """
    if optimizer.grad_bytes_per_element is not None:
        return optimizer.grad_bytes_per_element
    settings = ReductionSettings(table=config.optimizer_table)
    return (settings.gradient_dtype(dtype) if settings.contiguous_gradients else dtype).itemsize


def num_copies(layout: Layout, mesh: Mesh, config: ComputeConfig, num_stages: int = 1) -> int:
    """The number of ranks over which the gradient of a parameter is summed.

    ``mesh``: the mesh on which it is stored. ``num_stages``: the stages of a pipeline that hold it,
    on meshes alike.
    """
    units = config.num_units
    units //= mesh.axis_size(ZERO) if ZERO in layout.cut_axes else 1
    return (
        units
        * num_stages
        * math.prod(mesh.axis_size(a) for a in layout.grad_partial if a in mesh.names)
    )


SumGroup = tuple[tuple[str, ...], int, tuple[tuple[int, ...], ...]]
"""What a gradient is summed over: mesh axes, so many units, and the ranks of other stages. Two
gradients that are summed over the same ranks have equal groups.
"""


def sum_group(
    layout: Layout, mesh: Mesh, config: ComputeConfig, elsewhere: Sequence[tuple[int, ...]] = ()
) -> SumGroup:
    """What the gradient of a parameter is summed over. ``mesh``: the mesh on which it is stored.
    ``elsewhere``: the unit ranks of other stages that hold it.
    """
    axes = tuple(axis for axis, size in mesh.axes if axis in layout.grad_partial and size > 1)
    pieces = mesh.axis_size(ZERO) if ZERO in layout.cut_axes else 1
    return axes, config.num_units // pieces, tuple(elsewhere)


def num_shards(layout: Layout, mesh: Mesh, config: ComputeConfig, num_stages: int = 1) -> int:
    """Into how many parts ZeRO splits the optimizer state of a parameter."""
    if config.use_zero not in (1, 2):  # stage 3 cuts the parameter itself
        return 1
    return max(1, num_copies(layout, mesh, config, num_stages) // config.zero_ngroups)


def exchanged_over(
    layout: Layout, mesh: Mesh, optimizer: OptimizerMemory
) -> tuple[tuple[str, int], ...]:
    """The axes, with sizes, over which the pieces of a parameter come together on one rank, as the
    optimizer needs the whole; none if it takes the pieces.
    """
    if optimizer.is_elementwise:
        return ()
    return tuple((axis, size) for axis, size in mesh.axes if axis in layout.cut_axes and size > 1)


def num_pieces(layout: Layout, mesh: Mesh, optimizer: OptimizerMemory) -> int:
    """The number of pieces of a parameter that come together on one rank; 1 if they do not."""
    return math.prod(size for _, size in exchanged_over(layout, mesh, optimizer))


@dataclass(frozen=True, slots=True)
class Updated:
    """What a rank updates of a parameter: a ``share`` of a tensor of ``shape``, on average over the
    ranks that update it.
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
        """What a rank updates: its piece, or the whole if the optimizer needs it. ZeRO leaves it a
        part of either.
        """
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
    """The bytes that a rank keeps to update a parameter, on average (:class:`Updated`): state, and
    a master if there is one.
    """
    updated = Updated.of(layout, mesh, config, optimizer, num_stages)
    return updated.share * state_bytes(optimizer, updated.shape, dtype, config)


def summed_dtype(settings: ReductionSettings, dtype: torch.dtype, shards: int) -> torch.dtype:
    """The dtype of a summed gradient, as the optimizer finds it. ``dtype``: that of the parameter;
    ``shards``: the parts into which its state is split.
    """
    return settings.gradient_dtype(dtype) if settings.updates_shards(dtype, shards) else dtype
