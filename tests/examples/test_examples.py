"""The examples do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(folder: Path, *command: str) -> str:
    """Run Python in ``folder`` and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(folder: Path, num_ranks: int, *command: str) -> str:
    return run(
        folder,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        *command,
    )


@pytest.mark.slow
def test_the_demo_agrees_with_one_device_and_leaves_its_files(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "demo.py"))
    for name in ("gencode0.py", "gencode1.py", "plan.json"):
        (told,) = re.findall(rf"^  (\S+/{name})$", printed, re.MULTILINE)
        assert (tmp_path / told).is_file()
    assert len(list(tmp_path.rglob("gencode*.py"))) == 2
    difference = re.search(r"largest difference over 20 steps: (\S+)", printed)
    assert difference and float(difference[1]) < 1e-12
    assert "def forward(self, tokens)" in printed and "all_reduce" in printed


def assert_training_equals_one_device(printed: str, bound: float) -> None:
    """20 steps were taken, the loss fell, and losses and final weights are those of one device."""
    losses = [float(loss) for loss in re.findall(r"step .* loss (\S+)", printed)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    found = re.search(
        r"largest difference to one device: (\S+) of a loss, (\S+) of a final weight", printed
    )
    assert found and float(found[1]) < bound and float(found[2]) < bound, printed


@pytest.mark.slow
def test_training_hugging_face_models_equals_one_device(tmp_path: Path) -> None:
    """The other models and policies run on threads, in tests/parity."""
    command = [
        str(EXAMPLES / "train_gpt2.py"),
        "--model",
        "llama",
        "--policy",
        "dp",
        "--check",
        "--float64",
    ]
    assert_training_equals_one_device(torchrun(tmp_path, 2, *command), 1e-10)


@pytest.mark.slow
def test_training_in_float32_on_two_units_of_two_ranks(tmp_path: Path) -> None:
    """The example runs as users run it. Rounding of float32, and nothing worse, adds up over the
    steps.
    """
    printed = torchrun(
        tmp_path,
        4,
        str(EXAMPLES / "train_gpt2.py"),
        "--policy",
        "tp",
        "--plan-ngpus",
        "2",
        "--check",
    )
    assert_training_equals_one_device(printed, 1e-4)


@pytest.mark.slow
def test_compiled_from_the_command_line_and_then_loaded(tmp_path: Path) -> None:
    settings = [
        "--set",
        "outputs=loss",
        "--set",
        "grad_reduction=mean",
        "--gen-savedir",
        str(tmp_path / ".shardwright"),
    ]
    run(
        EXAMPLES,
        "-m",
        "shardwright",
        "compile",
        "train_gpt2:gpt2",
        "--policy",
        "tp",
        "--plan-ngpus",
        "2",
        *settings,
    )
    files = {
        path: path.stat().st_mtime_ns
        for path in tmp_path.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }
    assert len([path for path in files if path.name.startswith("gencode")]) == 2
    printed = torchrun(
        tmp_path, 2, str(EXAMPLES / "train_gpt2.py"), "--reuse", "match", "--steps", "2"
    )
    assert printed.count("loss") == 2
    assert {path: path.stat().st_mtime_ns for path in files} == files, "the files were written anew"


def test_compiling_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compile_offline.py", "--layers", "2", "--plan-ngpus", "4"])
    runpy.run_path(str(EXAMPLES / "compile_offline.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "compiled 2 layers for 4 ranks" in printed and "4 source files" in printed
    assert len(list(tmp_path.rglob("gencode*.py"))) == 4
    assert not [path for path in tmp_path.rglob("*.safetensors") if path.stat().st_size > 2**20], (
        "weights were written"
    )
