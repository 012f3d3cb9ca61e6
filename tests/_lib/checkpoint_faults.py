"""Saves that are killed or damaged, for the tests of checkpoints and their fuzzers."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright
from shardwright.runtime.checkpoint.owner import release_all
from shardwright.runtime.checkpoint.save import CheckpointSave
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer


class Net(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), float(value)))
        self.bias = nn.Parameter(torch.full((3,), float(value)))


def save(directory: Path, value: int, zero: int = 0, **options: Any) -> CheckpointSave:
    """``zero``: the stage, for two ranks that share the optimizer's state."""
    net = Net(value)
    config = {"plan_ngpus": 1, "runtime_ngpus": 2, "grad_reduction": "mean", "use_zero": zero}
    optimizer = (
        build_optimizer(net, torch.optim.Adam, config)
        if zero
        else torch.optim.Adam(net.parameters())
    )
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)  # autograd does not survive a fork
    optimizer.step()
    return shardwright.save_checkpoint(directory, net, optimizer, step=value, **options)


def current_step(directory: Path) -> int:
    """The step of the current checkpoint, all of it loaded and checked."""
    net = Net(0)
    loaded = shardwright.load_checkpoint(directory, net, torch.optim.Adam(net.parameters()))
    assert loaded.step is not None
    # Adam's first step is its learning rate.
    after_one_step = torch.full((4, 3), loaded.step - 0.001)
    # Some roundings of float32.
    torch.testing.assert_close(net.weight.detach(), after_one_step, rtol=1e-6, atol=0)
    return loaded.step


TOUCHING = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
    "os.listdir",
    "os.scandir",
)
"""What Python reports of a process that changes or reads a file system."""


def dies_at(directory: Path, number: int, act: Callable[[], Any]) -> bool:
    """Run ``act`` in a process that is killed when it touches ``directory`` for the ``number``-th
    time. Whether it was.
    """
    release_all()  # the other process is to be the only one that saves
    child = os.fork()
    if child == 0:
        count = itertools.count(1)  # threads count too, at once

        def kill(event: str, arguments: tuple[Any, ...]) -> None:
            # shutil.rmtree names files by their open folder.
            relative = event == "os.remove" and arguments[1] != -1
            if (
                event in TOUCHING
                and (relative or str(directory) in str(arguments[0]))
                and next(count) == number
            ):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def killed_at(
    directory: Path,
    number: int,
    num_ranks: int,
    asynchronous: bool,
    zero: int,
    value: int = 3,
    keep: int | None = 1,
) -> bool:
    """Save in a process that is killed when it touches ``directory`` for the ``number``-th time.
    Whether it was.
    """

    def act() -> None:
        run_ranks(
            num_ranks,
            lambda rank: save(directory, value, zero, keep=keep, async_save=asynchronous).wait(),
        )

    return dies_at(directory, number, act)


# What is done to a folder of a checkpoint, at random


def alter_files(folder: Path, rng: random.Random) -> str:
    """Damage files as disks, copies and people do. In words, what was done."""
    path = rng.choice(
        sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "OWNER")
    )
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "flip", "flip", "cut", "grow", "delete", "empty", "swap"])
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "grow":
        path.write_bytes(data + rng.randbytes(rng.randint(1, 40)))
    elif kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        others = sorted(
            other for other in path.parent.iterdir() if other.is_file() and other.name != "OWNER"
        )
        other = rng.choice(others)
        content = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(content)
        kind = f"swap with {other.name}"
    return f"{kind} of {path.relative_to(folder)}"


JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 10**30, 0.5, float("inf"), "", "x", "../x", "float32", [], [[]],
    [1, 2], {}, {"a": 1},
    {"float": "x"}, {"tensor": {"dtype": "float32", "shape": [2], "bytes": "AAAA"}}, {"tuple": 3},
    {"dict": [[[], 1]]},
)  # fmt: skip


def alter_index(path: Path, rng: random.Random) -> str:
    """Change one entry of an index, and give it the digest of what it says then. In words, what was
    done.
    """
    content = json.loads(path.read_text())
    content.pop("sha256")
    places = list(_places(content))
    where, holder, key = rng.choice(places)
    kind = rng.choice(["junk", "junk", "delete", "shift", "twice", "swap", "rename"])
    if kind == "delete":
        del holder[key]
    elif kind == "shift" and type(holder[key]) is int:
        holder[key] += rng.choice([-1, 1, 2])
    elif kind == "twice" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == "swap":
        other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[str(key) + "x"] = holder.pop(key)
    else:
        kind, holder[key] = "junk", rng.choice(JUNK)
    _write_index(path, content)
    return f"{kind} at {where}"


def redigested(path: Path, change: Callable[[Any], Any]) -> None:
    """Let ``change`` alter what an index says, and give it the digest of that."""
    content = json.loads(path.read_text())
    content.pop("sha256")
    change(content)
    _write_index(path, content)


def _write_index(path: Path, content: Any) -> None:
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, **content}))


def _places(value: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every entry of nested JSON: how to call it, what holds it, and where in it."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield f"{where}/{key}", value, key
            yield from _places(item, f"{where}/{key}")
