"""The program for one GPU, with the CPU in its place: few plans, files compiled by one process and
run by another that has no ortools.
"""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

SCRIPT = """
import sys
from dataclasses import replace

if {action!r} == "run":
    sys.modules["ortools"] = None  # importing it fails
sys.path.insert(0, {benchmarks!r})
import one_gpu, one_gpu_exact, one_gpu_plans
import shardwright

chosen = ("ZeRO-3", "tp", "cp, ring")
one_gpu_exact.PLANS = tuple(plan for plan in one_gpu_exact.PLANS if plan.name in chosen)
small = one_gpu_plans.STAND_IN
one_gpu_plans.STAND_IN = replace(small, plans=(small.plans[1], small.plans[5]), num_pairs=1)
one_gpu.calibrate = lambda *args, **options: shardwright.load_hardware("cpu", 1)
sys.argv = ["one_gpu.py", {action!r}, {folder!r}, "--stand-in"]
sys.exit(one_gpu.main())
"""


@pytest.mark.slow
def test_files_of_another_machine_run_without_ortools(tmp_path: Path) -> None:
    said = []
    for action in ("compile", "run"):
        script = SCRIPT.format(action=action, benchmarks=str(BENCHMARKS), folder=str(tmp_path))
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    lines = said[1].splitlines()
    assert lines[-1].startswith("18 of 18 are right")
    assert any("plan: half batch: step" in line for line in lines)
