"""Worker configs: which rank this is among the data-parallel ones, and how samples are split.

``world_size * max(1, num_workers)`` workers share the samples. Each gets neighbours; what is left
over goes one each to the workers in bit-reversed order, which spreads it over the ranks. The split
depends on the number of workers alone: 1 rank of 4 workers, 2 of 2 and 4 of 1 have the same.

An example: 10 samples on 2 ranks with 3 workers. Six workers get one sample each, and workers 0, 3,
1 and 4 one more. Rank 0 has the boundaries 0, 2, 4, 5, rank 1 has 5, 7, 9, 10.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import Any

import torch.distributed as dist

from shardwright.data.rank_loader import check_workers
from shardwright.data.rank_roles import Roles, roles
from shardwright.runtime.arguments import checked, checked_fields
from shardwright.runtime.errors import ConfigError, UsageError
from shardwright.runtime.ranks.process_group import ProcessGroupTransport
from shardwright.runtime.ranks.world import DistributedWorld, current_world


@checked_fields
@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """A data-parallel rank and its workers.

    ``rank``, ``world_size``: among the data-parallel ranks. Twins have the same ``rank``.
    ``num_workers``: processes that read on each rank; 0: none but the rank's own.
    ``data_parallel_group``: the ranks that hold other samples, where these are not all ranks.
    ``seed_offset``: another one gives other orders. ``data_parallel_ranks``: the numbers of these
    ranks in the job; from them :meth:`process_group` makes the group that is not given.

    Two configs are equal if rank, world size and number of workers are.
    """

    rank: int
    world_size: int
    num_workers: int
    data_parallel_group: Any = field(default=None, compare=False)
    seed_offset: int = field(default=0, compare=False)
    data_parallel_ranks: tuple[int, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"there is no data-parallel rank {self.rank} of {self.world_size}",
                why="ranks count from 0",
                hint="rank is that within the data-parallel group, not that of the job",
            )
        check_workers(self.num_workers)

    @staticmethod
    @checked
    def default_worker_config(
        num_workers: int = 4, data_parallel_group: Any = None
    ) -> WorkerConfig:
        """The config of this rank of a group, or of the whole job; alone, where torch.distributed
        is not initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
        return WorkerConfig(
            rank=dist.get_rank(data_parallel_group),
            world_size=dist.get_world_size(data_parallel_group),
            num_workers=num_workers,
            data_parallel_group=data_parallel_group,
        )

    @staticmethod
    @checked
    def from_roles(
        roles_or_plan: Any, num_workers: int, data_parallel_group: Any = None, seed_offset: int = 0
    ) -> WorkerConfig:
        """The config of this rank under a plan; ``roles_or_plan``: what
        :func:`shardwright.data.roles` takes. Nothing is sent: a group that is not given is made
        when states are collected.

        Raises :class:`UsageError` on a rank that reads nothing.
        """
        found = roles(roles_or_plan)
        mine = found.mine
        if not mine.reads:
            raise UsageError(
                f"rank {mine.rank} reads no data",
                why="its part of the model takes no inputs",
                hint="make loaders where data.roles(...).reads is true",
            )
        return WorkerConfig(
            rank=mine.data_rank,
            world_size=mine.data_size,
            num_workers=num_workers,
            data_parallel_group=data_parallel_group or found.data_parallel_group,
            seed_offset=seed_offset,
            data_parallel_ranks=_ranks_in_job(found),
        )

    @property
    def workers_per_rank(self) -> int:
        """How many workers a rank has; without processes the rank itself is one."""
        return max(1, self.num_workers)

    @property
    def num_global_workers(self) -> int:
        """How many workers all ranks have together."""
        return self.world_size * self.workers_per_rank

    @checked
    def global_worker_id(self, worker: int = 0) -> int:
        """The number of a worker of this rank among all."""
        return self.rank * self.workers_per_rank + worker

    @checked
    def worker_seed(self, worker: int = 0) -> int:
        """The seed of a worker of this rank, 32 bits."""
        return worker_seed(self.global_worker_id(worker), self.seed_offset)

    @checked
    def boundaries(self, num_samples: int) -> list[int]:
        """Where the samples of this rank's workers begin, and behind the last where they end."""
        bounds = global_boundaries(num_samples, self.num_global_workers)
        first = self.global_worker_id(0)
        return bounds[first : first + self.workers_per_rank + 1]

    @checked
    def global_rank(self, rank: int | None = None) -> int:
        """The number in the job of a data-parallel rank; by default of this one."""
        if rank is None:
            rank = self.rank
        if self.data_parallel_group is not None:
            return dist.get_global_rank(self.data_parallel_group, rank)
        return rank if self.data_parallel_ranks is None else self.data_parallel_ranks[rank]

    def process_group(self) -> Any:
        """The group over which states are collected: the given one, that of the ranks of a plan,
        or all ranks. That of a plan is made at first use, by its members together.

        Raises :class:`UsageError` where there is none, and :class:`ConfigError` for a group of
        another size.
        """
        world = current_world()
        if not isinstance(world, DistributedWorld):
            raise UsageError(
                f"the states of {self.world_size} data-parallel ranks are in other processes",
                why="torch.distributed, which would collect them, is not initialised",
                hint="call init_process_group, or save_state_rank() on each rank",
            )
        group = self.data_parallel_group
        if group is None and self.data_parallel_ranks is not None:
            transport = world.group_among_members(self.data_parallel_ranks, "data").transport
            assert isinstance(transport, ProcessGroupTransport)
            group = transport.process_group
        size = dist.get_world_size(group)
        if size != self.world_size:
            raise ConfigError(
                f"the data-parallel group has {size} ranks, and the worker config says "
                f"{self.world_size}",
                why="without data_parallel_group it is all ranks of the job"
                if group is None
                else None,
                hint="give the group of the ranks that read other samples, as "
                "WorkerConfig.from_roles(model, ...) does",
            )
        return group or dist.group.WORLD


