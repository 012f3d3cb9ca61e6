"""What is passed by mistake to anything public is refused in words: never an exception of another
kind, never for long.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import bad_inputs
import pytest
import torch
from torch import nn

import shardwright
from shardwright import ArgumentError, ComputeConfig, Mesh, rank_groups
from shardwright.compiler.ops.prover import prove
from shardwright.compiler.schedule.files import from_csv
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, PlanError


def test_classes_have_the_names_under_which_they_are_imported() -> None:
    for kind, value, words in (
        (shardwright.load_checkpoint, {"module": 3}, "'module' is a torch.nn.Module"),
        (
            shardwright.save_checkpoint,
            {"module": nn.Linear(1, 1), "optimizer": 3},
            "a torch.optim.Optimizer or None",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            kind("checkpoints", **value)


def test_some_bad_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = bad_inputs.run("configs", "hardware", "schedules", "builder", share=0.02)
    assert counts.refused and [str(trouble) for trouble in counts.troubles] == []
    assert list(tmp_path.iterdir()) == []


ONCE_RAW = {
    "pas_config of pp, schedule": [("value", "10**5000")],
    "pas_config of pp, num_stages": [("value", "10**5000")],
    "pas_config of hybrid, dp": [("value", "0"), ("value", "-1")],
    "pas_config of autodist, num_microbatches": [("value", "10**5000")],
    "run_ranks": [("num_ranks", "10**30")],
    "scale_grads": [("factor", "10**30")],
    "save_checkpoint": [
        ("extra", "10**5000"),
        ("extra", "meta tensor"),
        ("step", "10**5000"),
        ("step", "odd"),
    ],
    "export_pretrained": [
        ("config", "'x'*5000"),
        ("config", "{1: 2}"),
        ("config", "{'x': odd}"),
        ("config", "cyclic dict"),
    ],
    "verify": [("optimizer", "lambda *a, **k: None")],
    "loader": [
        ("dataset", "cyclic list"),
        ("dataset", "scalar tensor"),
        ("roles_or_plan", "'x'*5000"),
        ("num_workers", "10**30"),
        ("prefetch_factor", "10**30"),
        ("device", "odd"),
    ],
    "roles": [("num_replicas", "10**30")],
    "SavableDataset": [("batch_size", "10**30"), ("source", "None")],
    "TarShards": [("paths", "generator"), ("paths", "'x'*5000")],
    "write_token_file": [("documents", "[None]"), ("dtype", "odd")],
    "document_mask": [("document_ids", "[]")],
    "combine": [("routing", "None"), ("rows", "scalar tensor")],
    "dispatch": [("chosen", "tensor"), ("num_experts", "10**30")],
}
"""Calls that ended in an exception of another kind once: argument and value, by function."""


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("options", [name for name in ONCE_RAW if name.startswith("pas_config")]),
        ("ranks", ["run_ranks"]),
        ("optimizers", ["scale_grads"]),
        ("checkpoints", ["save_checkpoint", "export_pretrained"]),
        ("compile", ["verify"]),
        ("data", ["loader", "roles", "SavableDataset", "TarShards", "write_token_file"]),
        ("data", ["document_mask"]),
        ("experts", ["combine", "dispatch"]),
    ],
)
def test_inputs_that_were_not_refused_once(
    group: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = {call for name in names for call in ONCE_RAW[name]}
    counts = bad_inputs.run(group, names=names, calls=wanted)
    assert counts.refused or counts.accepted
    assert [str(trouble) for trouble in counts.troubles] == []


NO_TARGETS = {
    # made by others, and tried where these are
    "CursorLoader", "IRGraph", "ParallelModule", "Role", "Roles", "SavableLoader", "StreamLoader",
    # other names, or the same arguments
    "energon_worker_config", "get_train_dataset", "get_val_dataset", "load_merged_state_dicts",
    # a library reads the files
    "Tables",
    # without arguments, or a choice of names
    "BroadcastGenFilesStrategy", "ReuseType", "count_communication",
}  # fmt: skip


@pytest.mark.parametrize("package", [shardwright, shardwright.data, shardwright.experts])
def test_everything_public_is_tried(package: ModuleType) -> None:
    rooms = {inspect.getmodule(make) for make in bad_inputs.MAKERS}
    source = "".join(inspect.getsource(room) for room in rooms if room is not None)
    callables = [
        name
        for name in package.__all__
        if callable(value := getattr(package, name))
        and not (isinstance(value, type) and issubclass(value, BaseException))
    ]
    assert [
        n for n in callables if n not in NO_TARGETS and not re.search(rf"\b{n}\b", source)
    ] == []


@checked
def example(
    directory: Path | str, names: list[str], keep: int | None = 2, *, rate: float = 1.0
) -> None:
    """What is called with wrong arguments below."""


def test_the_text_of_a_wrong_argument() -> None:
    example("folder", ["a"], rate=1)
    usage = (
        "  try:   example(directory: Path | str, names: list[str], keep: int | None = 2, rate: "
        "float = 1.0)"
    )
    cases = {
        (3, ("a",)): "argument 'directory' is a path\n  why:   it is 3, an int\n",
        ("a", ("b", 1)): "argument 'names' is a list, each element a string\n"
        "  why:   element 1 is 1, an int\n",
        ("a", (), True): "argument 'keep' is a whole number or None\n  why:   it is True, a bool\n",
    }
    for call, words in cases.items():
        directory, names, *rest = call
        with pytest.raises(ArgumentError) as refused:
            example(directory, list(names), *rest)
        assert str(refused.value) == f"example: {words}{usage}"
    with pytest.raises(ArgumentError, match="missing a required argument: 'names'"):
        example("a")
    with pytest.raises(ArgumentError, match="the value of 'tp' is 2.5, a float"):
        rank_groups("tp-dp", {"dp": 2, "tp": 2.5}, "dp")


def test_a_schedule_of_too_many_microbatches() -> None:
    with pytest.raises(PlanError, match="its numbers have more than six digits"):
        from_csv("0F0,99999999999F2")


@pytest.mark.slow
def test_more_ranks_than_there_are(tmp_path: Path) -> None:
    """Refused before anything is made of them."""
    (tmp_path / "net.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), {'input': "
        "torch.zeros(4, 2)}\n"
    )
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "compile",
        "net:make",
        "--policy",
        "tp",
        "--plan-ngpus",
        "9" * 20,
    ]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 1 and "plan_ngpus is a whole number of at most 1,048,576" in run.stderr


def test_numbers_beyond_all_use() -> None:
    """They would not end, or end in the words of torch."""
    x = torch.ones(4, dtype=torch.float64)
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1)
    with pytest.raises(ArgumentError, match="argument 'seed' is a whole number from 0 to"):
        prove(torch.relu, (x,), seed=10**30)
    for name in ("steps", "num_samples"):
        with pytest.raises(
            ConfigError, match=f"{name}=1000000000000000000000000000000 is too many to compare"
        ):
            verify(torch.nn.ReLU(), {"input": x}, "dp", config, **{name: 10**30})


def test_too_many_arguments_of_a_mesh() -> None:
    with pytest.raises(ArgumentError, match="Mesh: too many positional arguments"):
        Mesh((("tp", 2),), (), 3)  # type: ignore[call-arg]
