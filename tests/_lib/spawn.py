"""Real processes with gloo, for the few tests that need them; most run their ranks as threads."""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

PRELOADED = [
    "torch.distributed",
    "torch._dynamo",
    "shardwright.runtime.loader",
    "shardwright.runtime.training.build_optimizer",
    "shardwright.frontend.parallelize",
    "transformers.models.gpt2.modeling_gpt2",
]
"""What the process that forks the ranks has imported before: many need it, and importing takes
longer than their work.
"""


def run_processes(num_ranks: int, target: str, *args: Any, fake_cuda: bool = False) -> list[Any]:
    """Run ``module:function(*args)`` in one process per rank, with torch.distributed initialised;
    return what each returned.

    ``target`` must be importable in a new process: a function of a module in ``tests/_lib`` or its
    ``of_one_test``, or of an installed package. With ``fake_cuda`` each rank has a fake CUDA device
    (see :mod:`fake_cuda`) and the process group stands in for NCCL's.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        job = (num_ranks, dict(os.environ), target, args, folder, fake_cuda)
        multiprocessing.start_processes(_run, job, nprocs=num_ranks, start_method="forkserver")
        return [torch.load(Path(folder) / f"result{rank}.pt") for rank in range(num_ranks)]


def run_script(num_ranks: int, folder: Path, script: str) -> None:
    """Run a script of ``folder`` in one process per rank, with the environment that ``torchrun``
    gives it. The script makes the process group.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    job = (num_ranks, {**os.environ, **address}, str(folder), script)
    multiprocessing.start_processes(_run_script, job, nprocs=num_ranks, start_method="forkserver")


def _run_script(
    rank: int, num_ranks: int, environment: dict[str, str], folder: str, script: str
) -> None:
    _become(rank, num_ranks, environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    runpy.run_path(script, run_name="__main__")


def _run(
    rank: int,
    num_ranks: int,
    environment: dict[str, str],
    target: str,
    args: tuple[Any, ...],
    folder: str,
    fake_cuda: bool,
) -> None:
    _become(rank, num_ranks, environment)
    backend = "gloo"
    if fake_cuda:
        import fake_nccl

        backend = fake_nccl.start(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    try:
        module, function = target.split(":")
        result = getattr(importlib.import_module(module), function)(*args)
        torch.save(result, Path(folder) / f"result{rank}.pt")
        dist.barrier(device_ids=[rank] if fake_cuda else None)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()


def _become(rank: int, num_ranks: int, environment: dict[str, str]) -> None:
    """Make this process rank ``rank`` of a job on one node."""
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
