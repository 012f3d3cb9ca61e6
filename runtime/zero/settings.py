"""How gradients are reduced and optimizer state is split, in one set of terms whichever options the
user gave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.distributed_config import DistributedOptimizerConfig

DEFAULT_BUCKET_CAP_MB, MOST_BUCKET_CAP_MB = 25.0, 512.0


def default_bucket_cap_mb(num_units: int) -> float:
    """MiB of gradients in a bucket, where nobody says how many: 25, or 2 for each unit where that
    is more. A message goes around a ring of all units, and waits for every hop, however small its
    pieces are. More than 512 would leave ZeRO-2 little to free, and backward little to hide.
    """
    return min(max(DEFAULT_BUCKET_CAP_MB, 2.0 * num_units), MOST_BUCKET_CAP_MB)


@dataclass(frozen=True, slots=True)
class ReductionSettings:
    """What a reducer and a distributed optimizer do.

    - ``divisor``: what summed gradients are divided by: the number of units for a mean, else 1.
    - ``bucket_cap_mb``: MiB of gradients in a bucket.
    - ``asynchronous``: buckets are reduced while backward runs.
    - ``stage``: the stage of ZeRO as far as the optimizer takes part in it. It is 0 without ZeRO,
      and with stage 3, where the plan itself stores parameters in pieces.
    - ``num_groups``: the number of groups that each split the state among their ranks, if there is
      a stage.
    - ``scatters``: gradients go only to the ranks that need them.
    - ``table``: the options of the distributed optimizer. Without it nothing changes its dtype, and
      parameters and gradients lie as they always do.
    """

    divisor: int = 1
    bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB
    asynchronous: bool = False
    stage: int = 0
    num_groups: int = 1
    scatters: bool = False
    table: DistributedOptimizerConfig | None = None

    @classmethod
    def of(cls, config: ComputeConfig | None, num_units: int) -> ReductionSettings:
        """The settings that ``config`` asks for, or the default ones without a config."""
        if config is None:
            return cls()
        # ZeRO-3 is in the plan: to the runtime it is ordinary sharded storage.
        stage = 0 if config.zero_stage == 3 else config.zero_stage
        table, cap_mb = config.optimizer_table, config.reducer_bucket_cap_mb
        if table is not None:
            cap_mb = table.bucket_cap_mb
        return cls(
            divisor=num_units if config.grad_reduction == "mean" else 1,
            bucket_cap_mb=default_bucket_cap_mb(num_units) if cap_mb is None else cap_mb,
            asynchronous=config.use_async_reducer if table is None else table.overlap_grad_sync,
            stage=stage,
            num_groups=config.zero_ngroups,
            scatters=stage > 0
            and (config.zero_use_reduce_scatter or stage >= 2 or table is not None),
            table=table,
        )

    @property
    def bucket_cap_bytes(self) -> float:
        return self.bucket_cap_mb * 2**20

    @property
    def makes_shards(self) -> bool:
        """Whether the optimizer updates shards: parts of the parameters, or all of them in the
        precision of the table.
        """
        return self.stage > 0 or self.table is not None

    def updates_shards(self, dtype: torch.dtype, num_shards: int) -> bool:
        """Whether the optimizer gets shards of a parameter of ``dtype`` instead of the parameter.

        ``num_shards``: the number of ranks among which its state is split. If it is 1, there is a
        shard only for a master, or without a stage, where the table says how gradients lie.
        """
        return self.makes_shards and (
            num_shards > 1 or not self.stage or self.state_dtype(dtype) != dtype
        )

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are freed as soon as they have been reduced (ZeRO-2)."""
        return self.stage >= 2

    @property
    def early_cause(self) -> str:
        """The setting for which buckets are reduced in backward, if they are."""
        if self.frees_gradients:
            return f"use_zero={self.stage}"
        return "use_async_reducer" if self.table is None else "overlap_grad_sync"

    @property
    def contiguous_gradients(self) -> bool:
        """Whether the gradients of a bucket are views of one buffer."""
        return self.table is None or self.table.contiguous_grad_buffer

    @property
    def keeps_gradient_buffer(self) -> bool:
        """Whether the gradients of all buckets are views of one buffer."""
        return (
            self.table is not None
            and self.table.contiguous_grad_buffer
            and not self.frees_gradients
        )

    @property
    def contiguous_parameters(self) -> bool:
        """Whether the parameters of all buckets are views of one buffer."""
        return self.table is not None and self.table.contiguous_param_buffer

    @property
    def stores_remainders(self) -> bool:
        """Whether masters of bfloat16 parameters are stored as remainders (``remainders.py``)."""
        return self.table is not None and self.table.store_param_remainders

    @property
    def overlaps_parameters(self) -> bool:
        """Whether parameters are gathered while the program goes on."""
        return self.table is not None and self.table.overlap_param_sync

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter of ``dtype`` is held and reduced, if the
        optimizer updates shards.
        """
        if self.table is None or self.table.grad_sync_dtype is None:
            return self.state_dtype(dtype)
        return _dtype(self.table.grad_sync_dtype)

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the optimizer sees a parameter of ``dtype`` and keeps its state."""
        if self.table is None:
            return dtype
        if self.table.dtype in (None, "float32"):
            return torch.promote_types(dtype, torch.float32)
        return _dtype(self.table.dtype)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
