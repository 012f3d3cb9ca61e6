"""Joining the ranks of a job, whoever has started them: torchrun, srun, or this program.

torchrun says a rank its number in ``RANK``, and where rank 0 is in ``MASTER_ADDR``. srun says it in
``SLURM_PROCID`` and so on; from these the variables of torchrun are made, so that everything else
sees one kind of job.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from shardwright.frontend.files.make_process_group import join_process_group
from shardwright.runtime.errors import DistributedError, ShardwrightError
from shardwright.runtime.ranks.world import world_of_thread

TOLD_WITHIN_S = 3.0
"""How long ranks that end with an error wait for each other, to tell it once."""

FIRST_PORT, NUM_PORTS = 20_000, 20_000
"""Jobs of Slurm take a port by their number, so that two on a node seldom take the same one."""


def launcher(environment: Mapping[str, str]) -> str | None:
    """What has started this process as a rank: ``"torchrun"``, ``"srun"``, or ``None``."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return "torchrun"
    # A batch script has SLURM_PROCID as well; only a step of srun has a number of tasks.
    if {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return "srun"
    return None


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun for a task of srun.

    Raises :class:`DistributedError` if Slurm does not say on which nodes the job runs.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    first = environment.get("MASTER_ADDR") or (first_host(nodes) if nodes else None)
    if first is None:
        raise DistributedError(
            "srun does not say where rank 0 runs",
            why="SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set",
            hint="set MASTER_ADDR to the host of the first task",
        )
    # "4(x2),3": four tasks on each of two nodes, three on a third; on this one as many as said last
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment["SLURM_STEP_NUM_TASKS"])
    node = int(environment.get("SLURM_NODEID", "0"))
    # All ranks must find the same port without talking to each other.
    port = FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % NUM_PORTS
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks_by_node(per_node)[node]),
        "MASTER_ADDR": first,
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def first_host(nodes: str) -> str:
    """The first host of Slurm's notation: ``node01`` of ``node[01-03,07],login``."""
    # A name, then perhaps a bracket of which the first number counts, then what stands behind it.
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise DistributedError(f"{nodes!r} is no list of nodes as Slurm writes it")
    return found[1] + (found[2] or "") + (found[3] or "")


def tasks_by_node(text: str) -> list[int]:
    """The tasks of each node: ``[4, 4, 3]`` of Slurm's ``4(x2),3``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


@contextmanager
def joined_job() -> Iterator[None]:
    """Inside the block the ranks of the job are connected, each with its GPU where there are
    enough.

    A process group that is there already, or ranks that are threads, are taken as they are.
    """
    if world_of_thread() is not None or dist.is_initialized():
        yield
        return
    started_by = launcher(os.environ)
    if started_by is None:
        raise DistributedError(
            "this process is no rank of a job",
            why="neither torchrun nor srun has started it",
            hint="torchrun --nproc-per-node 4 -m shardwright train -c run.yaml",
        )
    if started_by == "srun":
        # torch, and code of the user's, look for the variables of torchrun.
        os.environ.update(torchrun_variables(os.environ))
    join_process_group()
    try:
        yield
        dist.barrier()  # no rank leaves while another still talks to it
    except ShardwrightError as error:
        if _is_told_by_first_rank(str(error)):
            raise ToldByFirstRankError from error
        raise
    finally:
        dist.destroy_process_group()


class ToldByFirstRankError(Exception):
    """Raised in the place of an error that rank 0 has too, and tells."""


def _is_told_by_first_rank(text: str) -> bool:
    """Whether rank 0 ends with the same error, so that this rank need not tell it again.

    Rank 0 waits for the others, as the store may be in its process. None waits for long: a rank may
    be alone with its error.
    """
    # The store of the running process group has no public accessor.
    store = PrefixStore("shardwright/told", _get_default_store())
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    try:
        if rank == 0:
            store.set("text", text)
            _wait_for(store, [f"read/{other}" for other in others])
            return False
        is_told = _wait_for(store, ["text"]) and store.get("text").decode() == text
        store.set(f"read/{rank}", "")
    except RuntimeError:  # the store is gone, and rank 0 with it
        return False
    return is_told


def _wait_for(store: Store, keys: list[str]) -> bool:
    deadline = time.monotonic() + TOLD_WITHIN_S
    while not (is_there := store.check(keys)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_there
