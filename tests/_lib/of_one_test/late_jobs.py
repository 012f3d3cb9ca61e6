"""What the spawned processes of tests/benchmarks/test_late_messages.py run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwright.runtime.ranks.world import count_communication, current_world

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from late_messages import LateMessages


def every_collective(delay_s: float) -> dict[str, list[list[float]]]:
    """The stamps of each collective of a communicator, made under late messages."""
    everyone, x = current_world().everyone, torch.ones(4, 2)
    counts = [2, 2]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: everyone.all_reduce(x),
        "all_reduce_async": lambda: everyone.all_reduce_async(x.clone()).wait(),
        "all_gather": lambda: everyone.all_gather(x),
        "all_gather_cat": lambda: everyone.all_gather_cat(x),
        "all_gather_async": lambda: everyone.all_gather_async(x).wait(),
        "all_gather_async_": lambda: everyone.all_gather_async_(x.view(-1), [4, 4]).wait(),
        "reduce_scatter": lambda: everyone.reduce_scatter(x),
        "reduce_scatter_async_": lambda: everyone.reduce_scatter_async_(x.view(-1), [4, 4]).wait(),
        "all_to_all": lambda: everyone.all_to_all([x, x], [(4, 2)] * 2),
        "all_to_all_rows_async": lambda: everyone.all_to_all_rows_async(
            x, counts, counts, phase="setup"
        ).wait(),
        "broadcast": lambda: everyone.broadcast(x, 0),
    }
    found = {}
    with LateMessages(delay_s) as late:
        for name, call in calls.items():
            with count_communication() as volume:
                call()
            assert volume.calls() == 1, name
            found[name] = late.take().tolist()
    everyone.all_reduce(x)  # in time again
    return {**found, "afterwards": late.take().tolist()}
