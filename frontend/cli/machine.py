"""The command about this machine: ``doctor``."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright import __version__
from shardwright.compiler.plan.amounts import amount
from shardwright.frontend.training.joining_ranks import launcher
from shardwright.frontend.training.launching import rank_variables

LIBRARIES = (
    "torch", "transformers", "safetensors", "numpy", "networkx", "ortools", "datasets",
    "tensorboard", "wandb", "peft", "accelerate", "lightning-fabric",
)  # fmt: skip

LIMIT_S = 90
"""How long two ranks may take to meet."""

JOB_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS",
    "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS",
    "SHARDWRIGHT_TIMEOUT_S",
)  # fmt: skip


def run_doctor(options: argparse.Namespace) -> int:
    """Run ``doctor``."""
    lines = [*_versions(), *_devices(), *_disk(), *_environment()]
    if not options.no_ranks:
        lines += [_collective("gloo")]
        if torch.cuda.device_count() >= 2:
            lines += [_collective("nccl")]
    # Fenced, so that it can be pasted into an issue as it is.
    print("```")
    for name, value in lines:
        print(f"{name:<18} {value}")
    print("```")
    troubles = [value for _, value in lines if value.startswith(TROUBLE)]
    print(f"{len(troubles)} problem(s) found" if troubles else "no problem found")
    return 1 if troubles else 0


TROUBLE = "PROBLEM: "

Line = tuple[str, str]


def _versions() -> Iterator[Line]:
    yield "shardwright", f"{__version__} in {Path(__file__).resolve().parents[2]}"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _devices() -> Iterator[Line]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "processors", f"{cores} of {os.cpu_count()} for this process"
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield "memory", amount(memory, "B")
    yield "CUDA in torch", str(torch.version.cuda or "none: a build for CPUs")
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield f"cuda:{number}", f"{found.name}, {amount(found.total_memory, 'B')}"
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    yield "backends", ", ".join(backends)


def _disk() -> Iterator[Line]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    try:
        with tempfile.TemporaryFile(dir=here):
            yield "folder", f"{here}, {amount(free, 'B')} free"
    except OSError as error:
        yield "folder", f"{TROUBLE}{here} cannot be written: {error.strerror}"


def _environment() -> Iterator[Line]:
    yield "launched by", launcher(os.environ) or "nobody: this is no rank of a job"
    for name in JOB_VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _collective(backend: str) -> Line:
    """Start two processes that add two numbers."""
    # In processes of their own, as a group cannot be made twice in one.
    function = f"from {__name__} import check_collective; check_collective({backend!r})"
    ranks = []
    for variables in rank_variables(2):
        rank = subprocess.Popen(
            [sys.executable, "-c", function],
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        ranks.append(rank)
    problem = None
    for number, rank in enumerate(ranks):
        try:
            _, told = rank.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            told = f"it did not end within {LIMIT_S} s"
        # Once one has not ended in time, its partner waits for it for ever.
        rank.kill()
        if rank.wait() != 0 and problem is None:
            last = next(iter(reversed(told.strip().splitlines())), f"exit code {rank.returncode}")
            problem = f"rank {number}: {last}"
    name = f"two ranks, {backend}"
    return name, "all_reduce is right" if problem is None else f"{TROUBLE}{problem}"


def check_collective(backend: str) -> None:
    """What each of the two processes does."""
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT_S / 2))
    found = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(found)
    assert found.item() == 3.0, f"1 + 2 came to {found.item()}"
    dist.destroy_process_group()
