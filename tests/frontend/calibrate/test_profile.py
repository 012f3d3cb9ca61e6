"""Measured operators: every call of a plan once, kept in a file, and used by the audit."""

import json
from pathlib import Path

import pytest
import torch
from covers import spread
from plans import compile_with, zoo_traced

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime, call_key
from shardwright.compiler.cost.time.operator_file import dumps_times, load_times, times_file
from shardwright.compiler.plan.program import Compute, Program
from shardwright.frontend.calibrate.profile import profile
from shardwright.frontend.cli.main import main
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError

SLOW = Hardware(
    "toy",
    Device("toy", 10**9, {"float32": 1e3, "float64": 1e3}, 1e3, 1.0),
    (Tier("link", (8,), 0.0, 1e30),),
)
CPU = torch.device("cpu")


def program_of(policy: str, num_ranks: int) -> Program:
    program = compile_with(zoo_traced("gpt2"), policy, num_ranks).program
    assert isinstance(program, Program)
    return program


@pytest.mark.parametrize("policy", spread(["dp", "tp"], 2, first=1))
def test_every_call_of_a_rank_is_measured(policy: str, tmp_path: Path) -> None:
    num_ranks = 2 if policy == "tp" else 1
    program = program_of(policy, num_ranks)
    found = profile([program], CPU, point_s=1e-4, sample_s=1e-5)
    assert found.failed == {}
    mesh = program.plan.mesh
    calls = [
        local_call(i.original, i.assignment, mesh) for i in program.body if isinstance(i, Compute)
    ]
    assert {call_key(call) for call in calls} == found.times.entries.keys()
    for call in calls:
        time = found.times.entries[call_key(call)]
        assert 0 < time.forward_s < 1 and (time.backward_s > 0) == bool(call.differentiated), (
            call.op.name
        )
    config = ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=num_ranks)
    estimated, measured = (
        audit(program, config, SLOW, times=times).compute_s for times in (None, found.times)
    )
    # Estimates of this machine take a second for each operator at least.
    assert measured < estimated


def test_what_is_known_is_kept() -> None:
    program = program_of("dp", 1)
    first = next(i for i in program.body if isinstance(i, Compute))
    key = call_key(local_call(first.original, first.assignment, program.plan.mesh))
    found = profile(
        [program], CPU, known=OperatorTimes({key: OpTime(5.0, 7.0)}), point_s=1e-4, sample_s=1e-5
    )
    assert found.times.entries[key] == OpTime(5.0, 7.0) and len(found.times.entries) > 10


def test_times_lie_beside_the_machine(tmp_path: Path) -> None:
    hardware = str(tmp_path / "own.json")
    file = times_file(hardware)
    assert file == tmp_path / "own.operators.json" and times_file("h100") is None
    assert load_times(hardware) is None and load_times("h100") is None
    times = OperatorTimes({'gelu [[4], "float32", true]': OpTime(1.0, 2.0)})
    file.write_text(dumps_times(times))
    assert load_times(hardware) == times
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "operators": {"gelu": [1.0]}}))
    with pytest.raises(ConfigError) as error:
        load_times(hardware)
    assert str(error.value) == (
        "operators.gelu has two numbers of at least 0, seconds of the forward and of the backward\n"
        f"  where: {file}\n"
        "  why:   it is [1.0]"
    )


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profiled_models.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), {'input': "
        "torch.zeros(4, 8)}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own.json").write_text(SLOW.dumps())
    threads = torch.get_num_threads()
    request = ["profiled_models:make", "--policy", "dp", "--plan-ngpus", "1", "--hardware"]
    try:
        assert main(["simulate", *request, "own.json", "--json"]) == 0
        estimated = json.loads(capsys.readouterr().out)["step_s"]
        assert main(["profile", *request, "own.json"]) == 0
        assert (
            capsys.readouterr().out
            == "3 calls measured, 0 known before; file: own.operators.json\n"
        )
        assert main(["simulate", *request, "own.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_s"] < estimated - 3
        assert main(["profile", *request, "own.json"]) == 0
        assert (
            capsys.readouterr().out
            == "0 calls measured, 3 known before; file: own.operators.json\n"
        )
        assert main(["profile", *request, "h100"]) == 1
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().err == (
        "error: --hardware h100 is no hardware file\n"
        "  why:   times are kept beside the file of the machine they were measured on\n"
        "  try:   shardwright calibrate --out laptop.json writes one\n"
    )
