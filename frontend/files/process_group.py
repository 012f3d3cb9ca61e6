"""Making the process group of a job, with a GPU for each rank where there are enough."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def join_process_group() -> None:
    """Make the process group that the variables of torchrun describe. Collective.

    With fewer GPUs than ranks on this machine all of them run on the CPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
