"""How gradients are reduced and optimizer state is split, in one set of terms whichever options the user gave."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.runtime.config import ComputeConfig

DEFAULT_BUCKET_CAP_MB = 25.0


@dataclass(frozen=True, slots=True)
class ReductionSettings:
    """What a reducer and a distributed optimizer do.

    ``divisor``: the number of units where gradients are averaged over them, else 1. ``bucket_cap_mb``: MiB of gradients in a
    bucket. ``asynchronous``: buckets are reduced while backward runs. ``stage``: of ZeRO, 0 without. ``num_groups``: of ranks
    that split the state among themselves. ``scatters``: gradients go to the ranks that need them only.
    """

    divisor: int = 1
    bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB
    asynchronous: bool = False
    stage: int = 0
    num_groups: int = 1
    scatters: bool = False

    @classmethod
    def of(cls, config: ComputeConfig | None, num_units: int) -> ReductionSettings:
        """What ``config`` asks for, or what holds without one."""
        if config is None:
            return cls()
        stage = int(config.use_zero)
        cap_mb = config.reducer_bucket_cap_mb
        return cls(
            divisor=num_units if config.grad_reduction == "mean" else 1,
            bucket_cap_mb=DEFAULT_BUCKET_CAP_MB if cap_mb is None else cap_mb,
            asynchronous=config.use_async_reducer,
            stage=stage,
            num_groups=config.zero_ngroups,
            scatters=config.zero_use_reduce_scatter or stage == 2,
        )

    @property
    def bucket_cap_bytes(self) -> float:
        return self.bucket_cap_mb * 2**20

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are freed as soon as they have been reduced (ZeRO-2)."""
        return self.stage == 2

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which gradients of a parameter of ``dtype`` are held and reduced."""
        return dtype

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which the optimizer sees a parameter of ``dtype``, and keeps its state."""
        return dtype
