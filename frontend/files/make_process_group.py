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
    backend = "gloo"
    # A GPU for every rank of the node, or none at all.
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_rank)
        backend = "nccl"
    # torchrun keeps the old store when it starts ranks again; theirs has the addresses of the old.
    store = _store_of_restart()
    if store is None:
        dist.init_process_group(backend)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _store_of_restart() -> dist.distributed_c10d.Store | None:
    """A part of torchrun's key-value store for this start of the ranks alone.

    After a restart on one node (``--max-restarts``) torch 2.13 gives ranks the store that those
    before them have used. In it are their addresses, and ranks try to connect to processes that are
    gone. On several nodes the number of restarts may differ between nodes, so it makes no name
    there; ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` lets torchrun make a store for each start.
    """
    given = os.environ
    shares = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shares or given.get("GROUP_WORLD_SIZE") != "1":
        return None
    # torch's stubs do not know the name.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        given["MASTER_ADDR"], int(given["MASTER_PORT"]), int(given["WORLD_SIZE"]), is_master=False
    )
    count = given.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.distributed_c10d.PrefixStore(f"start {count}", store)
