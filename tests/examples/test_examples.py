"""The examples do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(folder: Path, *command: str) -> str:
    """Run Python in ``folder`` and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(folder: Path, num_ranks: int, *command: str) -> str:
    return run(folder, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", *command)


@pytest.mark.slow
def test_the_demo_agrees_with_one_device(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "demo.py"))
    difference = re.search(r"largest difference over 20 steps: (\S+)", printed)
    assert difference and float(difference[1]) < 1e-12
    assert "def forward(self, tokens)" in printed and "all_reduce" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [
        (2, ["--policy", "tp"]),
        (2, ["--policy", "dp", "--plan-ngpus", "1"]),
        (2, ["--policy", "data", "--model", "llama"]),
        (4, ["--policy", "tp", "--plan-ngpus", "2", "--model", "llama"]),
    ],
    ids=lambda value: value if isinstance(value, int) else " ".join(value),
)
def test_training_hugging_face_models_agrees_with_one_device(tmp_path: Path, num_ranks: int, arguments: list[str]) -> None:
    """In float32, as users run it; the exact comparison in float64 is made by the parity tests."""
    printed = torchrun(tmp_path, num_ranks, str(EXAMPLES / "train_gpt2.py"), *arguments, "--check")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    difference = re.search(r"largest difference to one device: (\S+)", printed)
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    assert difference and float(difference[1]) < 1e-4


def test_compiling_offline(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "compile_offline.py"), "--layers", "2", "--plan-ngpus", "4")
    assert "compiled 2 layers for 4 ranks" in printed and "4 source files" in printed
    assert len(list(tmp_path.rglob("gencode*.py"))) == 4
    assert not [path for path in tmp_path.rglob("*.safetensors") if path.stat().st_size > 2**20], "weights were written"
