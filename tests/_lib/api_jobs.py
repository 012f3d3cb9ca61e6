"""A small model, and what the ranks of a job do with parallelize: for tests that start
processes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError


class Net(nn.Module):
    """Two linears, a saved buffer, a table that is not saved."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 8)
        self.register_buffer("steps", torch.tensor(3.0))
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x + self.table))) * self.steps


X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


def net(seed: int = 0, hidden: int = 16) -> Net:
    torch.manual_seed(seed)
    return Net(hidden).double()


def config(**fields: Any) -> ComputeConfig:
    return ComputeConfig(**{"plan_ngpus": 2, "runtime_ngpus": 2, **fields})


def compile_alone(folder: Path) -> None:
    """Compile in a process that belongs to no job."""
    parallelize(net(), {"x": X}, "tp", config(), gen_savedir=folder, load_module=False)


def refuse(graph: Any, config: ComputeConfig) -> Any:
    """A policy that fails."""
    raise PlanError("this model cannot be planned", why="it is a test", hint="do not worry")


def outcome(act: Any) -> Any:
    """What ``act()`` returned, or the class, text and notes of what it raised."""
    try:
        return act()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])


def load_and_run(savedir: str) -> tuple[list[float], list[str]]:
    """Compile on rank 0, load on both, and run."""
    module = parallelize(net(), {"x": X}, "tp", config(), gen_savedir=savedir)
    return module(X).flatten().tolist(), sorted(name for name, _ in module.named_parameters())


def fail_on_rank_zero(savedir: str) -> Any:
    """A policy that raises on rank 0; the others never run it."""
    return parallelize(net(), {"x": X}, refuse, config(), gen_savedir=savedir, load_module=False)


def fail_on_rank_one(savedir: str) -> Any:
    """An argument that is wrong on rank 1 only."""
    return parallelize(
        net(),
        {"x": X},
        "tp",
        config(),
        gen_savedir=savedir,
        reuse=["match", "mtach"][dist.get_rank()],
    )


def disagree(savedir: str) -> Any:
    """Ranks that ask for different things."""
    return parallelize(net(), {"x": X}, "tp", config(seed=dist.get_rank()), gen_savedir=savedir)


def send(savedir: str, strategy: str) -> Any:
    """Each rank has a folder of its own, as if on a node of its own."""
    rank = dist.get_rank()
    init = not (strategy == "no_weights" and rank)
    module = parallelize(
        net(),
        {"x": X},
        "tp",
        config(),
        gen_savedir=Path(savedir) / f"node{rank}",
        broadcast_strategy=strategy,
        init_module_params=init,
    )
    return module.table.tolist() if strategy == "no_weights" else module(X).flatten().tolist()


def stale_on_the_other_node(savedir: str) -> tuple[Any, list[float]]:
    """Files of other initial weights lie on the second node: refused, and with a broadcast
    replaced.
    """
    rank = dist.get_rank()
    for node in range(2):  # both ranks make both, as a call is the whole job's
        parallelize(
            net(seed=node),
            {"x": X},
            "tp",
            config(),
            gen_savedir=Path(savedir) / f"node{node}",
            load_module=False,
        )
    folder = Path(savedir) / f"node{rank}"
    first = outcome(lambda: parallelize(net(), {"x": X}, "tp", config(), gen_savedir=folder))
    module = parallelize(
        net(), {"x": X}, "tp", config(), gen_savedir=folder, broadcast_strategy="all"
    )
    return first, module(X).flatten().tolist()


def everything(savedir: str) -> dict[str, Any]:
    """All of the above in one job, each in a folder of its own; starting processes is what takes
    the time.
    """
    acts = {
        "load": load_and_run,
        "fail on 0": fail_on_rank_zero,
        "fail on 1": fail_on_rank_one,
        "disagree": disagree,
        **{
            strategy: partial(send, strategy=strategy)
            for strategy in ("none", "all", "no_weights", "code")
        },
        "stale": stale_on_the_other_node,
    }
    return {name: outcome(partial(act, str(Path(savedir) / name))) for name, act in acts.items()}
