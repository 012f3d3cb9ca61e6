"""A rank that dies under torchrun: all are started again, and go on from the newest checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
output: out
model: {function: "training_runs:tagger"}
data: {function: "training_runs:rows"}
global_batch: 8
steps: 9
parallel: {policy: tp}
checkpoints: {every_steps: 3, in_background: false}
hooks: {on_step_end: "dying_hooks:die_once"}
"""

HOOKS = """
import os
def die_once(run, record):
    if run.step == 5 and run.world.rank == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "dying_hooks.py").write_text(HOOKS)
    lib = Path(__file__).resolve().parents[2] / "_lib"
    path = os.pathsep.join((str(tmp_path), str(lib), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += ["--nproc-per-node=2", "-m", "shardwright", "train", "-c", "run.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines())
    steps = [record["step"] for record in lines if record["event"] == "step"]
    # The last steps before the death were not saved, and are taken again.
    assert steps[-6:] == [4, 5, 6, 7, 8, 9] and steps[:4] == [1, 2, 3, 4]
