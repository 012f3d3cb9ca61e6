"""Real processes of which one is killed or stopped at a chosen moment: what do the others say, and
do they end?

``run(job, fault)`` starts a process per rank. Each trains a small compiled model over gloo; the
victim sends itself a signal when it comes to the chosen communication. What the survivors raised is
returned by rank.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import spawn
import torch
import torch.distributed as dist
from torch import nn

import shardwright
from shardwright.runtime.ranks import failures
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.exchange import StoreExchange

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}

DEADLINE_S = 900.0
"""What must end ends by then, however slow the machine is."""


@dataclass(frozen=True)
class Job:
    """What the ranks train. ``config``: fields of the ComputeConfig. ``saves``: with a checkpoint
    of each step, ``in_background``: saved while training goes on.
    """

    policy: str
    config: dict[str, Any]
    saves: bool = False
    in_background: bool = False
    num_steps: int = 3
    has_store: bool = False  # rank 0 has the job's key-value store, as without torchrun

    @property
    def num_ranks(self) -> int:
        return int(self.config["runtime_ngpus"])

    @property
    def num_microbatches(self) -> int:
        return int(self.config["pas_config"]["num_microbatches"])


@dataclass(frozen=True)
class Fault:
    """``moment``: a word of :data:`MOMENTS`, the number of a communication, or none: the parent
    sends the signal then.
    """

    victim: int
    moment: str | int | None
    signal: signal.Signals = signal.SIGKILL


@dataclass
class Outcome:
    """``errors``: text by surviving rank, empty where it ended without. ``said``: what its waits
    logged.
    """

    errors: dict[int, str] = field(default_factory=dict)
    said: dict[int, list[str]] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)


def _told() -> str:
    subject = failures._subjects.stack[-1] if failures._subjects.stack else ""
    return subject if isinstance(subject, str) else subject()


MOMENTS: dict[str, Callable[[str], bool]] = {
    "forward": lambda told: not told and torch._C._current_autograd_node() is None,
    "backward": lambda told: not told and torch._C._current_autograd_node() is not None,
    "reducer": lambda told: told.startswith("reducing the gradients"),
    "parameters": lambda told: told.startswith("gathering the new values"),
    "weights": lambda told: told.startswith("gathering the weight"),
    "clip": lambda told: told == "the norm of all gradients",
    "save": lambda told: told == "a checkpoint",
}
"""Collectives of a step. The victim leaves before it joins the first one of these in its second
step.
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up2, self.down2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(x).relu())
        return self.down2(self.up2(x).relu()).square().mean()


ARGUMENTS = {"x": torch.ones(4, 8)}