def _ranks_in_job(found: Roles) -> tuple[int, ...] | None:
    """The ranks of the job that read other samples; ``None`` where the table is not one of the
    ranks of this job.
    """
    world = current_world()
    if (len(found.all), found.rank) != (world.size, world.rank):
        return None
    return found.data_group()


default_worker_config = WorkerConfig.default_worker_config


def worker_seed(global_worker: int, seed_offset: int) -> int:
    """The last 32 bits of the sha1 of both numbers, which is Energon's."""
    digest = hashlib.sha1(f"{global_worker},{seed_offset}".encode(), usedforsecurity=False)
    return int.from_bytes(digest.digest(), "big") & 0xFFFFFFFF


def global_boundaries(num_samples: int, num_workers: int) -> list[int]:
    """Where the samples of each of all workers begin, and where the last one's end."""
    base, rest = divmod(num_samples, num_workers)
    sizes = [base] * num_workers
    # What is left over is spread out, so that neighbouring workers, which share a rank, do not all
    # get one more.
    for worker in bit_reversed(range(num_workers))[:rest]:
        sizes[worker] += 1
    return [0, *accumulate(sizes)]


def bit_reversed(numbers: Sequence[int]) -> list[int]:
    """The numbers in bit-reversed order; for a power of two that reverses the bits of each place.
    Halves take turns, each of them in bit-reversed order.
    """
    if len(numbers) <= 2:
        return list(numbers)
    half = len(numbers) // 2
    pairs = zip_longest(bit_reversed(numbers[:half]), bit_reversed(numbers[half:]))
    return [number for number in chain.from_iterable(pairs) if number is not None]


def energon_worker_config(
    roles_or_plan: Any, num_workers: int, data_parallel_group: Any = None
) -> Any:
    """Megatron-Energon's own ``WorkerConfig`` for this rank under a plan, for its own datasets.

    In a job of ``torch.distributed`` all ranks that read call it: they make the group of the plan.

    Raises :class:`ConfigError` where megatron-energon is not installed.
    """
    try:
        from megatron.energon import WorkerConfig as Theirs
    except ImportError as error:
        raise ConfigError(
            "megatron-energon is not installed",
            why=str(error),
            hint="pip install megatron-energon, or use shardwright.data.WorkerConfig",
        ) from error
    ours = WorkerConfig.from_roles(roles_or_plan, num_workers, data_parallel_group)
    in_job = ours.world_size > 1 and dist.is_available() and dist.is_initialized()
    return Theirs(
        rank=ours.rank,
        world_size=ours.world_size,
        num_workers=ours.num_workers,
        # Theirs takes all ranks of the job where it is given none.
        data_parallel_group=ours.process_group() if in_job else ours.data_parallel_group,
    )
