"""What ranks on CUDA devices run, besides the trainings of :mod:`device_parity`."""

from __future__ import annotations

from typing import Any

import runtime_ranks
import torch
from device_parity import host

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.world import current_world


def collectives() -> tuple[str, dict[str, Any]]:
    """Every collective of a communicator: what was counted, and the results on the host."""
    with current_world().device:
        results = runtime_ranks.collectives()
    return results["volume"], host(results)


def same_gpu() -> str:
    """What a rank says whose GPU another rank has, ``""`` on the one that came first."""
    torch.cuda.set_device(0)
    try:
        current_world()
    except DistributedError as error:
        return str(error)
    return ""
