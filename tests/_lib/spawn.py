"""Real processes with gloo, for the few tests that need them; most run their ranks as threads."""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

PRELOADED = ["torch.distributed", "torch._dynamo", "shardwright.runtime.loader", "shardwright.runtime.optimizer"]
"""What the process that forks the ranks has imported before: all need it, and importing takes longer than their work."""


def run_processes(num_ranks: int, target: str, *args: Any) -> list[Any]:
    """Run ``module:function(*args)`` in one process per rank, with torch.distributed initialised; return what each returned.

    ``target`` must be importable in a new process: a function of a module in ``tests/_lib`` or of an installed package.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        job = (num_ranks, dict(os.environ), target, args, folder)
        multiprocessing.start_processes(_run, job, nprocs=num_ranks, start_method="forkserver")
        return [torch.load(Path(folder) / f"result{rank}.pt") for rank in range(num_ranks)]


def _run(rank: int, num_ranks: int, environment: dict[str, str], target: str, args: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        module, function = target.split(":")
        result = getattr(importlib.import_module(module), function)(*args)
        torch.save(result, Path(folder) / f"result{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
