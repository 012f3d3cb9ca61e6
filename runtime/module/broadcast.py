"""Broadcasting weights between units."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import DistributedError
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.groups import UNITS
from shardwright.runtime.ranks.world import current_world


@checked
def broadcast_weights(module: nn.Module, stride_size: int) -> None:
    """Give all parameters and buffers the values they have on the first ``stride_size`` ranks.

    Rank ``r`` gets those of rank ``r % stride_size``. With the ``plan_ngpus`` of the compiled
    modules as ``stride_size``, the first unit's weights go to all units. Non-persistent buffers are
    included. Collective.

    Where ZeRO-3 stores parameters in pieces over several units, ``stride_size`` counts the ranks of
    these units together.

    Raises :class:`DistributedError` if the number of ranks is not a multiple of ``stride_size``, or
    if ranks that far apart do not hold the same pieces.
    """
    world = current_world()
    if stride_size < 1 or world.size % stride_size:
        raise DistributedError(
            f"weights cannot be broadcast with a stride of {stride_size}",
            why=f"{world.size} ranks are running, which is no multiple of it",
            hint="pass the plan_ngpus that the module was compiled with",
        )
    for part in module.modules():
        if (
            isinstance(part, ParallelModule)
            and part.zero > 1
            and stride_size % (part.zero * part.mesh.size)
        ):
            num_ranks = part.zero * part.mesh.size
            raise DistributedError(
                f"weights cannot be broadcast with a stride of {stride_size}",
                why=f"{type(part).__name__} stores its parameters in pieces over {num_ranks} ranks",
                hint=f"pass a multiple of {num_ranks}",
            )
    # Ranks ``stride_size`` apart hold the same pieces.
    groups = [range(first, world.size, stride_size) for first in range(stride_size)]
    communicator = world.partition(groups, UNITS)
    if communicator.size == 1:
        return
    # A tied tensor is sent once.
    tensors: dict[int, Tensor] = {
        id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())
    }
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.numel():
                tensor.copy_(communicator.broadcast(tensor, 0))
