"""The MPU (*model parallel unit*): which rank plays which role, and the process group of each role.

    mpu = shardwright.MPU(tensor_parallel_size=2, pipeline_parallel_size=2)     # on 8 ranks
    mpu.get_data_parallel_world_size()      # 2: what remains
    mpu.get_tensor_parallel_group()         # a torch.distributed.ProcessGroup

The name, and the names of its methods, are those of Megatron and OSLO. A
:class:`~shardwright.ParallelModule` has one of the plan that it runs, as ``module.mpu``.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, UsageError, brief
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.process_group import ProcessGroupTransport
from shardwright.runtime.ranks.rank_groups import DEFAULT_ORDER
from shardwright.runtime.ranks.role_table import Role, RoleTable, Sizes
from shardwright.runtime.ranks.world import DistributedWorld, SoloWorld, World, current_world


class MPU:
    """The roles of this rank, and of all others.

    ``..._parallel_size``: how many ranks share the inner dims of a layer, the stages of a pipeline,
    a sequence, the experts of a layer. Data-parallel ranks are as many as remain.
    ``expert_tensor_parallel_size``: how many share the inner dims of an expert; by default as
    outside of experts. ``order``: by which axes ranks are numbered, the fastest first, as for
    :func:`~shardwright.rank_groups`.

    Making one is collective: all ranks make the process groups of all roles, in one order. After
    that no method waits for another rank. The groups of ``ParallelModule.mpu``, of which most
    programs use few, are made when they are first asked for, by their members together: there all
    ranks of a group have to ask for it.

    Without ``torch.distributed`` there is one rank, and its groups are ``None``.

    Raises :class:`ConfigError` for sizes that do not divide the ranks or do not fit together.
    """

    table: RoleTable
    world: World

    @checked
    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        order: str = DEFAULT_ORDER,
    ) -> None:
        sizes = Sizes(
            _size("tensor", tensor_parallel_size),
            _size("pipeline", pipeline_parallel_size),
            _size("context", context_parallel_size),
            _size("expert", expert_parallel_size),
            None
            if expert_tensor_parallel_size is None
            else _size("expert_tensor", expert_tensor_parallel_size),
        )
        self.world = current_world()
        self.table = RoleTable.of_sizes(sizes, self.world.size, order)
        self._communicators: dict[Role, Communicator] = {
            role: self.world.partition(groups, role) for role, groups in self.table.groups.items()
        }

    @classmethod
    def of_table(cls, table: RoleTable, world: World) -> MPU:
        """The MPU of roles that are known. Groups are made by their members, when they are first
        asked for.
        """
        made = cls.__new__(cls)
        made.table, made.world, made._communicators = table, world, {}
        return made

    def __deepcopy__(self, memo: object) -> MPU:
        """Itself: a copy of a module talks over the same groups."""
        return self

    # Every role alike

    @checked
    def ranks(self, role: Role) -> tuple[int, ...]:
        """The ranks of the job that play a role with this one, ascending. Nothing is sent.

        Raises :class:`UsageError` where the role has no groups: stages of different sizes form no
        ``pipeline`` groups.
        """
        if role not in self.table.groups:
            sizes = sorted({len(ranks) for ranks in self.table.positions})
            raise UsageError(
                f"this plan has no {role} groups",
                why=f"its stages have {' and '.join(map(str, sizes))} ranks, so that no rank of "
                "one stage belongs to one of the next",
                hint="get_pipeline_parallel_rank() and get_pipeline_parallel_world_size() tell "
                "the stage of this rank",
            )
        return self.table.group(role, self.world.rank)

    @checked
    def communicator(self, role: Role) -> Communicator:
        """The group of a role for shardwright's own collectives, which are counted under the name
        of the role. It also exists where ranks are threads.
        """
        if role not in self._communicators:
            ranks = self.ranks(role)
            self._communicators[role] = self.world.group_among_members(ranks, role)
        return self._communicators[role]

    @checked
    def group(self, role: Role) -> Any:
        """The ``torch.distributed.ProcessGroup`` of a role. It is ``None``, torch's name for all
        ranks, in a job without ``torch.distributed``.

        Raises :class:`UsageError` where ranks are threads of one process.
        """
        if isinstance(self.world, SoloWorld):
            return None
        if not isinstance(self.world, DistributedWorld):
            raise UsageError(
                f"the {role} group is no process group",
                why="the ranks are threads of one process",
                hint=f"use mpu.communicator({role!r}), or run the ranks under torchrun",
            )
        transport = self.communicator(role).transport
        if transport is None:  # a group of one, for which shardwright itself needs no process group
            return self.world.group_of_this_rank()
        assert isinstance(transport, ProcessGroupTransport)
        return transport.process_group

    # [Note: Written out] The methods that follow could be made by a loop. They are what people
    # look for in an editor, so they stand here.

    def get_data_parallel_group(self) -> Any:
        """The ranks that hold the same part of the model and read other samples."""
        return self.group("data")

    def get_data_parallel_rank(self) -> int:
        """Which of the data-parallel ranks this is, as for a ``DistributedSampler``."""
        return self._index("data")

    def get_data_parallel_world_size(self) -> int:
        """How many ranks read samples of their own."""
        return len(self.ranks("data"))

    def get_tensor_parallel_group(self) -> Any:
        """The ranks that share the layers of this one's stage."""
        return self.group("tensor")

    def get_tensor_parallel_rank(self) -> int:
        """Which of the tensor-parallel ranks this is."""
        return self._index("tensor")

    def get_tensor_parallel_world_size(self) -> int:
        """How many ranks share a layer."""
        return len(self.ranks("tensor"))

    def get_pipeline_parallel_group(self) -> Any:
        """The ranks with this one's part in all stages. Raises as :meth:`ranks` does."""
        return self.group("pipeline")

    def get_pipeline_parallel_rank(self) -> int:
        """The place of this rank in the pipeline."""
        return self.table.position(self.world.rank)

    def get_pipeline_parallel_world_size(self) -> int:
        """The number of places in the pipeline; each may run several stages."""
        return len(self.table.positions)

    def get_model_parallel_group(self) -> Any:
        """The ranks that hold one copy of the model together."""
        return self.group("model")

    def get_model_parallel_rank(self) -> int:
        """Which rank of a copy of the model this is."""
        return self._index("model")

    def get_model_parallel_world_size(self) -> int:
        """How many ranks hold a copy of the model."""
        return len(self.ranks("model"))

    def get_context_parallel_group(self) -> Any:
        """The ranks that hold pieces of the same sequences."""
        return self.group("context")

    def get_context_parallel_rank(self) -> int:
        """Which of the ranks that share a sequence this is."""
        return self._index("context")

    def get_context_parallel_world_size(self) -> int:
        """How many ranks share a sequence."""
        return len(self.ranks("context"))

    def get_expert_parallel_group(self) -> Any:
        """The ranks that hold other experts of the same layer."""
        return self.group("expert")

    def get_expert_parallel_rank(self) -> int:
        """Which of the ranks that share experts this is."""
        return self._index("expert")

    def get_expert_parallel_world_size(self) -> int:
        """How many ranks share the experts of a layer."""
        return len(self.ranks("expert"))

    # Pipelines

    def is_pipeline_first_stage(self) -> bool:
        """Whether this rank runs the first stage, which reads inputs."""
        return self.world.rank in self.table.first

    def is_pipeline_last_stage(self) -> bool:
        """Whether this rank runs the last stage, which makes the loss."""
        return self.world.rank in self.table.last

    def get_pipeline_parallel_next_rank(self) -> int:
        """The rank of the job at the next place of the pipeline; the first one comes after the
        last.
        """
        return self._neighbour(1)

    def get_pipeline_parallel_prev_rank(self) -> int:
        """The rank of the job at the place before; the last one comes before the first."""
        return self._neighbour(-1)

    def _neighbour(self, step: int) -> int:
        ranks = self.ranks("pipeline")
        # By place, not by number: a plan may number the ranks of its stages in any order.
        place = (self.get_pipeline_parallel_rank() + step) % len(self.table.positions)
        return next(rank for rank in ranks if rank in self.table.positions[place])

    # Beside other tools

    @checked
    def device_mesh(self, device_type: str | None = None) -> Any:
        """All ranks as a ``torch.distributed.DeviceMesh``, for tools that know DTensor. Collective.

        Its dims are the axes major to minor: ``("pp", "dp", "cp", "tp")`` in the default order; for
        a plan ``("units", "pp", ...)`` and then the axes of its mesh. ``device_type``: by default
        that of this rank's tensors.

        Raises :class:`UsageError` where stages have different meshes, and without
        ``torch.distributed``.
        """
        from torch.distributed.device_mesh import DeviceMesh

        grid = self.table.grid
        if grid is None:
            raise UsageError(
                "the ranks of this plan form no grid",
                why="its stages lie on meshes of different shapes",
                hint="mpu.ranks(role) names the ranks of each group",
            )
        if not isinstance(self.world, DistributedWorld):
            raise UsageError(
                "a DeviceMesh needs torch.distributed, and this job does not run on it",
                hint="run under torchrun and call torch.distributed.init_process_group",
            )
        # torch numbers its mesh row by row, whatever order ranks have in ours: so they are named
        # one by one.
        shape = [size for _, size in grid.axes]
        return DeviceMesh(
            device_type or self.world.device.type,
            torch.tensor(self.table.grid_ranks).view(shape),
            mesh_dim_names=grid.names,
        )

    def _index(self, role: Role) -> int:
        return self.ranks(role).index(self.world.rank)

    def __repr__(self) -> str:
        roles = ", ".join(
            f"{role} {self._index(role)}/{len(self.ranks(role))}"
            for role in self.table.groups
            if len(self.ranks(role)) > 1
        )
        return f"MPU(rank {self.world.rank} of {self.world.size}: {roles or 'no role is shared'})"


def _size(role: str, size: int) -> int:
    if size < 1:
        raise ConfigError(
            f"{role}_parallel_size is a whole number of at least 1", why=f"it is {brief(size)}"
        )
    return size
