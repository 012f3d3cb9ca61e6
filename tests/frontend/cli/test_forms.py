"""What commands say of a model before it is compiled, and of a shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shardwright.__main__ import main as program
from shardwright.frontend.cli.main import main

MODELS = """
import torch

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

class Odd(torch.nn.Module):
    def forward(self, x):
        return Twice.apply(Twice.apply(x)).sum()

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)

    def forward(self, x):
        return self.up(x).sum()

EXAMPLE = {"x": torch.zeros(4, 8)}
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models_of_forms.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "models_of_forms"


def test_operators_without_a_rule(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--args", f"{models}:EXAMPLE"]
    assert main(["ops", f"{models}:Odd", *given]) == 1
    told = capsys.readouterr().out
    assert f'register_op("a^ b^ -> c^ d^")({models}.Twice)' in told
    assert "2 calls of it in all" in told and "1 without a rule" in told
    assert main(["ops", f"{models}:Plain", *given, "--all"]) == 0
    told = capsys.readouterr().out
    assert "1 x linear" in told and "all of them have a rule" in told


def test_forms_after_passes(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["trace", f"{models}:Plain", "--args", f"{models}:EXAMPLE", "--policy", "tp"]
    given += ["--plan-ngpus", "2"]
    assert main([*given, "--pass", "lower"]) == 0
    assert "up_weight: [16/tp, 8]" in capsys.readouterr().out
    assert main([*given, "--out", "forms"]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert written[0].name == "00-trace.txt" and all(path.stat().st_size for path in written)
    # Nothing of a compile is left.
    assert not Path(".shardwright").exists()
    assert main([*given, "--pass", "lowr"]) == 1
    assert "no pass is called 'lowr'" in capsys.readouterr().err


def test_completion_and_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    asked = "COMP_WORDS=(shardwright {}); COMP_CWORD={}; _shardwright; echo ${{COMPREPLY[@]}}"
    lines = [script, asked.format("mer", 1), asked.format("merge-checkpoint --max", 2)]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["merge merge-checkpoint", "--max-file-size"]
    assert program(["merge-checkpoint", "nowhere", "out"]) == 1
    assert "there is no checkpoint in nowhere" in capsys.readouterr().err


def test_the_demo_is_a_script_of_the_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    done = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command) or done)
    assert main(["demo"]) == 3
    assert Path(ran[0][1]).is_file() and ran[0][1].endswith("examples/demo.py")
    monkeypatch.setattr("shardwright.frontend.cli.demo.EXAMPLES", tmp_path)
    assert program(["demo"]) == 1
    assert "the demo is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_the_doctor_lets_two_ranks_meet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "two ranks, gloo    all_reduce is right" in told and "no problem found" in told
