"""The ranks that measure: those of the ``torchrun`` job this process is in, or new processes on
this machine.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from shardwright.runtime.activity import listening, tell
from shardwright.runtime.errors import DistributedError
from shardwright.runtime.ranks.world import DistributedWorld, World
from shardwright.runtime.swap import write_file
from shardwright.runtime.waiting import LIMIT_HINT, Pulse, Wait

Measure = Callable[[World, bool], dict[str, Any]]
"""``measure(world, quick)``: JSON values; a function of a module, as new processes import it."""


def in_job() -> bool:
    """Whether this process is one of several ranks of ``torchrun``."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def measure_in_job(measure: Measure, device_type: str, quick: bool) -> dict[str, Any]:
    """What ``measure`` returns on this rank of the job."""
    with _initialised(device_type, int(os.environ.get("LOCAL_RANK", "0"))):
        return measure(DistributedWorld(), quick)


def measure_in_processes(
    measure: Measure, device_type: str, num_ranks: int, quick: bool
) -> dict[str, Any]:
    """What ``measure`` returns on rank 0 of ``num_ranks`` new processes. Ctrl-C ends them all."""
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _run,
            (measure, device_type, num_ranks, quick, folder),
            nprocs=num_ranks,
            join=False,
            start_method="spawn",
        )
        assert context is not None
        try:
            _await(context, Path(folder))
        except BaseException:
            for process in context.processes:
                process.kill()  # which ends a stopped one, too
            for process in context.processes:
                process.join(_ENDING_S)
            raise
        result: dict[str, Any] = json.loads(
            (Path(folder) / "result.json").read_text(encoding="utf-8")
        )
        return result


_ENDING_S = 10.0
"""How long a process that was killed may take to be gone."""


def _await(context: Any, folder: Path) -> None:
    """Return when all processes have ended well. Raises :class:`DistributedError` for one that
    gives no sign of life.
    """
    silences = {rank: Wait("") for rank in range(len(context.processes))}
    last_s = time.monotonic()
    while not context.join(timeout=_LOOK_S):
        _pass_on(folder / _TOLD)
        last_s, spent_s = time.monotonic(), time.monotonic() - last_s
        for rank, silence in silences.items():
            # Files, not messages: a rank that hangs in a collective answers none.
            silence.heard(_last_sign(folder / f"alive{rank}"))
            if not silence.passed(spent_s) and context.processes[rank].is_alive():
                raise DistributedError(
                    f"rank {rank} of the measurement has given no sign of life for "
                    f"{silence.limit_s:g} s",
                    why="its process is stopped, or hangs while it starts",
                    hint=f"measure again; {LIMIT_HINT}",
                )


_LOOK_S = 0.5

_TOLD = "told.json"


class _Written:
    """Keeps what rank 0 is doing in a file, for the process that has started it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, words: str) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""

    def tell(self, words: str, share: float | None) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""
        write_file(self._path, json.dumps([words, share]).encode())

    def end(self) -> None:
        """See :class:`~shardwright.runtime.activity.Listener`."""


def _pass_on(path: Path) -> None:
    if path.exists():
        tell(*json.loads(path.read_text(encoding="utf-8")))


def _last_sign(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _run(
    rank: int, measure: Measure, device_type: str, num_ranks: int, quick: bool, folder: str
) -> None:
    """One new process."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    alive = Path(folder) / f"alive{rank}"
    # A file, not a port, which another process could take in between.
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": num_ranks}
    with (
        Pulse(lambda number: alive.write_text(str(number))),
        _initialised(device_type, rank, **where),
    ):
        with listening(_Written(Path(folder) / _TOLD)) if rank == 0 else nullcontext():
            result = measure(DistributedWorld(), quick)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")


@contextmanager
def _initialised(device_type: str, local_rank: int, **where: Any) -> Iterator[None]:
    """``torch.distributed`` for one rank, with as many threads as under ``torchrun``: one, unless
    OMP_NUM_THREADS says more.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", **where)
    try:
        yield
    finally:
        dist.destroy_process_group()
