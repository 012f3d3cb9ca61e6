"""What the ranks of tests/runtime/ranks/test_mpu.py run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwright import MPU, Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.role_table import RoleTable
from shardwright.runtime.ranks.world import current_world

EXPECTED = [
    {
        "sums": {
            "data": [2, 4, 2, 4][rank],
            "tensor": [1, 1, 5, 5][rank],
            "model": [1, 1, 5, 5][rank],
        },
        "alone": 1,
        "lazily": 6 if rank else None,
        "after": [1, 1, 5, 5][rank],
        "mesh": (("dp", "tp"), [[0, 1], [2, 3]]),
        "along dp": [2, 4, 2, 4][rank],
    }
    for rank in range(4)
]


def groups() -> dict[str, Any]:
    """Sums of rank numbers over the groups of roles, tensor 2 x data 2."""
    rank = dist.get_rank()

    def total(group: Any) -> int:
        x = torch.tensor(rank)
        dist.all_reduce(x, group=group)
        return int(x)

    mpu = MPU(tensor_parallel_size=2, order="tp-dp")
    sums = {role: total(mpu.group(role)) for role in ("data", "tensor", "model")}
    # Ranks are in different numbers of groups, as stages of a pipeline with a shared embedding are.
    current_world().group((0, 1, 3), "more")
    # Under a plan the groups of a role are made by those who ask: here not by rank 0.
    table = RoleTable.of_plan([(Mesh.of({"a": 2, "tp": 2}), range(4))], 4, 1)
    planned = MPU.of_table(table, current_world())
    lazily = None
    if rank:
        others = RoleTable({"data": ((0,), (1, 2, 3))}, (), frozenset(), frozenset())
        lazily = total(MPU.of_table(others, current_world()).get_data_parallel_group())
    assert planned.ranks("tensor") == (0, 1, 2, 3)
    # All ranks still agree on the groups that are made after that.
    after = (
        RankMesh(Mesh.of({"x": 2, "y": 2})).axis("y").communicator.all_reduce(torch.tensor(rank))
    )
    mesh = mpu.device_mesh()
    return {
        "sums": sums,
        "alone": dist.get_world_size(mpu.get_context_parallel_group()),
        "lazily": lazily,
        "after": int(after),
        "mesh": (mesh.mesh_dim_names, mesh.mesh.tolist()),
        "along dp": total(mesh["dp"].get_group()),
    }