class Mending(nn.Module):
    """Mends what overflows in its second half, so that a check of numbers comes after a
    collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net.down(self.net.up(x).relu())
        x = self.net.up2(x)
        if not torch.isfinite(x).all():
            x = x.clamp(-1e3, 1e3)
        return self.net.down2(x.relu()).square().mean()


def compiled(folder: Path, job: Job) -> str:
    """Compile what the ranks train."""
    config = shardwright.ComputeConfig(**job.config)
    torch.manual_seed(0)
    shardwright.parallelize(
        Net(), ARGUMENTS, job.policy, config, gen_savedir=folder, load_module=False
    )
    return str(next(folder.rglob("manifest.json")).parent)


def run(
    folder: Path,
    job: Job,
    fault: Fault,
    *,
    timeout_s: float = 600.0,
    after_s: float = 0.0,
    target: str = "train",
) -> Outcome:
    """Run a job with a fault. ``after_s``: when the parent sends the signal, counted from when all
    ranks have begun.

    ``timeout_s``: the limit of all waits. ``target``: the function of this file that each rank
    runs.
    """
    multiprocessing.set_forkserver_preload([*spawn.PRELOADED, "faults"])
    context = multiprocessing.get_context("forkserver")
    environment = {
        **os.environ,
        "SHARDWRIGHT_TIMEOUT_S": str(timeout_s),
        "SHARDWRIGHT_NOTICE_S": "1",
        "SHARDWRIGHT_COLLECTIVE_NOTICE_S": "2",
    }
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if job.has_store:
        del store  # the port is free now
    processes = [
        context.Process(
            target=_rank,
            args=(rank, port, str(folder), job, fault, environment, target),
            daemon=True,
        )
        for rank in range(job.num_ranks)
    ]
    for process in processes:
        process.start()
    survivors = {rank: process for rank, process in enumerate(processes) if rank != fault.victim}
    try:
        if fault.moment is None:
            while not all((folder / f"began{rank}").exists() for rank in range(job.num_ranks)):
                time.sleep(0.01)
            time.sleep(after_s)
            if processes[fault.victim].is_alive():
                os.kill(processes[fault.victim].pid, fault.signal)
        deadline = time.monotonic() + DEADLINE_S
        for process in survivors.values():
            process.join(max(0.0, deadline - time.monotonic()))
        outcome = Outcome(stuck=[rank for rank, process in survivors.items() if process.is_alive()])
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank in survivors:
        path = folder / f"outcome{rank}.json"
        told = (
            json.loads(path.read_text()) if path.exists() else {"error": "(no outcome)", "said": []}
        )
        outcome.errors[rank], outcome.said[rank] = told["error"], told["said"]
    return outcome


def _rank(
    rank: int,
    port: int,
    folder: str,
    job: Job,
    fault: Fault,
    environment: dict[str, str],
    target: str,
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.num_ranks))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    has_store = job.has_store and rank == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=has_store, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_ranks)
    dist.barrier()
    error = ""
    try:
        globals()[target](Path(folder), job, fault if fault.victim == rank else None)
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    (Path(folder) / f"outcome{rank}.json").write_text(json.dumps({"error": error, "said": said}))
    os._exit(0)  # torch's own taking down of groups may wait for the victim


def train(folder: Path, job: Job, fault: Fault | None) -> None:
    """Load what was compiled and train it."""
    module = shardwright.load_class(next(folder.rglob("manifest.json")).parent)()
    (folder / f"began{dist.get_rank()}").touch()
    _train(module, folder, job, lambda step: faulty(fault, step))


def _train(module: Any, folder: Path, job: Job, around: Callable[[int], Any]) -> None:
    optimizer = shardwright.build_optimizer(module, torch.optim.AdamW, lr=1e-3)
    saves: list[Any] = []
    for step in range(job.num_steps):
        with around(step):
            optimizer.zero_grad()
            if job.config.get("use_end2end"):
                module.train_step([ARGUMENTS] * job.num_microbatches)
            else:
                module(**ARGUMENTS).backward()
            optimizer.clip_gnorm(1.0)
            optimizer.step()
            if job.saves:
                saves.append(
                    shardwright.save_checkpoint(
                        folder / "checkpoints",
                        module,
                        optimizer,
                        step=step,
                        async_save=job.in_background,
                    )
                )
    for save in saves[-1:]:
        save.wait()


def _call_guarded(
    folder: Path, job: Job, is_broken: bool, goes_on: Callable[[], object] = lambda: None
) -> None:
    """Call a module whose check of numbers fails where it is broken; then go on with the next
    call.
    """
    config = shardwright.ComputeConfig(**job.config)
    torch.manual_seed(0)
    module = shardwright.parallelize(
        Mending(), ARGUMENTS, job.policy, config, gen_savedir=folder, reuse="moo"
    )
    module(**ARGUMENTS)
    weight = module.net.up2.weight
    good = weight.detach().clone()
    if is_broken:
        weight.data[0] = torch.nan
        try:
            module(**ARGUMENTS)
        except shardwright.InputError:
            weight.data.copy_(good)
            goes_on()
        else:
            raise AssertionError("the check did not fail")
    module(**ARGUMENTS)


def check_fails_on_rank_1(folder: Path, job: Job, fault: Fault | None) -> None:
    """The victim, if there is one, does not go on."""
    _call_guarded(
        folder,
        job,
        dist.get_rank() == 1,
        (lambda: time.sleep(DEADLINE_S)) if fault else lambda: None,
    )


def check_fails_on_all_ranks(folder: Path, job: Job, fault: Fault | None) -> None:
    _call_guarded(folder, job, True)


def comes_late(folder: Path, job: Job, fault: Fault | None) -> None:
    """Rank 1 comes some seconds late to its second call."""
    module = shardwright.load_class(next(folder.rglob("manifest.json")).parent)()
    module(**ARGUMENTS)
    if dist.get_rank() == 1:
        time.sleep(6)
    module(**ARGUMENTS)


def compile_and_train(folder: Path, job: Job, fault: Fault | None) -> None:
    """Both, with the fault anywhere; what :func:`compiled` has left is not used."""
    (folder / f"began{dist.get_rank()}").touch()
    config = shardwright.ComputeConfig(**job.config)
    with faulty(fault, 1):
        module = shardwright.parallelize(Net(), ARGUMENTS, job.policy, config, gen_savedir=folder)
        _train(module, folder, job, lambda step: nullcontext())


PLACES = {
    "world": "shardwright.runtime.ranks.world.DistributedWorld.__init__",
    "arguments": "shardwright.frontend.parallelize.find_policy",
    "compile": "shardwright.frontend.files.further_programs.generate",
    "packing": "shardwright.frontend.files.broadcast_files.Parcel.pack",
    "loading": "shardwright.frontend.files.further_programs.load_class",
    "weights": "shardwright.runtime.module.parallel_module.ParallelModule._make_tensors",
    "groups": "shardwright.runtime.module.parallel_module.ParallelModule._make_groups",
}
"""Functions that a compile calls, by stage; with one of them as its moment the victim raises there
in the place of leaving.
"""


def _broken(*arguments: Any, **kwargs: Any) -> None:
    raise ValueError("broken on purpose")


def compile_together(folder: Path, job: Job, fault: Fault | None) -> None:
    """Compile and load, with the fault at its number of an exchange, before the first one, or at a
    place.
    """
    (folder / f"began{dist.get_rank()}").touch()
    config = shardwright.ComputeConfig(**job.config)
    at = fault.moment if fault is not None and fault.moment in PLACES else None
    with mock.patch(PLACES[at], _broken) if at else faulty(fault, 1):
        shardwright.parallelize(
            Net(), ARGUMENTS, job.policy, config, gen_savedir=folder, broadcast_strategy="all"
        )


@contextmanager
def faulty(fault: Fault | None, step: int) -> Any:
    """Inside the ``with`` block of its second step the victim leaves at its moment; with a number,
    at that communication.
    """
    if fault is None or fault.moment is None or (step != 1 and isinstance(fault.moment, str)):
        yield
        return
    count = _counts

    def before(owner: Any) -> None:
        count[0] += 1
        moment = fault.moment
        told = owner.what if isinstance(owner, StoreExchange) else _told()
        if count[0] == moment or (isinstance(moment, str) and MOMENTS[moment](told)):
            os.kill(os.getpid(), fault.signal)

    with (
        _called_first(Communicator, "_call", before),
        _called_first(Communicator, "_start", before),
        _called_first(StoreExchange, "_ask", before),
    ):
        yield


_counts = [0]


@contextmanager
def _called_first(owner: type, name: str, before: Callable[[Any], None]) -> Any:
    """Call ``before`` first in each call of a method."""
    method = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        before(args[0])
        return method(*args)

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, method)
