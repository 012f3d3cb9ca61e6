"""Which launcher has started a process, from its environment; learning rates of a run."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.frontend.training.joining_ranks import (
    first_host,
    launcher,
    tasks_by_node,
    torchrun_variables,
)
from shardwright.frontend.training.learning_rates import part_of_rate
from shardwright.frontend.training.run_settings import ScheduleSettings

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "41234",
}


def test_a_task_of_srun_is_a_rank_of_torchrun() -> None:
    assert launcher(SLURM) == "srun"
    variables = torchrun_variables(SLURM)
    assert variables == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20_000 + 1_234),
    }
    assert launcher(variables) == "torchrun"
    # A batch script has a number as well, and is no rank.
    assert launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[01-03,07],login", "node01"),
        ("a,b", "a"),
        ("rack[2,5]-x", "rack2-x"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
    assert tasks_by_node("4(x2),3") == [4, 4, 3]


def test_learning_rates() -> None:
    def parts(num_steps: int, **fields: Any) -> list[float]:
        part = part_of_rate(ScheduleSettings(**fields), num_steps)
        return [round(part(step), 6) for step in range(num_steps)]

    assert parts(4, warmup_steps=2) == [0.5, 1, 1, 1]
    assert parts(6, name="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert parts(4, name="cosine", final=0.2) == [1, 0.882843, 0.6, 0.317157]
