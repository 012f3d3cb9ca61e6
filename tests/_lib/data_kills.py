"""A training whose ranks and workers are killed at random moments, and which goes on from its last
checkpoint on another number of ranks and workers.

Each checkpoint holds, beside the weights and the loader's position, which samples were trained
since the beginning. So what was lost or repeated shows.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets_by_hand import Numbers, global_batches, ids_of, on_replicas
from mlp_files import make_model, write_files

import shardwright
from shardwright import data
from shardwright.runtime.checkpoint.folders import LATEST_FILE
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.world import current_world

SIZE, GLOBAL_BATCH = 50, 12
OPTIONS: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "shuffle": True, "seed": 5}


class Slow(Numbers):
    """Numbers that take a while, so that workers are at work when they are killed."""

    def __getitem__(self, index: int) -> dict[str, int]:
        time.sleep(0.0005)
        return super().__getitem__(index)


def kill(num_kills: int, seed: int, folder: Path, *, num_steps: int = 30) -> Counter[str]:
    """Kill that many times; return how often what was killed."""
    draw, counts = random.Random(seed), Counter[str]()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    files = write_files(folder / "mlp", make_model(), dp=1, tp=1)
    expected = global_batches(on_replicas(Numbers(SIZE), 1, **OPTIONS), num_steps)
    for number in itertools.count():
        directory = folder / f"run{number}"
        while True:
            ranks, workers = draw.choice([1, 2, 3]), draw.choice([0, 1, 2])
            wants = sum(counts[kind] for kind in ("rank", "worker")) < num_kills
            after = draw.uniform(0.05, 1.2) if wants else None
            killed = _job(files, directory, num_steps, ranks, workers, after, draw)
            counts[killed] += 1
            if killed == "nothing":
                break
        log = shardwright.load_checkpoint(directory, load_class(files, 0)()).extra
        assert log == expected, "samples were lost, repeated, or came in other batches"
        shutil.rmtree(directory)
        if sum(counts[kind] for kind in ("rank", "worker")) >= num_kills:
            return counts
    raise AssertionError


def _job(
    files: Path,
    directory: Path,
    num_steps: int,
    num_ranks: int,
    workers: int,
    kill_after: float | None,
    draw: random.Random,
) -> str:
    """One job, from the last checkpoint on. Returns what was killed in it."""
    context = multiprocessing.get_context("fork")
    store = directory.parent / f"store-{time.monotonic_ns()}"
    arguments = (files, directory, num_steps, num_ranks, workers, store)
    ranks = [context.Process(target=_rank, args=(r, *arguments)) for r in range(num_ranks)]
    for process in ranks:
        process.start()
    killed = "nothing"
    if kill_after is not None:
        deadline = time.monotonic() + kill_after
        while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
            time.sleep(0.01)
        killed = _kill_one([process.pid or 0 for process in ranks if process.is_alive()], draw)
    if killed == "nothing":
        for process in ranks:
            process.join()
        said = [store.with_suffix(f".{rank}").read_text() for rank in range(num_ranks)]
        failed = [text for text, process in zip(said, ranks, strict=True) if process.exitcode]
        assert not failed, "a job without a kill failed:\n" + "\n".join(failed)
    elif killed == "worker":
        # Its rank says so and ends; the others may wait for it, as a launcher would not let them.
        while not any(process.exitcode is not None for process in ranks):
            time.sleep(0.01)
    for process in ranks:
        process.kill()
        process.join()
    for path in store.parent.glob(f"{store.name}*"):
        path.unlink()
    return killed


def _kill_one(pids: list[int], draw: random.Random) -> str:
    """Kill a rank, or one of its workers."""
    if not pids:
        return "nothing"
    pid = draw.choice(pids)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        workers = [int(word) for word in children.read_text().split()]
        victim = draw.choice([pid, *workers])
        os.kill(victim, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return "nothing"
    return "rank" if victim == pid else "worker"


def _rank(
    rank: int,
    files: Path,
    directory: Path,
    num_steps: int,
    num_ranks: int,
    workers: int,
    store: Path,
) -> None:
    # What a rank says of the others' death is expected; of a job without a kill it is looked at.
    sys.stderr = open(store.with_suffix(f".{rank}"), "w", buffering=1)  # noqa: SIM115
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
        )
    module = load_class(files)()
    loader = data.loader(Slow(SIZE), **OPTIONS, num_workers=workers)
    log: list[list[int]] = []
    # A kill within the first save may leave a whole folder that is not current yet.
    if (directory / LATEST_FILE).exists():
        log = shardwright.load_checkpoint(directory, module, loader=loader).extra
    while len(log) < num_steps:
        for batch in loader:
            parts = current_world().all_gather_object(ids_of(batch))
            log = [*log, [number for part in parts for number in part]]
            shardwright.save_checkpoint(
                directory, module, loader=loader, extra=log, step=len(log)
            ).wait()
            if len(log) == num_steps:
                break
    loader.close()
    os._exit(0)
