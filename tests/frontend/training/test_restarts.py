"""Ranks that end: those that torchrun starts again, and those that no start would help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardwright.frontend.cli import training
from shardwright.frontend.cli.main import main
from shardwright.frontend.training.launching import start_ranks
from shardwright.frontend.training.stopping import CONFIG_EXIT_CODE, STOPPED_EXIT_CODE

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

NEED_RANKS = ("--parallel.options={loss_piece: 2}", "--parallel.use_zero=5")
"""What is refused once the number of ranks is known."""

HOOKS = """
import os
def die_once(run, record):
    if run.step == 5 and run.world.rank == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), 9)
"""


def environment(folder: Path) -> dict[str, str]:
    lib = Path(__file__).resolve().parents[2] / "_lib"
    path = os.pathsep.join((str(folder), str(lib), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": path}


def test_a_mistake_is_told_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.setattr(training, "start_ranks", lambda *_: pytest.fail("ranks are started"))
    command = ["train", "-c", str(tmp_path / "run.yaml")]
    for flag, text in (
        ("--optimizer.name=adamw", "did you mean 'AdamW'?"),
        ("--optimizer.options.lr=foo", "optimizer.options.lr is a number\n  why:   it is 'foo'"),
        ("--optimizer.options={betas: 0.9}", "optimizer.options.betas is a list of 2 (a number"),
        ("--optimizer.options={lr: -1}", "Invalid learning rate: -1"),
        ("--parallel.options={loss_piece: 2}", "did you mean 'loss_pieces'?"),
        ("--parallel.use_zero=5", "a stage from 0 to 3"),
        ("--hooks={on_step: 'a:b'}", "did you mean 'on_step_end'?"),
        ("--log.to=[wandby]", "it is ['wandby']"),
        ("--hardware=h1000", "did you mean 'h100'?"),
        ("--parallel.policy=tpp", "did you mean 'tp'?"),
        ("--global_batch=0", "global_batch is a whole number of at least 1"),
        ("--microbatch=3", "the 8 samples of a step do not divide into microbatches of 3"),
    ):
        # Printing the settings refuses what a run of them refuses, however many ranks it gets.
        ways = [["--num_ranks=2"], ["--num_ranks=2", "--print-config"]]
        for more in ways if flag in NEED_RANKS else [*ways, ["--print-config"]]:
            assert main([*command, *more, flag]) == CONFIG_EXIT_CODE
            assert text in capsys.readouterr().err, flag
    # Where nobody has named the ranks, their number is no mistake.
    of_four = [*command, "--parallel.plan_ngpus=4", "--print-config"]
    assert main(of_four) == 0
    assert main([*of_four, "--num_ranks=2"]) == CONFIG_EXIT_CODE


def test_a_signal_before_the_first_step(capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that import do not listen yet, and have nothing to save."""
    sleep = ["-c", "import time; print('up', flush=True); time.sleep(60)"]
    asking = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    asking.start()
    assert start_ranks(2, sleep) == STOPPED_EXIT_CODE
    assert "stopped by SIGTERM before anything could be saved" in capfd.readouterr().err


@pytest.mark.slow
def test_an_error_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("tagger", "taggers"))
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "train", "-c", "run.yaml", "--num_ranks=2"],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == CONFIG_EXIT_CODE, done.stderr
    text = "did you mean 'tagger'?"
    assert done.stderr.count("error: ") == done.stderr.count(text) == 1, done.stderr
    assert "goes on from the newest checkpoint" not in done.stderr


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "dying_hooks.py").write_text(HOOKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += ["--nproc-per-node=2", "-m", "shardwright", "train", "-c", "run.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines())
    steps = [record["step"] for record in lines if record["event"] == "step"]
    # The last steps before the death were not saved, and are taken again.
    assert steps[-6:] == [4, 5, 6, 7, 8, 9] and steps[:4] == [1, 2, 3, 4]
