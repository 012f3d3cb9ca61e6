"""Generated files are as the formatter leaves them, whatever the model, the mesh and the
options.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import plans
import pytest
import tiny_gpt

from shardwright.compiler.codegen.text import WIDTH
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.trace.entry import trace
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig

STEPS = {"use_end2end": True}
TP_PP = {"plan_ngpus": 4, "runtime_ngpus": 4, "pas_config": {"pipeline_nstages": 2}, **STEPS}
DYNAMIC = {"dynamic_dims": {"tokens": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}}
FEW = {
    "llama, tp x pp": ("llama", "hybrid", TP_PP),
    "gpt2, tp x pp over many ranks": (
        "gpt2",
        "hybrid",
        {**TP_PP, "plan_ngpus": 64, "runtime_ngpus": 64},
    ),
    "bert, ZeRO-3": ("bert", "dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3}),
    "tp x pp of varying sizes": ("tiny_gpt", "hybrid", {**TP_PP, **DYNAMIC}),
}
MANY = {
    "t5, tp x pp with ZeRO-3": ("t5", "hybrid", {**TP_PP, "runtime_ngpus": 8, "use_zero": 3}),
    "llama, 40 microbatches": (
        "llama",
        "pp",
        {**TP_PP, "plan_ngpus": 2, "pas_config": {"pipeline_nmicros": 40}},
    ),
    "gpt2, recomputed": (
        "gpt2",
        "pp",
        {**TP_PP, "plan_ngpus": 2, "pas_config": {"recompute": ["transformer.h.*"]}},
    ),
    "vit, data": ("vit", "data", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    "t5, tp": ("t5", "tp", {"plan_ngpus": 3, "runtime_ngpus": 3}),
    "resnet, pp": ("resnet", "pp", {**TP_PP, "plan_ngpus": 2, "pas_config": {}}),
}


def files_of(model: str, policy: str, options: dict[str, Any]) -> dict[str, str]:
    config = ComputeConfig(**options)
    if model == "tiny_gpt":  # quickly traced
        module, inputs = tiny_gpt.GPT(num_layers=2), tiny_gpt.dummy_args()
        graph = trace(module, inputs, dynamic_dims=config.dim_symbols())
    else:
        graph = plans.zoo_traced(model)
    return compile_graph(graph, find_policy(policy).apply, config, policy_name=policy).files


def write_files(files: dict[str, str], directory: Path) -> None:
    """Every file parses."""
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text)
            (directory / name).write_text(text)


def check_format(directory: Path) -> None:
    """The formatter and the linter leave all files as they are."""
    isort = 'lint.isort.known-first-party = ["shardwright"]'
    for arguments in (
        ["format", "--diff"],
        ["check", "--select", "E,F,W,I,UP,B", "--config", isort],
    ):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *arguments,
            "--isolated",
            "--line-length",
            str(WIDTH),
            str(directory),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[:3000] + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_generated_files_are_formatted(cases: dict[str, Any], tmp_path: Path) -> None:
    """The formatter looks at the files of all cases at once, as starting it takes longest."""
    for number, case in enumerate(cases.values()):
        (tmp_path / str(number)).mkdir()
        write_files(files_of(*case), tmp_path / str(number))
    check_format(tmp_path)
