"""What a compile of a small GPT prints and writes, as files to read.

Reviewing a change of the compiler is reading a diff.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import plans
import pytest
import tiny_gpt

from shardwright.compiler.compile import Compiled, compile_graph, pass_manager
from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.trace.entry import trace
from shardwright.policies.registry import find_policy
from shardwright.runtime.config import ComputeConfig

HERE = Path(__file__).parent
PLANS = {
    "dp": ("dp", {"plan_ngpus": 1, "runtime_ngpus": 1}),
    "tp": ("tp", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    "data": ("data", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    "zero3": ("dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3}),
    "pp": (
        "pp",
        {
            "plan_ngpus": 2,
            "runtime_ngpus": 2,
            "use_end2end": True,
            "pas_config": {"stage_starts": ["blocks.2"]},
        },
    ),
}
"""Policy and config. ``zero3``: copies on two units that store parameters in pieces."""
ALIKE = ["dp", "tp", "data", "zero3"]
"""Those whose ranks run one program."""
WIDTH = 128


@functools.cache
def compiled(name: str) -> Compiled:
    policy, config = PLANS[name]
    graph = trace(tiny_gpt.GPT(), tiny_gpt.dummy_args())
    apply = find_policy(policy).apply
    return compile_graph(
        graph,
        apply,
        ComputeConfig(**config),
        policy_name=policy,
        digest="0123abcd",
        version="0.1.0",
    )


def test_the_graph(golden: Callable[[str, str], None]) -> None:
    graph = plans.annotated(trace(tiny_gpt.GPT(num_layers=1), tiny_gpt.dummy_args()))
    golden("gpt.graph.txt", print_graph(graph))


@pytest.mark.parametrize("plan", PLANS)
def test_the_program(plan: str, golden: Callable[[str, str], None]) -> None:
    program = compiled(plan).program
    golden(f"gpt.{plan}.program.txt", pass_manager().printers[type(program)](program) + "\n")


@pytest.mark.parametrize("plan", PLANS)
def test_the_files(plan: str, golden: Callable[[str, str], None]) -> None:
    files = compiled(plan).files
    golden(f"gpt.{plan}.py", files["gencode0.py"])
    golden(f"gpt.{plan}.plan.json", files["plan.json"] + "\n")


def test_the_second_stage(golden: Callable[[str, str], None]) -> None:
    golden("gpt.pp.1.py", compiled("pp").files["gencode1.py"])


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_ranks_differ_in_two_lines(policy: str) -> None:
    first, second = (compiled(policy).files[f"gencode{rank}.py"].splitlines() for rank in range(2))
    differing = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
    axis = {"tp": "tp", "data": "dp"}[policy]
    assert differing == [
        (f"rank    0 ({axis}=0)", f"rank    1 ({axis}=1)"),
        ("    rank = 0", "    rank = 1"),
    ]


@pytest.mark.parametrize("plan", PLANS)
def test_generated_files_are_formatted(plan: str, tmp_path: Path) -> None:
    """As ``ruff format`` leaves them, imports sorted, none unused, no line too long."""
    text = compiled(plan).files["gencode0.py"]
    path = tmp_path / "gencode0.py"
    path.write_text(text)
    isort = 'lint.isort.known-first-party = ["shardwright"]'
    for arguments in (
        ["format", "--check", "--diff"],
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
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("plan", ALIKE)
def test_three_layers_are_one_method(plan: str) -> None:
    tree = ast.parse(compiled(plan).files["gencode0.py"])
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert [node.name for node in cls.body if isinstance(node, ast.FunctionDef)] == [
        "declare",
        "forward",
        "blocks_block",
    ]
    text = compiled(plan).files["gencode0.py"]
    assert (
        text.count("self.blocks_block(") == 1 and text.count("        for layer in range(3):") == 2
    )  # in declare, in forward


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {helpers!r})
import tiny_gpt
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.trace.entry import trace
from shardwright.policies.registry import find_policy
from shardwright.runtime.config import ComputeConfig

for name, (policy, config) in {plans!r}.items():
    graph = trace(tiny_gpt.GPT(), tiny_gpt.dummy_args())
    apply = find_policy(policy).apply
    made = compile_graph(
        graph,
        apply,
        ComputeConfig(**config),
        policy_name=policy,
        digest="0123abcd",
        version="0.1.0",
    )
    for file, text in made.files.items():
        Path(sys.argv[1], f"{{name}}.{{file}}").write_text(text)
"""


@pytest.mark.parametrize("seed", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_files_are_the_same_in_every_process(seed: str, tmp_path: Path) -> None:
    """Byte for byte, whatever the order of sets and dicts of strings."""
    script = SCRIPT.format(helpers=str(HERE.parent / "_lib"), plans=PLANS)
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    here = {
        f"{policy}.{name}": text
        for policy in PLANS
        for name, text in compiled(policy).files.items()
    }
    there = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert there.keys() == here.keys()
    for name, text in here.items():
        assert there[name].splitlines() == text.splitlines(), name
        assert there[name] == text, name
